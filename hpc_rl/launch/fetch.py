"""Downloads on the login node, by the Python that will train."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_rl.config.schema import JobConfig
from hpc_rl.errors import UserError
from hpc_rl.launch.environment import job_environment
from hpc_rl.process import die_with_parent, python_with, shell_code


def fetch(names: Sequence[str], config: JobConfig) -> int:
    """Download models and data sets into the cache that jobs will read; prints what and where. The exit code.

    Raises:
        UserError: there is no Python that can, or it cannot be started.
    """
    python = python_with("datasets", config.slurm.python)
    if python is None:
        raise UserError(f"{sys.executable} has no datasets: pip install 'hpc-rl[train]', or set slurm.python")
    command = [python, "-P", "-m", "hpc_rl.data.fetch", *names]
    try:
        done = subprocess.run(
            command, env=fetch_environment(config, os.environ), preexec_fn=die_with_parent, check=False
        )
    except OSError as error:
        raise UserError(f"cannot start {python} (slurm.python): {error.strerror}") from error
    return shell_code(done.returncode)


def fetch_environment(config: JobConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of jobs, but online, and with the login to the hub that the user has already."""
    found = {**environ, **job_environment(config)}
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        found.pop(name, None)
    home = environ.get("HF_HOME", environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface")
    found.setdefault("HF_TOKEN_PATH", str(Path(home, "token").expanduser()))
    return found
