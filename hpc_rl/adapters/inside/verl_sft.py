"""verl's SFT trainer saves and ends after a step when the run has to stop, and does not continue a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hpc_rl.adapters.inside import beats
from hpc_rl.adapters.inside.agreement import RankGroup
from hpc_rl.adapters.inside.asked import is_asked
from hpc_rl.adapters.inside.hooks import wrap
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.training.stopping import stopped_line

_LOGGED = ("loss", "grad_norm", "lr")


def attach(module: Any) -> None:
    """Follow the training that verl.utils.checkpoint.checkpoint_handler resumes."""

    def load_checkpoint(original: Callable[..., int], handler: Any) -> int:
        step = original(handler)
        if step and step % len(handler.train_dataloader) == 0:
            handler.train_dataloader.next_iter_state = None  # of an epoch that has ended: verl would skip the next one
        if handler.mode == module.OrchestrationMode.SPMD:
            _Training(handler, step).follow()
        return step

    wrap(module.CheckpointHandler, "load_checkpoint", load_checkpoint)


class _Training:
    """A training, on one rank.

    Args:
        handler: saves its checkpoints.
        step: of the checkpoint from which it resumes; 0 without one.

    Raises:
        SystemExit: the checkpoint is that of the last step.
    """

    def __init__(self, handler: Any, step: int) -> None:
        self._handler, self._step = handler, step
        self._total = int(handler.engine.optimizer_config.total_training_steps)
        self._ranks = RankGroup()
        beats.begin(self._ranks.rank)
        self._metrics: Mapping[str, Any] = {}
        if step >= self._total:
            self._print(f"step {step} of {self._total} is saved already: nothing is left to train")
            raise SystemExit(0)

    def follow(self) -> None:
        """Look after each step whether it is the last one: the trainer calls both functions once, on all ranks."""
        worker = import_module("verl.workers.engine_workers").TrainingWorker
        read = import_module("verl.utils.tensordict_utils").get

        def train_batch(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            output = original(*arguments, **named)
            self._metrics = {} if output is None else dict(read(output, "metrics", {}))
            return output

        def step_profile(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            found = original(*arguments, **named)
            self._end_step()
            return found

        wrap(worker, "train_batch", train_batch)
        wrap(worker, "step_profile", step_profile)

    def _end_step(self) -> None:
        """Save and end the process if the run has to stop; what the trainer would log of this step is printed here.

        Raises:
            SystemExit: the run stops.
        """
        self._step += 1
        if self._step >= self._total:
            beats.end()
            return
        beats.begin_step(self._step + 1)
        if self._ranks.of_main(is_asked()):
            numbers = [f"train/{name}:{value}" for name, value in self._metrics.items() if name in _LOGGED]
            self._print(" - ".join([f"step:{self._step}", *numbers]))
            self._handler.save_checkpoint(step=self._step)
            self._ranks.wait()
            self._print(stopped_line(self._step, self._total))
            raise SystemExit(EXIT_STOPPED)

    def _print(self, line: str) -> None:
        if self._ranks.is_main:
            print(line, flush=True)
