"""The command that installs what a feature needs, in the way that hpc-rl itself was installed."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import hpc_rl


def install_command(extra: str) -> str:
    """Return a pip command for this Python that adds one of hpc-rl's extras.

    hpc-rl is not on a package index, so the command names the folder or file that this installation came from.

    Args:
        extra: "train" or "rl".
    """
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(_requirement(extra))}"


def _requirement(extra: str) -> str:
    checkout = Path(hpc_rl.__file__).parents[1]
    if (checkout / "setup.cfg").is_file():
        return f"{checkout}[{extra}]"
    url = _origin()
    if url.startswith("file://"):
        return f"{unquote(urlsplit(url).path)}[{extra}]"
    return f"hpc-rl[{extra}] @ {url}" if url else f"hpc-rl[{extra}]"


def _origin() -> str:
    """Return the URL that pip recorded for this installation (PEP 610), or an empty string."""
    try:
        text = metadata.distribution("hpc-rl").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    return str(json.loads(text)["url"]) if text else ""
