"""Lightning's Trainer saves, ends and resumes as hpc-rl asks, in the middle of an epoch too: its checkpoints get the
states of the random numbers, and a resume fetches the batches again that have been trained on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any

import torch

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
    trainer, fetchers = module.Trainer, import_module(f"{package}.loops.fetchers")
    loop = import_module(f"{package}.loops.training_epoch_loop")._TrainingEpochLoop
    connector = import_module(f"{package}.trainer.connectors.checkpoint_connector")._CheckpointConnector
    trainer.fit = _adapted_fit(trainer.fit, package)
    connector.resume_start = _resumed(connector.resume_start)
    trainer.save_checkpoint = _recorded(trainer.save_checkpoint)
    loop.on_run_start = _fetched_again(loop.on_run_start)
    _remember_states(fetchers._PrefetchDataFetcher)


class LightningAdapter:
    """The adapter of one call of Trainer.fit; as a callback of Lightning, see _callback_class."""

    def __init__(self, trainer: Any, part: str) -> None:
        self.part = part
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
        trainer.save_checkpoint(run_of_process().path / "lightning" / self.part / f"step-{step}.ckpt")

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


def _adapted_fit(original: Callable[..., Any], package: str) -> Callable[..., Any]:
    @wraps(original)
    def fit(self: Any, *arguments: Any, **named: Any) -> Any:
        if not any(type(callback).__name__ == "HpcRl" for callback in self.callbacks):
            self.callbacks.append(_callback_class(package)())
        _own[id(self)] = LightningAdapter(self, f"fit-{next(_fits)}")
        try:
            with heart.phase("training"):
                return original(self, *arguments, **named)
        finally:
            del _own[id(self)]

    return fit


def _resumed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Resume from the last checkpoint of the run, if there is one: the program's own is for its first start."""

    @wraps(original)
    def resume_start(self: Any, path: Any = None, *arguments: Any, **named: Any) -> None:
        if (adapter := _own.get(id(self.trainer))) is None or (own := adapter.newest()) is None:
            original(self, path, *arguments, **named)
            return
        takes = signature(original).parameters
        original(self, own, **({"weights_only": False} if "weights_only" in takes else {}))

    return resume_start


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record each checkpoint that can be resumed from, also those of ModelCheckpoint."""

    @wraps(original)
    def save_checkpoint(self: Any, filepath: Any, weights_only: Any = None, *arguments: Any, **named: Any) -> None:
        began = time.monotonic()
        with heart.phase("save_checkpoint"):
            original(self, filepath, weights_only, *arguments, **named)
        if (adapter := _own.get(id(self))) is not None and not weights_only and "://" not in str(filepath):
            adapter.training.saved(self.global_step, Path(filepath), time.monotonic() - began)

    return save_checkpoint


def _fetched_again(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def on_run_start(self: Any, fetcher: Any) -> None:
        original(self, fetcher)
        if (adapter := _own.get(id(self.trainer))) is not None and adapter.resumed:
            adapter.fetch_again(fetcher, self.batch_progress.current.ready)

    return on_run_start


def _remember_states(fetcher: Any) -> None:
    """Remember the random numbers at the start of an epoch's batches, and at the first batch."""
    begin, take = fetcher.__iter__, fetcher.__next__

    @wraps(begin)
    def __iter__(self: Any) -> Any:
        self._hpc_rl_states = (random_states(), None)
        return begin(self)

    @wraps(take)
    def __next__(self: Any) -> Any:
        states = getattr(self, "_hpc_rl_states", None)
        if states is not None and states[1] is None:
            self._hpc_rl_states = (states[0], random_states())
        return take(self)

    fetcher.__iter__, fetcher.__next__ = __iter__, __next__
