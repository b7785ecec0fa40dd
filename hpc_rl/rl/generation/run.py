"""The path of a generation: load the prompts, start the workers, generate what is left; then evaluate, if asked to."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from hpc_rl.config.rl.generate import EvalConfig, GenerateConfig
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.generation.evaluate import evaluate_run
from hpc_rl.rl.generation.generate import generate
from hpc_rl.rl.generation.setup import Prepared, close_engines, open_generation, open_queue, prepare, start_workers
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.evaluations import evaluation_text, result_metrics
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.tracking.page.report import failure_reported
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.stopping import Stopped, open_stopping


def run_generation(config: GenerateConfig, run: RunDir, logs: Path) -> int:
    """Generate to the end, or until the run directory has a stop file, and return the exit code.

    Args:
        logs: folder of the logs of other processes.

    Raises:
        UserError: the run cannot work as requested.
        RunError: a process died or did not answer, or the reward failed for every response.
    """
    with ExitStack() as recording, failure_reported(run):
        with ExitStack() as closing:
            try:
                with heart.phase("load"):
                    stopping = open_stopping(run, config.slurm.warning_s, read_metrics(run.metrics))
                    prepared = prepare(config, run, stopping, logs, closing)
            except Stopped as stopped:
                print(stopped, flush=True)
                return EXIT_STOPPED
            tracker = recording.enter_context(Tracker(config, run, None, is_main=True))
            code = 0 if prepared.parts.is_joined else _generate(config, prepared, logs, tracker)
        if code == 0:
            print(f"responses: {run.responses}", flush=True)
            if isinstance(config, EvalConfig):
                with heart.phase("testing"):
                    found = evaluate_run(config, run)
                tracker.log(prepared.plan.blocks, result_metrics(found), prepared.plan.blocks)
                print(evaluation_text([(run.name, found)]), flush=True)
        tracker.finish(code)
    return code


def _generate(config: GenerateConfig, prepared: Prepared, logs: Path, tracker: Tracker) -> int:
    with heart.phase("load"):
        workers = start_workers(config, logs)
    state = open_generation(config, prepared, workers, open_queue(config, workers.fleet), tracker)
    state.began = time.monotonic()
    code = generate(state)
    tracker.name_left_out()
    if code == 0:  # after a stop, the engines are still generating; they end with the driver
        close_engines(workers.fleet, state.queue)
    return code
