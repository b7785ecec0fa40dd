"""Post-training of language models on a Slurm cluster.

`hpc_rl.submit`, `hpc_rl.find_run`, `hpc_rl.find_runs`, `hpc_rl.Run` and `hpc_rl.UserError` are the Python API
(hpc_rl/api.py).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_rl.api import Run, find_run, find_runs, submit
    from hpc_rl.errors import UserError

__version__ = "0.1.0"
__all__ = ["Run", "UserError", "__version__", "find_run", "find_runs", "submit"]


def __dir__() -> list[str]:
    """List the API for `dir` and completion in notebooks, although it is not imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import the API when it is used: node entries import this package with the standard library alone."""
    if name == "UserError":
        from hpc_rl.errors import UserError

        return UserError
    if name in ("Run", "find_run", "find_runs", "submit"):
        from hpc_rl import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
