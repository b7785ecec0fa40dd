"""Whether a Python can use the package TransferQueue.

Standard library only, because another Python runs this file: `python -P FILE` prints the problem, or nothing.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata

PACKAGE = "TransferQueue"
VERSIONS = ("0.1.11", "0.1.12")
"""The oldest version that works, and the first one that is not known to. Releases rename what hpc-rl uses."""
_INSTALL = "run pip install '.[transfer-queue]' in the checkout of hpc-rl, or remove transfer_queue.enable"


def problem() -> str | None:
    """Return why this Python cannot use the package, and what to do; None if it can."""
    oldest, above = VERSIONS
    wanted = f"transfer_queue.enable=true needs {PACKAGE} >= {oldest}, < {above}"
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{wanted}, and {sys.executable} has none: {_INSTALL}"
    if not _numbers(oldest) <= _numbers(found) < _numbers(above):
        return f"{wanted}, and {sys.executable} has {found}: {_INSTALL}"
    try:
        zmq = importlib.import_module("zmq")
        importlib.import_module("msgspec")
    except ImportError as error:
        needs = "transfer_queue.enable=true needs pyzmq and msgspec"
        return f"{needs}, and {sys.executable} lacks one of them ({error}): {_INSTALL}"
    if not zmq.has("curve"):
        return (
            "transfer_queue.enable=true needs a pyzmq with CURVE, which authenticates its connections, and that of "
            f"{sys.executable} was built without it: install pyzmq from its wheel, or remove transfer_queue.enable"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


if __name__ == "__main__":
    print(problem() or "")
