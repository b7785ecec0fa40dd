"""Pack the installed project as a wheel, so that an image contains the same code that submits its jobs."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from hpc_rl import __version__
from hpc_rl.errors import UserError
from hpc_rl.software.shipped import shipped

_PACKAGE = Path(__file__).parents[1]
_SHIPPED = ("apptainer", "configs", "slurm_templates")
_WHEEL = "Wheel-Version: 1.0\nGenerator: hpc-rl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def pack_wheel(folder: Path) -> Path:
    """Write the wheel of the running project (PEP 427), from a checkout or an installation.

    Raises:
        UserError: the project is not installed with pip, so its requirements are not known.
    """
    info = f"hpc_rl-{__version__}.dist-info"
    contents = {name: file.read_bytes() for name, file in _files()}
    contents |= {f"{info}/{name}": text for name, text in _metadata().items()}
    contents[f"{info}/WHEEL"] = _WHEEL.encode()
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"hpc_rl-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in contents.items():
            wheel.writestr(name, content)
    return path


def _files() -> Iterator[tuple[str, Path]]:
    """Yield (path in the wheel, file) of the package and of the shipped folders."""
    for file in sorted(_PACKAGE.rglob("*")):
        inside = file.relative_to(_PACKAGE)
        if file.is_file() and file.suffix != ".pyc" and inside.parts[0] != "shipped":
            yield f"hpc_rl/{inside}", file
    for name in _SHIPPED:
        for file in sorted(shipped(name).rglob("*")):
            if file.is_file():
                yield f"hpc_rl/shipped/{name}/{file.relative_to(shipped(name))}", file


def _metadata() -> dict[str, bytes]:
    """Return METADATA and entry points of this environment's installation."""
    try:
        installed = metadata.distribution("hpc-rl")
    except metadata.PackageNotFoundError as error:
        raise UserError("hpc-rl is not installed in this Python with pip, which building an image requires") from error
    # A checkout on PYTHONPATH is found by pip's .egg-info there, which has the same text under another name.
    about = installed.read_text("METADATA") or installed.read_text("PKG-INFO")
    texts = {"METADATA": about, "entry_points.txt": installed.read_text("entry_points.txt")}
    return {name: text.encode() for name, text in texts.items() if text}


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
