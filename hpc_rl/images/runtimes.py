"""The container runtimes, one row each. docs/extending.md shows how to add one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_rl.config.container import ContainerConfig
from hpc_rl.config.job import JobConfig
from hpc_rl.errors import UserError
from hpc_rl.images.sif import check_image

ImageCheck = Callable[[str, str | None], str | None]
"""(image, architecture of the nodes or None) -> a note for the user or None; raises UserError if it cannot be used."""


@dataclass(frozen=True)
class ContainerRuntime:
    """How the processes of a job are started inside an image.

    container.sh, which is rendered with the job, runs on each node:

        PROGRAM START OPTIONS ENV_FILE"$file" IMAGE SEPARATOR env HOME=/tmp COMMAND
    """

    check_image: ImageCheck
    """What the login node can check of an image."""
    programs: tuple[str, ...] = ()
    """Programs to look for on a node's PATH; the first one found is used. Empty if srun starts the container."""
    start: tuple[str, ...] = ()
    """Words after the program that make it run a command in an image."""
    isolate: tuple[str, ...] = ()
    """Options that keep the host's environment and the user's home folder out of the image."""
    gpu: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Value of container.gpu -> options that bind the GPU's libraries and devices."""
    workdir: str = ""
    """Option that sets the working folder inside, followed by the folder."""
    bind: str = ""
    """Option that binds a folder of the host, followed by SRC[:DST[:OPTIONS]]."""
    env_file: str = ""
    """Option that reads environment variables from a file; it ends with a space or =, and the file follows."""
    separator: tuple[str, ...] = ()
    """Words between the image and the command."""
    unpack: tuple[str, ...] = ()
    """Words after the program that unpack an image, followed by the folder and the image; empty if it cannot."""
    srun_options: Callable[[JobConfig, str, Path, Sequence[str]], list[str]] | None = None
    """For runtimes that are a plug-in of srun: (configuration, image, working folder, binds) -> options of srun."""

    @property
    def has_script(self) -> bool:
        """Return whether container.sh starts the container, instead of srun."""
        return self.srun_options is None

    def options(self, config: JobConfig, pwd: Path, binds: Sequence[str]) -> list[list[str]]:
        """Return the options of the program, each with its value.

        The image has its own environment, apart from the file that container.sh adds. The user's home folder stays
        outside, because packages in ~/.local would take precedence over those of the image.

        Args:
            config: the job's configuration.
            pwd: working folder inside the image.
            binds: SRC[:DST[:OPTIONS]].
        """
        gpu = self.gpu.get(config.container.gpu, ()) if config.trainer.uses_gpus else ()
        plain = [*self.isolate, *config.container.options, *gpu]
        return [*([option] for option in plain), [self.workdir, str(pwd)], *([self.bind, bind] for bind in binds)]


def runtime_of(container: ContainerConfig) -> ContainerRuntime:
    """Return the row of container.runtime.

    Raises:
        UserError: there is no such runtime.
    """
    if container.runtime not in RUNTIMES:
        raise UserError(f"container.runtime {container.runtime!r}: choose one of {', '.join(RUNTIMES)}")
    return RUNTIMES[container.runtime]


def find_program(programs: Sequence[str]) -> str | None:
    """Return the path of the first program that is on PATH."""
    return next((found for name in programs if (found := shutil.which(name))), None)


def missing(programs: Sequence[str]) -> str:
    """Return the beginning of a message that none of the programs is on PATH."""
    return f"no {' and no '.join(programs)} on PATH"


def _check_sif(image: str, architecture: str | None) -> None:
    check_image(Path(image).absolute(), architecture)


def _check_file_or_registry(image: str, _architecture: str | None) -> str | None:
    """Check a file, or accept a name in a registry that srun's plug-in fetches."""
    if image.startswith(("/", ".")) and not Path(image).exists():
        raise UserError(f"image {image}: no such file")
    return None if Path(image).exists() else f"image {image} is fetched from its registry when the job starts"


def _pyxis_options(config: JobConfig, image: str, pwd: Path, binds: Sequence[str]) -> list[str]:
    """Return options of srun for the pyxis plug-in (its README, "Usage").

    Pyxis passes the environment, but the variables of the image take precedence; those that the user set are named.
    """
    container = config.container
    mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in binds)
    names = [*config.slurm.env, *(name for name in container.env if not name.endswith("*"))]
    return [
        f"--container-image={image}",
        *([f"--container-mounts={mounts}"] if mounts else []),
        f"--container-workdir={pwd}",
        "--no-container-mount-home",
        *([f"--container-env={','.join(names)}"] if names else []),
        *container.options,
    ]


_APPTAINER = ContainerRuntime(
    check_image=_check_sif,
    programs=("apptainer",),
    start=("--silent", "exec"),
    isolate=("--cleanenv", "--no-home"),
    gpu={"nv": ("--nv",), "rocm": ("--rocm",)},
    workdir="--pwd",
    bind="--bind",
    env_file="--env-file ",
    unpack=("--silent", "build", "--sandbox"),
)
RUNTIMES: dict[str, ContainerRuntime] = {
    "auto": replace(_APPTAINER, programs=("apptainer", "singularity")),
    "apptainer": _APPTAINER,
    "singularity": replace(_APPTAINER, programs=("singularity",)),
    "pyxis": ContainerRuntime(check_image=_check_file_or_registry, srun_options=_pyxis_options),
}
"""container.runtime -> how it is called."""
