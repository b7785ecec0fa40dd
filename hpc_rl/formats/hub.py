"""The hub of models and data sets, before its libraries use it."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.system.machine import internet_addresses, no_answer, reach

_TRUE = ("1", "on", "true", "yes")
_LONGEST_CONFIG = 10_000_000
"""Bytes of a config.json that are read."""


def hub_offline(environ: Mapping[str, str]) -> str:
    """Return the variable by which the hub's libraries use their cache only; empty if they ask the hub. The first that
    is set counts (huggingface_hub, constants.py)."""
    name = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environ.get(name)), "")
    return name if environ.get(name, "").lower() in _TRUE else ""


def data_offline(environ: Mapping[str, str]) -> str:
    """Return the variable by which `datasets` uses its cache only; empty if it asks the hub.

    HF_DATASETS_OFFLINE=0 does not help against HF_HUB_OFFLINE: what `datasets` then asks does not ask the hub.
    """
    own = "HF_DATASETS_OFFLINE"
    return hub_offline(environ) or (own if environ.get(own, "").lower() in _TRUE else "")


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
    if hub_offline(os.environ):
        return
    address = hub_address()
    if reach({"hub": address}, timeout_s)["hub"] == no_answer(timeout_s):
        raise UserError(
            f"{name} is looked up on the hub, and {address} did not answer within {timeout_s:.0f} s: if nodes have no "
            f"internet, run `hpc-rl fetch {name}` on the login node and set cache.offline=true"
        )


def hub_config(name: str, timeout_s: float = 10) -> dict[str, Any]:
    """Return the config.json of a model on the hub (https://huggingface.co/docs/hub/models-downloading).

    Args:
        timeout_s: deadline for the answer.

    Returns:
        Empty if the hub has none, does not answer in time, or does not let this user read it.
    """
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) or reach({"hub": hub_address()}, timeout_s)["hub"]:
        return {}
    try:
        with urllib.request.urlopen(_request(f"{name}/resolve/main/config.json"), timeout=timeout_s) as answer:
            found = json.loads(answer.read(_LONGEST_CONFIG))
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return {}
    return found if isinstance(found, dict) else {}


@cache
def hub_problem(name: str, kind: str = "model", timeout_s: float = 10) -> str:
    """Return why a job cannot load a model or a data set from the hub; empty if it can, or the hub has another problem.

    Args:
        kind: "model" or "data set".
    """
    address = hub_address()
    if reason := reach({"hub": address}, timeout_s)["hub"]:
        return f"{address} cannot be reached from here ({reason})"
    path = f"{name}/resolve/main/config.json" if kind == "model" else f"api/datasets/{name.partition(':')[0]}"
    try:
        with urllib.request.urlopen(_request(path), timeout=timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        is_missing = error.code in (401, 403, 404, 410)
        return f"{address} has no such {kind}, or none that you may read" if is_missing else ""
    except (OSError, ValueError, http.client.HTTPException):
        return ""


def _request(path: str) -> urllib.request.Request:
    """Return a request for a path on the hub, with the user's token. A malformed one raises ValueError."""
    request = urllib.request.Request(f"{hub_address()}/{path}")
    if token := _token(os.environ):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _token(environ: Mapping[str, str]) -> str | None:
    """Return the user's token for the hub, where the hub's library looks for it; None without one."""
    if token := environ.get("HF_TOKEN"):
        return token
    home = environ.get("HF_HOME", environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface")
    try:
        return Path(environ.get("HF_TOKEN_PATH", f"{home}/token")).expanduser().read_text().strip() or None
    except OSError:
        return None
