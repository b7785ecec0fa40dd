"""Score the checkpoints of a run while it trains (`hpc-rl lend RUN --role eval`).

The engines start once, with the model that the training started from. Then each checkpoint takes four steps: its files
are held, so that the run may remove it; its weights go into Ray's object store, from which the engines take them; the
responses are generated and scored as in `submit eval`; and the scores go into the directory of the run.

    runs/math-eval-1/
        held/step-00000020/       links to the checkpoint that is scored now
        step-00000020/            responses.jsonl and eval.json of each checkpoint
    runs/math/metrics-eval-3f0c11d2-math-eval-1.jsonl
"""

from __future__ import annotations

import math
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hpc_rl.config.rl.generate import EvalConfig
from hpc_rl.config.rl.rollout import engine_dtype, engine_spec, room
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.actors.deaths import ActorDiedError
from hpc_rl.rl.generation.evaluate import evaluate_run
from hpc_rl.rl.generation.generate import generate
from hpc_rl.rl.generation.setup import close_engines, open_generation, open_queue, prepare, start_workers
from hpc_rl.rl.rollout.rollout import SYNC_TIMEOUT_S
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.rl.weights.published import publish
from hpc_rl.run_dir import RunDir
from hpc_rl.slurm.states import end_of
from hpc_rl.system.files import write_atomically
from hpc_rl.tracking.evaluations import result_metrics
from hpc_rl.tracking.formatting import duration
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.tracking.page.report import failure_reported
from hpc_rl.tracking.points import add_point, points_file, scored
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.checkpoints.beside import Saved, hold, saved_in
from hpc_rl.training.checkpoints.export import export
from hpc_rl.training.checkpoints.folders import problem_of
from hpc_rl.training.models.causal_lm import load_model
from hpc_rl.training.models.stored_form import StoredForm
from hpc_rl.training.parallel.distributed import ONE_PROCESS
from hpc_rl.training.stopping import Stopped, open_stopping

LOOK_S = 2.0
"""Interval between looks at the run's files."""
SILENT_S = 300.0
"""The nodes of a run record what they use each minute, in files that another node may see a minute later."""
BUCKET_BYTES = 256 * 10**6
"""Most bytes of weights in one object of Ray's store."""


def follow_run(config: EvalConfig, run: RunDir, logs: Path) -> int:
    """Score each checkpoint of the run `eval.follow` until it has ended, or this one has to stop.

    Returns:
        the exit code.

    Raises:
        UserError: the job cannot work as requested.
        RunError: a process died or did not answer, or the reward failed for every response.
    """
    with ExitStack() as recording, failure_reported(run):
        others = [name for name in config.trainer.logger if name != "console"]  # which has a line for each checkpoint
        tracker = recording.enter_context(Tracker(config.updated("trainer.logger", others), run, None, is_main=True))
        with heart.phase("load"):
            scorer = CheckpointScorer(config, run, tracker, logs)
        try:
            code = scorer.follow()
        except Stopped as stopped:
            print(stopped, flush=True)
            code = EXIT_STOPPED
        tracker.finish(code)
    return code


def trains(run: RunDir) -> bool:
    """Return whether a job trains a run. Not every file system shows locks to other nodes; then, the files count."""
    if run.holder() is not None:
        return True
    files = [file for attempt in run.attempts()[-1:] for file in attempt.glob("node*-usage.jsonl")]
    is_fresh = any(time.time() - file.stat().st_mtime < SILENT_S for file in files)
    return is_fresh and run.read_status().get("state") == "RUNNING"


class CheckpointScorer:
    """The engines, and what they have to score.

    Args:
        run: the one of this job.
        tracker: records the scores as this job's own metrics too.
        logs: folder of the logs of other processes.
    """

    def __init__(self, config: EvalConfig, run: RunDir, tracker: Tracker, logs: Path) -> None:
        assert config.eval.follow is not None
        self._config, self._run, self._tracker, self._logs = config, run, tracker, logs
        self._target = RunDir(Path(config.eval.follow).absolute())
        self._held = run.path / "held"
        self._points = points_file(self._target.path, config.identity, run.name)
        self._done: set[tuple[int, int]] = set()
        """Checkpoints that this process has scored, or that cannot be read."""
        self._stopping = open_stopping(run, config.slurm.warning_s, read_metrics(run.metrics))
        self._workers = start_workers(config, logs)
        self._queue = open_queue(config, self._workers.fleet, revive=self._give_weights)
        self._weights: list[Any] = []
        """References to those that are scored now."""

    def follow(self) -> int:
        """Score checkpoints, the oldest first, until the run has ended or this job has to stop."""
        wait_s, last_seen = self._config.lend.wait_s, time.monotonic()
        print(f"scoring the checkpoints of run {self._target.name} ({self._target.path})", flush=True)
        while True:
            state = end_of(self._target)  # before the look: a run has ended after its last checkpoint
            if self._stopping.due(0.0):
                return EXIT_STOPPED
            if (saved := self._next()) is not None:
                if code := self._score(saved):
                    return code
                last_seen = time.monotonic()
            elif state is not None:
                print(f"run {self._target.name} has ended ({state}), and its checkpoints have scores", flush=True)
                break
            elif trains(self._target):
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > wait_s:
                print(f"run {self._target.name} did not train within {wait_s} s (lend.wait_s)", flush=True)
                break
            if saved is None:
                heart.beat()
                self._points.flush()
                time.sleep(LOOK_S)
                self._stopping.made_a_step = True  # an attempt that had nothing to do was not in vain
        close_engines(self._workers.fleet, self._queue)
        return 0

    def _next(self) -> Saved | None:
        """Return the oldest checkpoint without a score. One that is held may be there no more."""
        found = {**saved_in(self._held), **saved_in(self._target.checkpoints)}
        done = scored(self._target.path, self._config.identity) | self._done
        return next((found[step] for step in sorted(found) if found[step].key not in done), None)

    def _score(self, saved: Saved) -> int:
        """Score a checkpoint; return the exit code, which is not 0 if the job has to stop."""
        began = time.monotonic()
        own = self._folder(saved)
        held = hold(saved, self._held)
        problem = "the run has removed it" if held is None else problem_of(held)
        if held is None or problem:
            print(f"step {saved.step}: the checkpoint has no score: {problem}", flush=True)
            self._done.add(saved.key)
            for folder in (self._held, own.path):
                shutil.rmtree(folder, ignore_errors=True)
            return 0
        loaded_s = 0.0
        with ExitStack() as closing:
            with heart.phase("load"):
                prepared = prepare(self._config, self._run, self._stopping, self._logs, closing, own)
            if not prepared.parts.is_joined:
                with heart.phase("load"):
                    self._load(held)
                loaded_s = time.monotonic() - began
                quiet = self._config.updated("trainer.logger", [])
                blocks = closing.enter_context(Tracker(quiet, own, None, is_main=True))
                state = open_generation(self._config, prepared, self._workers, self._queue, blocks)
                if code := generate(state):
                    return code
        with heart.phase("testing"):
            found = evaluate_run(self._config.updated("model.path", str(saved.path)), own)
        metrics = result_metrics(found)
        add_point(self._points, *saved.key, metrics)
        self._done.add(saved.key)
        self._tracker.log(saved.step, metrics, max(saved.step, self._total_steps()))
        shutil.rmtree(self._held, ignore_errors=True)
        ends = {one["name"]: metrics.get(f"eval/{one['name']}/score", math.nan) for one in found["data"]}
        scores = ", ".join(f"{name} {score:.4g}" for name, score in ends.items())
        took = f"in {duration(time.monotonic() - began)}, of which {loaded_s:.1f} s for its weights"
        print(f"step {saved.step}: score of {scores} ({took})", flush=True)
        return 0

    def _folder(self, saved: Saved) -> RunDir:
        """Return the folder of the responses of a checkpoint, without those of an earlier one of the same step."""
        own = RunDir(self._run.path / saved.path.name)
        mark = own.path / ".written"
        if not mark.exists() or mark.read_text() != str(saved.written):
            shutil.rmtree(own.path, ignore_errors=True)
            own.path.mkdir()
            write_atomically(mark, str(saved.written))
        return own

    def _load(self, held: Path) -> None:
        """Give the engines the weights of a checkpoint."""
        self._weights = []  # before the new ones need memory
        folder, device = self._run.path / ".model", self._config.trainer.computes_on
        export(held, folder, merge=True, replace=True)
        dtype = engine_dtype(self._config.rollout, device)
        model = self._config.updated("model.path", str(folder)).model.in_dtype(dtype)
        hf = load_model(model, room(self._config), self._config.trainer.packing).hf
        shutil.rmtree(folder)
        stored = StoredForm(hf) if engine_spec(self._config).reads_files else None
        self._weights = publish(WeightSource(hf, getattr(torch, dtype), stored=stored), ONE_PROCESS, BUCKET_BYTES)
        self._queue.version += 1
        self._give_weights()

    def _give_weights(self) -> None:
        """Give all engines that have loaded their models the weights, also those in the place of dead ones."""
        while True:
            self._queue.tell("answer", SYNC_TIMEOUT_S)  # replaces those that have died
            engines = self._workers.fleet.engines.subset(self._queue.loaded)
            try:
                engines.call("take_weights", self._weights).wait(SYNC_TIMEOUT_S)
                break
            except ActorDiedError:
                continue
        for engine in [*self._queue.started]:
            self._queue.restore(engine)

    def _total_steps(self) -> int:
        records = read_metrics(self._target.metrics)
        return int(records[-1]["total_steps"]) if records else 0
