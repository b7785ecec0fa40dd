"""The user's proxies, for calls to servers outside of a job.

Ray's processes must not see the usual variables, which gRPC would use between the nodes. They keep the proxies in a
variable that only this module reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

ENV_PROXIES = "HPC_RL_PROXIES"
_SCHEMES = ("http", "https", "ftp", "all")


def set_aside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without proxies, whose processes find them with `proxies`. `no_proxy` stays."""
    names = {f"{scheme}_proxy" for scheme in _SCHEMES}
    others = {name: value for name, value in environ.items() if name.lower() not in names}
    found = proxies(environ)
    return {**others, ENV_PROXIES: json.dumps(found)} if found else others


def proxies(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the proxies by the scheme of a URL, as urllib's ProxyHandler takes them."""
    if kept := environ.get(ENV_PROXIES):
        found: dict[str, str] = json.loads(kept)
        return found
    names = {scheme: (f"{scheme}_proxy", f"{scheme.upper()}_PROXY") for scheme in _SCHEMES}
    given = {scheme: environ.get(lower) or environ.get(upper) for scheme, (lower, upper) in names.items()}
    return {scheme: value for scheme, value in given.items() if value}
