"""The versions of Ray that a job may use."""

from __future__ import annotations

import re
from importlib import metadata

from hpc_rl.errors import UserError
from hpc_rl.software.installation import install_command

FLOOR = (2, 52)
"""The first version with token authentication. Without it, anyone on the network can run code as the user
(CVE-2023-48022)."""


def installed_ray() -> str | None:
    """Return the version of this Python's Ray without importing it, or None."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return None


def token_authentication(version: str) -> bool:
    """Return whether this version of Ray has token authentication."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= FLOOR


def check_ray(version: str | None, python: str) -> None:
    """Check that Ray is installed and has token authentication.

    Raises:
        UserError: it is missing or too old.
    """
    if version is None:
        raise UserError(f"{python} has no Ray: {install_command('rl', python)}")
    if not token_authentication(version):
        floor = ".".join(map(str, FLOOR))
        raise UserError(
            f"{python} has Ray {version}, which anybody on the network could use: "
            f"token authentication came with Ray {floor}; pip install 'ray>={floor}'"
        )
