"""What a job's image gets to see of the host: paths, environment variables, and whether it is unpacked first.

srun and sbatch stay outside of the image. The task of each node is `bash container.sh COMMAND`; this script is rendered
with the job, can be edited like it, and starts the runtime with these options.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hpc_rl.config.container import ContainerConfig
from hpc_rl.config.job import JobConfig
from hpc_rl.config.rl.carriers import CARRIERS
from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.slurm import walltime_s
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.config.tree import VALUES, flat
from hpc_rl.errors import UserError
from hpc_rl.images.runtimes import find_program, missing, runtime_of
from hpc_rl.run_dir import RunDir
from hpc_rl.software import jit_caches
from hpc_rl.system.ownership import refuse_foreign

PASSED = (
    *("SLURM_*", "HPC_RL_*", "HF_*", "TRANSFORMERS_*", "WANDB_*", "RAY_*", "TORCH_*", "TORCHINDUCTOR_*"),
    *("PYTORCH_*", "TRITON_*", "FLASHINFER_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "OMP_*", "MKL_*", "NVIDIA_*"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_CACHE_PATH", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_*", "ONEAPI_DEVICE_SELECTOR", "CCL_KVS_*", "CCL_LOG_LEVEL"),
    *("ASCEND_RT_VISIBLE_DEVICES", "HCCL_*", "http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY", "NETRC", "TOKENIZERS_PARALLELISM", "TZ"),
    *(pattern for engine in ENGINES.values() for pattern in engine.variables),
    *(pattern for carrier in CARRIERS.values() for pattern in carrier.variables),
)
"""Environment variables that are passed into the image, as patterns of bash. The image has its own PATH, PYTHONPATH and
LD_LIBRARY_PATH, because a module that is loaded on the host would break its Python."""
CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TORCH_HOME"),
    *(*jit_caches.VARIABLES, "NETRC"),
)
"""Variables whose folder or file is bound if it exists on the node."""
LONG_S = 3600
"""Walltime above which a job runs from an unpacked image, since a FUSE mount may fail in a long job."""


def image_preflight(container: ContainerConfig) -> tuple[Callable[[ContainerConfig], str | None], ...]:
    """Return the checks of a job's image that are possible on the login node; none without an image.

    Each returns a note for the user or None, and raises UserError if the image cannot be used.
    """
    runtime = runtime_of(container)
    if container.image is None:
        return ()
    return (check_image, check_binds, check_programs) if runtime.has_script else (check_image,)


def check_image(container: ContainerConfig) -> str | None:
    image = Path(str(container.image))
    if not image.is_absolute() and image.exists():
        refuse_foreign(f"container.image {image}", image)
    return runtime_of(container).check_image(str(container.image), container.arch)


def check_binds(container: ContainerConfig) -> str | None:
    sources = [bind.partition(":")[0] for bind in container.binds]
    unseen = [source for source in sources if not Path(source).exists()]
    return f"not on this machine, and needed on the nodes: {', '.join(unseen)} (container.binds)" if unseen else None


def check_programs(container: ContainerConfig) -> str | None:
    programs = runtime_of(container).programs
    if find_program(programs):
        return None
    return f"{missing(programs)} here: whether the nodes have one shows when the job starts"


def image_location(container: ContainerConfig) -> str:
    """Return the image as the nodes find it: an absolute path, or for a plug-in of srun also a name in a registry."""
    image = container.image or ""
    is_path = runtime_of(container).has_script or Path(image).exists()
    return str(Path(image).absolute()) if is_path else image


def has_container_script(container: ContainerConfig) -> bool:
    """Return whether container.sh starts the job's processes in an image."""
    return container.image is not None and runtime_of(container).has_script


def passed_names(config: JobConfig) -> list[str]:
    """Return patterns of the environment variables that are passed into the image."""
    key = config.rollout.openai.key_variable if isinstance(config, GenerateConfig) else None
    return list(dict.fromkeys([*PASSED, *config.slurm.env, *config.container.env, *([key] if key else [])]))


def job_binds(config: JobConfig, run_dir: Path, working_dir: Path, program: Sequence[str] = ()) -> list[str]:
    """Return the run directory, the working folder, slurm.node_folders, every path in configuration and program, and
    the user's binds.

    A symbolic link is bound at both of its places; a path that lies in another one is left out.

    Raises:
        UserError: a path contains a comma or a colon, which a bind cannot contain.
    """
    options = config.model_dump(exclude={"slurm", "container"})
    weighted = [value for key, value in flat(options).items() if key in VALUES and isinstance(value, dict)]
    texts = [*_texts(options), *chain.from_iterable(weighted), *program]
    named = [str(working_dir / _path_in(text)) for text in texts]
    wanted = [str(run_dir), str(working_dir), *config.slurm.node_folders, *filter(os.path.exists, named)]
    places = sorted({place for path in wanted for place in (os.path.normpath(path), os.path.realpath(path))})
    kept: list[str] = []
    for place in places:
        if place != "/" and not any(Path(place).is_relative_to(other) for other in kept):
            kept.append(place)
    for place in kept:
        _refuse_unbindable(place)
    return [*kept, *config.container.binds]


def tokenized_folder(config: JobConfig, run_dir: RunDir, working_dir: Path) -> str | None:
    """Return the folder of tokenized data, which container.sh creates and binds, since it may not exist before the job;
    None if the working folder, which is bound, contains it.

    Raises:
        UserError: see `job_binds`.
    """
    if not isinstance(config, FinetuneConfig | PpoConfig | GenerateConfig):
        return None
    place = os.path.normpath(working_dir / (config.cache.data_dir or run_dir.tokenized))
    if Path(place).is_relative_to(working_dir):
        return None
    _refuse_unbindable(place)
    return place


def unpacks(config: JobConfig) -> bool:
    """Return whether container.sh tries to run from a copy on the node's own disk."""
    container, time = config.container, config.slurm.time
    if not runtime_of(container).unpack:
        return False
    if container.unpack != "auto":
        return container.unpack == "always"
    seconds = None if time is None else walltime_s(time)
    return seconds is None or seconds > LONG_S


def _refuse_unbindable(place: str) -> None:
    if set(place) & set(":,"):
        raise UserError(f"{place} cannot be bound into an image: its path contains a colon or a comma")


def _texts(tree: Any) -> Iterator[str]:
    """Yield every text in a tree of values."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        yield from _texts(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _texts(value)


def _path_in(text: str) -> str:
    """Return the path in a value; for a reward function, path/file.py:name, the folder of the file."""
    file, py, _ = text.rpartition(".py:")
    return str(Path(file).parent) if py else text
