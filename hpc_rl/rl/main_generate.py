"""Generate responses, or evaluate a model, with Ray.

    python -m hpc_rl.rl.main_generate [--kind generate|eval] [--run-dir DIR] --config FILE | key=value ...

Generate responses on the Ray cluster in RAY_ADDRESS, as `hpc-rl submit generate` and `hpc-rl eval` do, or on a cluster
that is started on this machine. Without a run directory, a new one is made in runs/. A run that is started again in its
run directory continues with the blocks of responses that are not finished. Exit codes: 0 finished, 75 stopped, 2 bad
input, 1 any other error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.config.rl.generate import EvalConfig, GenerateConfig
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.command import run_in_driver, run_main
from hpc_rl.run_dir import RunDir
from hpc_rl.software.imports import large_imports
from hpc_rl.system.disk import tolerate_lost_output
from hpc_rl.training.command import parse


class GenerationRunner:
    """The driver. It runs in a Ray actor; its output goes to `driver.log` in the attempt's folder."""

    def run(self, config: GenerateConfig, run: RunDir, logs: Path) -> int:
        """Generate what is left, evaluate it if the job is an evaluation, or score the checkpoints of a run; return the
        exit code."""
        with large_imports():
            from hpc_rl.rl.actors.cluster import driver_log
            from hpc_rl.rl.actors.process import begin, quiet_libraries
            from hpc_rl.rl.generation.follow import follow_run
            from hpc_rl.rl.generation.run import run_generation
            from hpc_rl.tracking.page.report import report_end

        begin(driver_log(logs))
        heart.begin("the driver")
        quiet_libraries()
        if isinstance(config, EvalConfig) and config.eval.follow is not None:
            code = follow_run(config, run, logs)
        else:
            code = run_generation(config, run, logs)
        if run.metrics.exists():
            print(report_end(run, code), flush=True)
        return code


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. All errors are printed here."""

    def command() -> int:
        kind, config, run = parse("hpc_rl.rl.main_generate", __doc__, arguments)
        assert isinstance(config, GenerateConfig)
        return run_in_driver(kind, config, GenerationRunner, run)

    return run_main(command)


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main(sys.argv[1:]))
