"""Whether the run has to stop, for programs that are ended once they have saved (hpc_rl/node/adapted.py)."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_rl.run_dir import ENV_RUN_DIR, RunDir


def is_asked() -> bool:
    """Return whether the stop file is there."""
    return RunDir(Path(os.environ[ENV_RUN_DIR])).stop.exists()
