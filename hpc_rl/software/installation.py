"""How this installation of hpc-rl came about, and the command that adds an extra to it."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

_CHECKOUT = Path(__file__).parents[2]
"""The folder above the package: a checkout, or the site-packages of an installation."""


def install_command(extra: str, python: str | None = None) -> str:
    """Return the command that installs hpc-rl with an extra. The project is not on a package index.

    Args:
        extra: `train` or `rl`.
        python: Python to install into; without it, the `pip` on PATH.
    """
    pip = f"{shlex.quote(python)} -m pip" if python else "pip"
    return f"{pip} install {_requirement(_direct_url(), extra)}"


def _direct_url() -> str:
    """Return pip's record of what was installed, or an empty text if there is none."""
    try:
        return metadata.distribution("hpc-rl").read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        return ""


def _requirement(direct_url: str, extra: str, checkout: Path = _CHECKOUT) -> str:
    """Return what follows `pip install`.

    Args:
        direct_url: direct_url.json (PEP 610), or an empty text.
        checkout: the folder above the package.
    """
    found = json.loads(direct_url) if direct_url else {}
    url = found.get("url", "")
    if vcs := found.get("vcs_info"):
        return shlex.quote(f"hpc-rl[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}")
    source = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if source is not None and source.exists():
        editable = "-e " if found.get("dir_info", {}).get("editable") else ""
        return editable + shlex.quote(f"{source}[{extra}]")
    if (checkout / "setup.cfg").is_file():
        return "-e " + shlex.quote(f"{checkout}[{extra}]")
    return f"'/path/to/hpc-rl[{extra}]', where /path/to/hpc-rl is a checkout of the project"
