"""Lightning's Trainer saves, ends and resumes as hpc-rl asks, in the middle of an epoch too: its checkpoints get the
states of the random numbers, and a resume fetches the batches again that have been trained on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hpc_rl.adapters.inside import beats
from hpc_rl.adapters.inside.hooks import wrap
from hpc_rl.adapters.inside.run import run_of_process
from hpc_rl.adapters.inside.training import Training
from hpc_rl.liveness.heartbeat import heart

METRICS: Mapping[str, str] = {"loss": "train/loss", "train_loss": "train/loss", "val_loss": "val/loss"}
"""Common names of measurements -> ours. Others keep theirs, after `train/` if they have no group."""
_KEY = "hpc_rl"
"""Of a checkpoint: the random numbers of each rank. See LightningAdapter.states."""
_own: dict[int, LightningAdapter] = {}
"""Identity of a Trainer -> the adapter of its training."""
_fits = count()
"""Number the trainings of this process: their order is the same in each attempt."""


def attach(module: Any) -> None:
    """Add the adapter to lightning.pytorch.trainer.trainer, or to the same module of pytorch_lightning."""
    package = module.__name__.removesuffix(".trainer.trainer")
    fetcher = import_module(f"{package}.loops.fetchers")._PrefetchDataFetcher
    loop = import_module(f"{package}.loops.training_epoch_loop")._TrainingEpochLoop
    connector = import_module(f"{package}.trainer.connectors.checkpoint_connector")._CheckpointConnector
    wrap(module.Trainer, "fit", partial(_fit, _callback_class(package)))
    wrap(module.Trainer, "save_checkpoint", _save_checkpoint)
    wrap(connector, "resume_start", _resume_start)
    wrap(loop, "on_run_start", _on_run_start)
    wrap(fetcher, "__iter__", _iter)
    wrap(fetcher, "__next__", _next)


class LightningAdapter:
    """The adapter of one call of Trainer.fit; as a callback of Lightning, see _callback_class."""

    def __init__(self, trainer: Any, part: str) -> None:
        self.part = part
        self._folder = run_of_process().path / "lightning" / part
        """Of the checkpoints that stops write."""
        self._trainer = trainer
        self._step = 0
        self._was_postponed = False
        self._testing_since = 0.0
        self._trained: set[str] = set()
        self._tested: set[str] = set()
        """Names of what training and validation have measured. Lightning shows both, from then on."""
        self.resumed: Any = False
        """Whether the training resumes; the states in its checkpoint, from when it is loaded until the first batch."""

    def newest(self) -> str | None:
        """Begin the training, as the ranks have met, and return the checkpoint to resume from."""
        self.training = Training(self.part)
        found = self.training.newest()
        self.resumed = found is not None
        return found.path if found else None

    def started(self) -> None:
        self._step = self._trainer.global_step

    def batch_ended(self) -> None:
        """Decide on all ranks alike whether this step is the last one of the attempt, if the batch has ended a step.

        Before a validation and the end of an epoch, a stop waits for one more step: it could not be resumed exactly.
        """
        heart.beat()
        trainer, step = self._trainer, self._trainer.global_step
        if step == self._step:
            return
        self._step = step
        total = trainer.estimated_stepping_batches
        is_near = trainer.is_last_batch or trainer.fit_loop.epoch_loop._should_check_val_fx(
            trainer.fit_loop._data_fetcher
        )
        is_due = self.training.ends_step(step, int(total) if total < float("inf") else None, tests=is_near)
        if step % trainer.log_every_n_steps == 0:
            self._trained |= trainer.callback_metrics.keys() - self._tested
            self.training.log(renamed(self._of(self._trained), trainer.optimizers))
        if not is_due:
            return
        if is_near and not self._was_postponed and self.training.has_time(tests=True):
            self._was_postponed, self.training.is_stopping = True, False
            return
        trainer.save_checkpoint(self._folder / f"step-{step}.ckpt")

    def saved(self, path: Path, seconds: float) -> None:
        """Record a checkpoint, which replaces those of earlier stops if it is not still being written."""
        is_written = "Async" not in type(self._trainer.strategy.checkpoint_io).__name__
        self.training.saved(self._trainer.global_step, path, seconds, own=self._folder if is_written else None)

    def validation_started(self) -> None:
        self._testing_since = time.monotonic()

    def validation_ended(self) -> None:
        if not self._trainer.sanity_checking:
            self._tested |= self._trainer.callback_metrics.keys() - self._trained
            self.training.log(renamed(self._of(self._tested), ()))
            self.training.tested(time.monotonic() - self._testing_since)

    def _of(self, names: set[str]) -> dict[str, Any]:
        return {name: value for name, value in self._trainer.callback_metrics.items() if name in names}

    def states(self) -> list[Any]:
        """Return the random numbers of all ranks, at the start of the epoch's batches and now."""
        fetcher = self._trainer.fit_loop._data_fetcher
        own = [*getattr(fetcher, "_hpc_rl_states", (None, None)), random_states()]
        return self.training.ranks.all(own)

    def fetch_again(self, fetcher: Any, ready: int) -> None:
        """Fetch the batches of the epoch that were fetched before the checkpoint, as they were."""
        rank, states = self.training.ranks.rank, self.resumed
        self.resumed = False
        if not isinstance(states, list) or len(states) != self.training.ranks.count:
            return  # of another number of processes
        at_start, at_first, now = states[rank]
        if ready and at_start is not None and hasattr(fetcher, "_hpc_rl_states"):
            set_random_states(at_start)
            iter(fetcher)
            set_random_states(at_first or at_start)
            for _ in range(ready):
                next(fetcher)
                heart.beat()
        set_random_states(now)
        if not ready:
            iter(fetcher)


def renamed(metrics: Mapping[str, Any], optimizers: Any) -> dict[str, float]:
    """Return what a module has logged under our names, and the learning rate."""
    found = {METRICS.get(name) or (name if "/" in name else f"train/{name}"): float(x) for name, x in metrics.items()}
    return {**found, **({"train/lr": float(optimizers[0].param_groups[0]["lr"])} if optimizers else {})}


def random_states() -> dict[str, Any]:
    """Return the states of the random numbers, in types that torch loads without running code."""
    import random

    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    if (numpy := _numpy()) is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    return found


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set what random_states has returned."""
    import random

    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := _numpy()) is not None:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def _numpy() -> Any:
    try:
        return import_module("numpy")
    except ImportError:
        return None


def _callback_class(package: str) -> type:
    """Return the class that hands Lightning's events to the adapter of a training."""

    def to(name: str) -> Callable[..., None]:
        def event(_callback: Any, trainer: Any, *_: Any, **__: Any) -> None:
            if (adapter := _own.get(id(trainer))) is not None:
                getattr(adapter, name)()

        return event

    def beat(*_: Any, **__: Any) -> None:
        heart.beat()

    def save(_callback: Any, trainer: Any, _module: Any, checkpoint: dict[str, Any]) -> None:
        if (adapter := _own.get(id(trainer))) is not None:
            checkpoint[_KEY] = adapter.states()

    def load(_callback: Any, trainer: Any, _module: Any, checkpoint: Mapping[str, Any]) -> None:
        if (adapter := _own.get(id(trainer))) is not None and adapter.resumed is True:
            adapter.resumed = checkpoint.get(_KEY)
            if adapter.resumed:
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")

    methods: dict[str, Any] = {
        "on_train_start": to("started"),
        "on_train_batch_end": to("batch_ended"),
        "on_validation_start": to("validation_started"),
        "on_validation_end": to("validation_ended"),
        "on_validation_batch_end": beat,
        "on_save_checkpoint": save,
        "on_load_checkpoint": load,
    }
    return type("HpcRl", (import_module(f"{package}.callbacks").Callback,), methods)


def _fit(callback: type, original: Callable[..., Any], trainer: Any, *arguments: Any, **named: Any) -> Any:
    if not any(type(own) is callback for own in trainer.callbacks):
        trainer.callbacks.append(callback())
    _own[id(trainer)] = LightningAdapter(trainer, f"fit-{next(_fits)}")
    try:
        return original(trainer, *arguments, **named)
    finally:
        beats.end()
        del _own[id(trainer)]


def _resume_start(
    original: Callable[..., Any], connector: Any, path: Any = None, *arguments: Any, **named: Any
) -> None:
    """Resume from the last checkpoint of the run, if there is one: the program's own is for its first start."""
    if (adapter := _own.get(id(connector.trainer))) is None or (own := adapter.newest()) is None:
        original(connector, path, *arguments, **named)
        return
    takes = signature(original).parameters
    original(connector, own, **({"weights_only": False} if "weights_only" in takes else {}))


def _save_checkpoint(
    original: Callable[..., Any],
    trainer: Any,
    filepath: Any,
    weights_only: Any = None,
    *arguments: Any,
    **named: Any,
) -> None:
    """Record each checkpoint that can be resumed from, also those of ModelCheckpoint."""
    began = time.monotonic()
    with heart.phase("save_checkpoint"):
        original(trainer, filepath, weights_only, *arguments, **named)
    if (adapter := _own.get(id(trainer))) is not None and not weights_only and "://" not in str(filepath):
        adapter.saved(Path(filepath), time.monotonic() - began)


def _on_run_start(original: Callable[..., Any], loop: Any, fetcher: Any) -> None:
    original(loop, fetcher)
    if (adapter := _own.get(id(loop.trainer))) is not None and adapter.resumed:
        adapter.fetch_again(fetcher, loop.batch_progress.current.ready)


def _iter(original: Callable[..., Any], fetcher: Any) -> Any:
    """Remember the random numbers at the start of an epoch's batches."""
    fetcher._hpc_rl_states = (random_states(), None)
    return original(fetcher)


def _next(original: Callable[..., Any], fetcher: Any) -> Any:
    """Remember the random numbers at the first batch."""
    states = getattr(fetcher, "_hpc_rl_states", None)
    if states is not None and states[1] is None:
        fetcher._hpc_rl_states = (states[0], random_states())
    return original(fetcher)
