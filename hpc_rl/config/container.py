"""The image that a job's processes run in, and how they see the host."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from hpc_rl.config.base import Line, Path, Section


class ContainerConfig(Section):
    image: Path | None = None
    """Image that every node's processes run in: a SIF file or an unpacked folder (pyxis: also a name in a registry);
    null for none. Alias: --image."""
    runtime: str = "auto"
    """Container runtime: apptainer, singularity or pyxis; auto uses apptainer or singularity, whichever a node has."""
    python: str = Field("python3", min_length=1)
    """Python inside the image; slurm.python counts without an image only."""
    binds: list[Annotated[Line, AfterValidator(os.path.expanduser)]] = []
    """Further folders or files of the host that are seen inside, each SRC[:DST[:OPTIONS]]. Run directory, working
    folder, files that the configuration names, and cache folders are bound without being listed."""
    env: list[str] = []
    """Further environment variables that are passed in, by name or pattern (MYLAB_*); those of slurm.env always are."""
    gpu: Literal["nv", "rocm"] = "nv"
    """Whose GPU libraries are bound into the image: NVIDIA's or AMD's; none with trainer.device=cpu."""
    unpack: Literal["auto", "always", "never"] = "auto"
    """Run from a copy on the node's own disk, which outlives a FUSE mount; auto: in jobs of over an hour, where the
    runtime mounts no image by the kernel."""
    arch: Literal["amd64", "arm64", "ppc64le"] | None = None
    """Architecture of the compute nodes; the login node's where null."""
    options: list[Line] = []
    """Further options of the runtime's exec (pyxis: of srun), such as --fakeroot."""

    @field_validator("binds")
    @classmethod
    def _bindable(cls, value: list[str]) -> list[str]:
        for bind in value:
            if not re.fullmatch(r"[^:,]+(:/[^:,]*(:[a-z]+)?)?", bind):
                raise ValueError(f"{bind!r} is no SRC[:DST[:OPTIONS]], and the runtime takes no comma in a path")
        return value

    @field_validator("env")
    @classmethod
    def _patterns(cls, value: list[str]) -> list[str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
                raise ValueError(f"{name!r} is no name of an environment variable, and no beginning of one with a *")
        return value
