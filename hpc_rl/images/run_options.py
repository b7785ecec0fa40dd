"""How a job's processes run inside an image: options of the runtime. Pure, but for asking which paths exist.

srun and sbatch stay outside. Each node's task is `bash container.sh COMMAND`, and that script, rendered with the job
and as editable, starts the runtime with the options that are made here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.config.container import ContainerConfig
from hpc_rl.config.job import JobConfig
from hpc_rl.config.slurm import walltime_s
from hpc_rl.errors import UserError

PASSED = (
    *("SLURM_*", "HPC_RL_*", "HF_*", "TRANSFORMERS_*", "WANDB_*", "RAY_*", "VLLM_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*", "OMP_*", "MKL_*", "TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NVIDIA_*", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY", "NETRC", "TOKENIZERS_PARALLELISM", "TZ"),
)
"""Environment variables that reach the inside, as patterns of bash. PATH, PYTHONPATH, LD_LIBRARY_PATH and their like
are the image's own: a module loaded on the host would lead its Python astray."""
CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TORCH_HOME"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "NETRC"),
)
"""Variables whose folder or file is bound, where it exists on the node."""
LONG_S = 3600
"""Walltime over which a job does not trust a FUSE mount."""


def image_location(container: ContainerConfig) -> str:
    """The image as the nodes find it: an absolute path; pyxis also knows names in registries."""
    image = container.image or ""
    return image if container.runtime == "pyxis" and not Path(image).exists() else str(Path(image).absolute())


def runs_inside(container: ContainerConfig) -> bool:
    """Whether container.sh is the way in; pyxis is part of srun instead."""
    return container.image is not None and container.runtime != "pyxis"


def exec_options(config: JobConfig, pwd: Path, binds: Sequence[str]) -> list[list[str]]:
    """Options of `apptainer exec`, or of singularity's: one name and its value each.

    The image's environment is its own but for the file that container.sh adds, and the user's home stays outside:
    packages in ~/.local would come before the image's.

    Args:
        pwd: working folder inside.
        binds: SRC[:DST[:OPTIONS]].
    """
    container = config.container
    gpu = [[f"--{container.gpu}"]] if config.trainer.uses_gpus else []
    return [
        ["--cleanenv"],
        ["--no-home"],
        *([option] for option in container.options),
        *gpu,
        ["--pwd", str(pwd)],
        *(["--bind", bind] for bind in binds),
    ]


def pyxis_options(config: JobConfig, pwd: Path, binds: Sequence[str]) -> list[str]:
    """Options of srun where the pyxis plugin is installed (its README, "Usage").

    Pyxis passes the environment by itself, but the image's variables win: those that the user set are named.
    """
    container = config.container
    mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in binds)
    names = [*config.slurm.env, *(name for name in container.env if not name.endswith("*"))]
    return [
        f"--container-image={image_location(container)}",
        *([f"--container-mounts={mounts}"] if mounts else []),
        f"--container-workdir={pwd}",
        "--no-container-mount-home",
        *([f"--container-env={','.join(names)}"] if names else []),
        *container.options,
    ]


def passed_names(config: JobConfig) -> list[str]:
    """Patterns of the variables that are passed in."""
    return list(dict.fromkeys([*PASSED, *config.slurm.env, *config.container.env]))


def job_binds(config: JobConfig, run_dir: Path, working_dir: Path, program: Sequence[str] = ()) -> list[str]:
    """Run directory, working folder, every path that configuration and program name, and the user's own binds.

    A path that is a link is bound at both of its places; one that lies in another is left out.

    Raises:
        UserError: a path has a comma or a colon, which no bind can hold.
    """
    texts = [*_texts(config.model_dump(exclude={"slurm", "container"})), *program]
    named = [str(working_dir / _path_in(text)) for text in texts]
    wanted = [str(run_dir), str(working_dir), *filter(os.path.exists, named)]
    places = sorted({place for path in wanted for place in (os.path.normpath(path), os.path.realpath(path))})
    kept: list[str] = []
    for place in places:
        if place != "/" and not any(Path(place).is_relative_to(other) for other in kept):
            kept.append(place)
    for place in kept:
        if set(place) & set(":,"):
            raise UserError(f"{place} cannot be bound into an image: its path has a colon or a comma")
    return [*kept, *config.container.binds]


def unpacks(config: JobConfig) -> bool:
    """Whether container.sh tries to run from a copy on the node's own disk."""
    container, time = config.container, config.slurm.time
    if container.unpack != "auto":
        return container.unpack == "always"
    seconds = None if time is None else walltime_s(time)
    return seconds is None or seconds > LONG_S


def runtimes(container: ContainerConfig) -> list[str]:
    """Programs that may run the image, the best first."""
    return ["apptainer", "singularity"] if container.runtime == "auto" else [container.runtime]


def _texts(tree: Any) -> Iterator[str]:
    """Every text in a tree of values."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)


def _path_in(text: str) -> str:
    """The path that a value is, if it is one; of a reward function, path/file.py:name, the file's folder."""
    file, py, _ = text.rpartition(".py:")
    return str(Path(file).parent) if py else text
