"""The header of a SIF file. Pure, except for reading the file.

The layout is that of the Singularity Image Format, version 01: launch script 32 bytes, magic 10, version 3,
architecture 3, id 16, then eight little-endian 64-bit numbers; the last two are the offset and the size of the data.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path

from hpc_rl.errors import UserError

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_MAGIC = b"SIF_MAGIC\0"
_ARCHITECTURES = {
    **{"01": "386", "02": "amd64", "03": "arm", "04": "arm64", "05": "ppc64", "06": "ppc64le"},
    **{"07": "mips", "08": "mipsle", "09": "mips64", "10": "mips64le", "11": "s390x", "12": "riscv64"},
}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def _read_header(content: bytes) -> tuple[str, int] | None:
    """Return the architecture in Go's names (amd64, arm64) and the size of the complete file; None if it is no SIF."""
    if len(content) < _HEADER.size:
        return None
    _, magic, _, code, _, *numbers = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        return None
    architecture = code.rstrip(b"\0").decode(errors="replace")
    return _ARCHITECTURES.get(architecture, architecture), numbers[-2] + numbers[-1]


def check_image(image: Path, architecture: str | None = None) -> None:
    """Check an image before it is started.

    Args:
        architecture: architecture of the machines that will run the image; None for that of this machine.

    Raises:
        UserError: the image is missing, incomplete, not an image, or built for another architecture.
    """
    if image.is_dir():
        if not any((image / name).exists() for name in (".singularity.d", "bin", "usr")):
            raise UserError(f"image {image} is a folder, but not an unpacked image (it has neither bin nor usr)")
        return
    try:
        with image.open("rb") as file:
            header = _read_header(file.read(_HEADER.size))
        found = image.stat().st_size
    except OSError as error:
        raise UserError(f"image {image}: {(error.strerror or 'cannot be read').lower()}") from error
    if header is None:
        raise UserError(
            f"image {image} is not a SIF file ({found:,} bytes without its header): "
            f"build one with hpc-rl image build --from SOURCE --out {image}"
        )
    built_for, size = header
    if found < size:
        raise UserError(f"image {image} is incomplete: it has {found:,} of {size:,} bytes; copy it again or rebuild it")
    wanted = architecture or this_architecture()
    if built_for != wanted:
        raise UserError(
            f"image {image} is for {built_for}, but the nodes are {wanted}: build it on such a machine, or "
            f"set container.arch={built_for} if the compute nodes differ from the login node"
        )


def this_architecture() -> str:
    machine = platform.machine()
    return _MACHINES.get(machine, machine)
