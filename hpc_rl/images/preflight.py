"""What the login node can know of a job's image."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from hpc_rl.config.container import ContainerConfig
from hpc_rl.errors import UserError
from hpc_rl.images.run_options import runtimes
from hpc_rl.images.sif import check_image


def container_checks(container: ContainerConfig) -> tuple[Callable[[ContainerConfig], str | None], ...]:
    """The checks of a job's image that apply; none without an image.

    Each returns what can only be seen on the nodes, and raises UserError for what is wrong.
    """
    if container.image is None:
        return ()
    return (check_pyxis,) if container.runtime == "pyxis" else (check_file, check_binds, check_runtime)


def check_pyxis(container: ContainerConfig) -> str | None:
    """A file, or a name in a registry, which srun's plugin reads."""
    image = str(container.image)
    if image.startswith(("/", ".")) and not Path(image).exists():
        raise UserError(f"image {image}: no such file")
    return None if Path(image).exists() else f"image {image} is fetched from its registry when the job starts"


def check_file(container: ContainerConfig) -> None:
    check_image(Path(str(container.image)).absolute(), container.arch)


def check_binds(container: ContainerConfig) -> str | None:
    sources = [bind.partition(":")[0] for bind in container.binds]
    unseen = [source for source in sources if not Path(source).exists()]
    return f"not on this machine, and needed on the nodes: {', '.join(unseen)} (container.binds)" if unseen else None


def check_runtime(container: ContainerConfig) -> str | None:
    programs = runtimes(container)
    if any(shutil.which(name) for name in programs):
        return None
    return f"no {' and no '.join(programs)} on PATH here: whether the nodes have one is seen when the job starts"
