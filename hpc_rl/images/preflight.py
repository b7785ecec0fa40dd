"""What the login node can know of a job's image."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpc_rl.config.job import JobConfig
from hpc_rl.errors import UserError
from hpc_rl.images.run_options import runtimes
from hpc_rl.images.sif import check_image


def image_checks(config: JobConfig) -> list[Callable[[], str | None]]:
    container = config.container
    if container.image is None:
        return []
    if container.runtime == "pyxis":
        return [partial(check_pyxis, container.image)]
    return [
        partial(check_image, Path(container.image).absolute(), container.arch),
        partial(check_binds, container.binds),
        partial(check_runtime, runtimes(container)),
    ]


def check_pyxis(image: str) -> str | None:
    """A file or a name in a registry, which srun's plugin reads."""
    if image.startswith(("/", ".")) and not Path(image).exists():
        raise UserError(f"image {image}: no such file")
    return None if Path(image).exists() else f"image {image} is fetched from its registry when the job starts"


def check_binds(binds: list[str]) -> str | None:
    unseen = [source for source in (bind.partition(":")[0] for bind in binds) if not Path(source).exists()]
    return f"not on this machine, and needed on the nodes: {', '.join(unseen)} (container.binds)" if unseen else None


def check_runtime(programs: list[str]) -> str | None:
    if any(shutil.which(name) for name in programs):
        return None
    return f"no {' and no '.join(programs)} on PATH here: whether the nodes have one is seen when the job starts"
