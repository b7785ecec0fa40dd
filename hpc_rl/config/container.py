"""Options of the container image that a job's processes run in."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from hpc_rl.config.base import Line, Path, Section


class ContainerConfig(Section):
    image: Path | None = None
    """Image in which the processes of every node run: a SIF file, an unpacked folder, or (with runtime=pyxis) a name in
    a registry. null: no container. Same as --image."""
    runtime: str = "auto"
    """Program that runs the image: apptainer, singularity or pyxis. auto: apptainer or singularity, whichever the node
    has."""
    python: str = Field("python3", min_length=1)
    """Python inside the image. It replaces slurm.python if an image is set."""
    binds: list[Annotated[Line, AfterValidator(os.path.expanduser)]] = []
    """Additional folders or files of the host to mount in the image, each SRC[:DST[:OPTIONS]]. The run directory, the
    working folder, all files that the configuration names, and the cache folders are always mounted."""
    env: list[str] = []
    """Additional environment variables to pass into the image, by name or by pattern (MYLAB_*). Variables of slurm.env
    are always passed."""
    gpu: Literal["nv", "rocm"] = "nv"
    """GPU libraries of the host to mount in the image: nv (NVIDIA) or rocm (AMD). Ignored with trainer.device=cpu."""
    unpack: Literal["auto", "always", "never"] = "auto"
    """Whether to run from an unpacked copy of the image on the node's own disk. auto: in jobs longer than an hour, if
    the runtime would mount the image with FUSE, because such a mount may fail after some time."""
    arch: Literal["amd64", "arm64", "ppc64le"] | None = None
    """CPU architecture of the compute nodes. null: the same as the login node."""
    options: list[Line] = []
    """Additional options of the runtime's exec command (pyxis: of srun), such as --fakeroot."""

    @field_validator("binds")
    @classmethod
    def _bindable(cls, value: list[str]) -> list[str]:
        for bind in value:
            if not re.fullmatch(r"[^:,]+(:/[^:,]*(:[a-z]+)?)?", bind):
                raise ValueError(
                    f"{bind!r} is not of the form SRC[:DST[:OPTIONS]] with an absolute DST; paths with a comma cannot "
                    "be mounted"
                )
        return value

    @field_validator("env")
    @classmethod
    def _patterns(cls, value: list[str]) -> list[str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name):
                raise ValueError(
                    f"{name!r} is not the name of an environment variable, or the start of one followed by *"
                )
        return value
