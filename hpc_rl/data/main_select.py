"""Select training data from responses, as `hpc-rl submit select` does: the only process of a job.

    python -m hpc_rl.data.main_select --config FILE

The result is selected.jsonl in the run directory. Exit codes: 0 finished, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.config.compose import load_config
from hpc_rl.config.training.select import SelectConfig
from hpc_rl.data.selection import select
from hpc_rl.errors import UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import current_run_dir
from hpc_rl.system.disk import tolerate_lost_output


def main(arguments: Sequence[str]) -> int:
    """Select, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.data.main_select", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="complete configuration (config.yaml of a run)")
    heart.begin("the selection")
    try:
        config, run = load_config("select", parser.parse_args(arguments).config), current_run_dir()
        assert isinstance(config, SelectConfig)
        if run is None:
            raise UserError("no run directory: set HPC_RL_RUN_DIR")
        wanted = config.select
        print(select(wanted.responses, wanted.method, wanted.threshold, run.selected), flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"wrote {run.selected}", flush=True)
    return 0


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main(sys.argv[1:]))
