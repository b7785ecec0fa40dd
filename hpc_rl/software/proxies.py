"""The user's proxies, for calls to servers outside of a job.

Ray's own processes must not see the usual variables, which gRPC would use between the nodes. They keep the proxies in a
variable that only this module reads. Ray's workers, and so actors and what they start, get the usual ones back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

ENV_PROXIES = "HPC_RL_PROXIES"
ENV_RAY_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Variable with the function that Ray's workers call first (ray/_private/workers/default_worker.py)."""
_SCHEMES = ("http", "https", "ftp", "all")
_DIRECT = ("no_proxy", "NO_PROXY")
"""Programs read one of the two."""


def set_aside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without proxies, whose processes find them with `proxies`. `no_proxy` stays."""
    names = {f"{scheme}_proxy" for scheme in _SCHEMES}
    others = {name: value for name, value in environ.items() if name.lower() not in names}
    found = proxies(environ)
    if not found:
        return others
    return {**others, ENV_PROXIES: json.dumps(found), ENV_RAY_HOOK: f"{__name__}.{restore.__name__}"}


def restore() -> None:
    """Give this process and its children the usual variables again."""
    for scheme, value in proxies().items():
        os.environ.update({f"{scheme}_proxy": value, f"{scheme.upper()}_PROXY": value})


def without_proxy_to(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return the environment with these hosts in `no_proxy`, if there is a proxy."""
    if not proxies(environ):
        return dict(environ)
    given = [name.strip() for variable in _DIRECT for name in environ.get(variable, "").split(",")]
    listed = ",".join(dict.fromkeys(filter(None, [*given, "localhost", "127.0.0.1", *hosts])))
    return {**environ, **dict.fromkeys(_DIRECT, listed)}


def proxies(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the proxies by the scheme of a URL, as urllib's ProxyHandler takes them."""
    if kept := environ.get(ENV_PROXIES):
        found: dict[str, str] = json.loads(kept)
        return found
    names = {scheme: (f"{scheme}_proxy", f"{scheme.upper()}_PROXY") for scheme in _SCHEMES}
    given = {scheme: environ.get(lower) or environ.get(upper) for scheme, (lower, upper) in names.items()}
    return {scheme: value for scheme, value in given.items() if value}
