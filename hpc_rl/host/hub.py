"""The hub of models and data sets, before its libraries use it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.host.machine import internet_addresses, no_answer, reach

_TRUE = ("1", "on", "true", "yes")


def is_offline(environ: Mapping[str, str]) -> bool:
    """Return whether the hub's libraries use their cache only."""
    return environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE


def hub_address() -> str:
    """Return the address of the hub that this process uses."""
    return internet_addresses(os.environ)["Hugging Face"]


def loading_problem(path: str, error: Exception) -> str:
    """Return why one of the hub's libraries could not load a model or a tokenizer, in one line.

    Args:
        path: a folder, or a name on the hub. If there is no such folder, it may be meant as one.
    """
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return reason if Path(path).exists() else f"{reason.rstrip('.')}; and there is no folder {path!r}"


@cache
def check_hub(name: str, timeout_s: float = 30) -> None:
    """Check that the hub answers, because its libraries would wait for an answer forever.

    A hub that refuses connections is not an error here: the libraries then use their cache.

    Args:
        name: what is looked up there, for the error.

    Raises:
        UserError: the hub did not answer in time.
    """
    if is_offline(os.environ):
        return
    address = hub_address()
    if reach({"hub": address}, timeout_s)["hub"] == no_answer(timeout_s):
        raise UserError(
            f"{name} is looked up on the hub, and {address} did not answer within {timeout_s:.0f} s: if nodes have no "
            f"internet, run `hpc-rl fetch {name}` on the login node and set cache.offline=true"
        )
