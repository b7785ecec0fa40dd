"""Records a trainer's metrics: always in metrics.jsonl, and on the console and in wandb as configured."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.errors import RunError
from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import LineFile
from hpc_rl.tracking.formatting import step_line
from hpc_rl.tracking.metrics import MetricsFile
from hpc_rl.tracking.timeline import Timeline, write_timeline
from hpc_rl.tracking.wandb_run import WandbRun

_CONSOLE_EVERY_S = 1.0
"""At most one step is shown on the console in this time. The next line names those that were left out."""


RecordedJob = FinetuneConfig | PpoConfig | GenerateConfig
"""Configurations with options of what is recorded."""


class Tracker:
    """The metrics of one run, written by its main process; in other processes every method does nothing.

    A context manager around the training and the report of its failure, which does not wait for wandb. At the end, it
    prints which of the last steps the console has not shown. After an error, it closes everything, because wandb would
    otherwise show the run as still running.

    Args:
        wandb_id: id of the wandb run to resume; None for a new one.
        is_main: whether this process writes.

    Raises:
        UserError: wandb is selected but not installed.
    """

    def __init__(self, config: RecordedJob, run: RunDir, wandb_id: str | None, is_main: bool) -> None:
        trainer = config.trainer
        self._wandb_id = wandb_id
        self._samples = LineFile(run.samples) if is_main else None
        self._timeline = run.timeline
        self._console = "console" in trainer.logger
        self._file = MetricsFile(run.metrics) if is_main else None
        self._wandb: WandbRun | None = None
        self._first: tuple[int, float] | None = None
        self._last_line = float("-inf")
        self._step: int | None = None
        self._left_out: list[int] = []
        if is_main and "wandb" in trainer.logger:
            self._wandb = WandbRun(
                run,
                config.model_dump(mode="json"),
                project=trainer.project_name,
                name=trainer.experiment_name or run.name,
                mode=trainer.wandb_mode or ("offline" if config.cache.offline else "online"),
                proxy=trainer.wandb_proxy,
                run_id=wandb_id,
            )
            self._wandb_id = self._wandb.id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.name_left_out()
        if error is not None:
            self.finish(RunError.exit_code)

    @property
    def wandb_id(self) -> str | None:
        """Return the id of the wandb run, to be saved in checkpoints; None without wandb and on other ranks."""
        return self._wandb_id

    def log(self, step: int, metrics: Mapping[str, float], total_steps: int) -> None:
        """Record the metrics of one step, and add perf/eta_s; see metrics.py for the names.

        May be called several times for one step (training, then validation and times). The console shows a step once,
        and its validation.
        """
        if self._file is None:
            return
        eta_s = self._eta_s(step, total_steps, metrics)
        metrics = metrics if eta_s is None else {**metrics, "perf/eta_s": eta_s}
        record = self._file.write(step, total_steps, metrics)
        is_validation, is_new, self._step = any(key.startswith("val/") for key in metrics), step != self._step, step
        is_due = step == total_steps or time.monotonic() - self._last_line >= _CONSOLE_EVERY_S
        if self._console and (is_validation or (is_new and is_due)):
            self._last_line = time.monotonic()
            self.name_left_out(besides=step)
            print(step_line(record), flush=True)
        elif self._console and is_new:
            self._left_out.append(step)
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]], split: str) -> None:
        """Record prompts and responses: append them to samples.jsonl, and to a table in wandb; see samples.py.

        Args:
            samples: rows with the same columns. Values that JSON lacks, such as dates, are written as text.
            split: "train" or "val".
        """
        if self._samples is None or not samples:
            return
        rows = ({"step": step, "split": split, **row} for row in samples)
        self._samples.write(*(json.dumps(row, ensure_ascii=False, default=str) for row in rows))
        if self._wandb is not None:
            self._wandb.log_table(step, f"{split}/generations", samples)

    def log_timeline(self, timeline: Timeline) -> None:
        """Record when each part of the latest step ran; see timeline.py."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the next step replaces it
                write_timeline(self._timeline, timeline)

    def finish(self, exit_code: int = 0) -> None:
        """Close the files and end the wandb run; print how to upload an offline one."""
        if self._file is not None and self._samples is not None:
            self._file.close()
            self._samples.flush()
        if self._wandb is not None:
            self._wandb.finish(exit_code)

    def name_left_out(self, besides: int | None = None) -> None:
        """Print which steps the console has not shown since its last line."""
        steps, self._left_out = [step for step in self._left_out if step != besides], []
        if steps:
            which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            print(f"{which}: see metrics.jsonl", flush=True)

    def _eta_s(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> float | None:
        """Return the remaining seconds at the mean speed of this process so far, including saving and validation."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first_step, since = self._first
        per_step = (now - since) / (step - first_step) if step > first_step else metrics.get("timing_s/step")
        return None if per_step is None else (total_steps - step) * per_step
