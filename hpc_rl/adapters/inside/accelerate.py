"""Loops of the user's own with accelerate: records what Accelerator.log measures, and the complete checkpoints of
save_state. Node 0 ends the program after its first checkpoint since it was asked to stop.

Some programs call save_state on all ranks, and some on the first one only, so nothing here waits for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpc_rl.adapters.inside.hooks import wrap
from hpc_rl.adapters.inside.run import metrics_of, run_of_process
from hpc_rl.adapters.saved import Checkpoint, record_saved

LATER = 3
"""Passes after which other ranks have written their part of a checkpoint, if they write one."""


class Waiting:
    """The last checkpoint, from when the first rank has written it until all have."""

    path: Path | None = None
    passes = 0
    step = 0
    """The last one that was logged."""
    saved_step = 0
    """The step of the checkpoint; the number of checkpoints so far, if none was logged."""

    def begin(self, path: Path) -> None:
        """Note that this rank has written its part."""
        self.path, self.passes, self.saved_step = path, 0, self.step or self.saved_step + 1

    def note_pass(self, processes: int) -> None:
        """Note that the training goes on, and record the checkpoint if it is complete."""
        if self.path is None:
            return
        self.passes += 1
        is_whole = len(list(self.path.glob("random_states_*.pkl"))) == processes
        if self.passes > (1 if is_whole else LATER):
            record_saved(run_of_process(), Checkpoint(self.saved_step, str(self.path.absolute()), processes))
            self.path = None


_waiting = Waiting()


def attach(module: Any) -> None:
    """Add the adapter to accelerate.accelerator."""
    for name, call in (("save_state", _save_state), ("backward", _backward), ("log", _log)):
        wrap(module.Accelerator, name, call)


def _save_state(original: Callable[..., Any], accelerator: Any, *arguments: Any, **named: Any) -> Any:
    folder = original(accelerator, *arguments, **named)
    if accelerator.is_main_process and folder:
        _waiting.begin(Path(folder))
    return folder


def _backward(original: Callable[..., Any], accelerator: Any, *arguments: Any, **named: Any) -> Any:
    result = original(accelerator, *arguments, **named)
    if accelerator.is_main_process and accelerator.sync_gradients:
        _waiting.note_pass(accelerator.num_processes)
    return result


def _log(
    original: Callable[..., Any],
    accelerator: Any,
    values: Mapping[str, Any],
    step: int | None = None,
    *arguments: Any,
    **named: Any,
) -> Any:
    if accelerator.is_main_process and step:
        _waiting.step = step
        found = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        metrics_of(run_of_process()).write(step, step, {_grouped(name): x for name, x in found.items()})
    return original(accelerator, values, step, *arguments, **named)


def _grouped(name: str) -> str:
    known = {"loss": "train/loss", "train_loss": "train/loss", "step_loss": "train/loss", "lr": "train/lr"}
    return known.get(name) or (name if "/" in name else f"train/{name}")
