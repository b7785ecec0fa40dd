"""The environment of a program of the user's with hooks, as a job gives it to the program."""

import os
from pathlib import Path

from hpc_rl.adapters.inside.hooks import hooked

REPOSITORY = Path(__file__).parents[3]


def hooked_environ(hook: str, *folders: str, run: Path | None = None, attempt: int = 1) -> dict[str, str]:
    """Return the environment of a process.

    Args:
        hook: a row of HOOKS.
        folders: further folders in which Python looks for modules.
        run: the run directory, in which the attempt gets its folder.
    """
    own = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *folders]), "OMP_NUM_THREADS": "1"}
    if run is not None:
        (run / f"attempt-{attempt}").mkdir(parents=True, exist_ok=True)
        own |= {"HPC_RL_RUN_DIR": str(run), "HPC_RL_ATTEMPT_DIR": str(run / f"attempt-{attempt}")}
    return hooked(os.environ | own, hook)
