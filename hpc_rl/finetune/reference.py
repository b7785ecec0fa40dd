"""The reference of preference objectives: a frozen model, or its stored log-probabilities."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.training.preferences import DpoConfig
from hpc_rl.data.lazy import Joined, LazyRows, Sizes
from hpc_rl.data.pairs import Preference
from hpc_rl.errors import RunError
from hpc_rl.finetune.base import Work
from hpc_rl.finetune.pair_batch import PairBatch, pack_preferences, response_logprobs
from hpc_rl.finetune.precomputed import Pace, free_memory, results_key, rounds
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir
from hpc_rl.system.disk import explained
from hpc_rl.system.files import replacing
from hpc_rl.training import guards
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.lora import without_adapters
from hpc_rl.training.models.scalar_model import refuse_other_vocabulary
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import reshard
from hpc_rl.training.stopping import Stopped, Stopping


class Reference:
    """A causal language model without its adapters: a frozen model, or the policy with adapters."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    @torch.no_grad()
    def logprobs(self, batch: PairBatch) -> torch.Tensor:
        """Return the log-probability of each sample's targets, [P, W]. Every rank calls this."""
        with without_adapters(self._model):
            found = response_logprobs(self._model, batch)
        reshard(self._model)
        return found


def load_reference(config: DpoConfig, world: World) -> CausalLM:
    """Load a frozen model: ref.path, or the policy before training. Every rank calls this."""
    path, key = config.ref.path or config.model.path, "ref.path" if config.ref.path else "model.path"
    if config.ref.path is not None:
        world.together(lambda: refuse_other_vocabulary(key, path, config.model))
    settings = config.model.model_copy(update={"path": path})
    if world.on_accelerator:  # which computes in bfloat16; no optimizer needs more digits of these weights
        settings = settings.updated("dtype", "bfloat16")
    return load_sharded(causal_lm(settings, trained=False, key=key), world, config.trainer)


def with_ref_logprobs(
    config: DpoConfig,
    train: Sequence[Preference],
    val: Sequence[Preference],
    sizes: Sizes,
    load: Callable[[], CausalLM],
    run: RunDir,
    world: World,
    stopping: Stopping,
) -> tuple[Sequence[Preference], Sequence[Preference]]:
    """Return the preferences with the reference's log-probabilities.

    All ranks compute them together. Rank 0 stores them in the run directory, also while they are computed, so that a
    run that resumes computes only those that are missing.

    Args:
        sizes: of the items of `train`, and after them of `val`.
        load: returns the model whose log-probabilities without adapters these are; called only if some are missing.

    Raises:
        Stopped: the run stops before all are known.
    """
    preferences = Joined(train, val)
    key = world.broadcast(_key(config, preferences) if world.is_main else None)
    found = _read(run.ref_logprobs, key, width=len(preferences[0].samples))
    found = found[: int(world.gather_rows([len(found)]).min())]  # a rank may see an older file than the others
    if len(found) < len(preferences):
        began = time.monotonic()
        with guards.explain_out_of_memory("the reference's log-probabilities"):
            write = partial(_write, run.ref_logprobs, key)
            found = _completed(found, config, preferences, sizes, load, write, world, stopping)
        free_memory(world)
        if world.is_main:
            seconds = time.monotonic() - began
            print(f"reference: log-probabilities in {run.ref_logprobs}, computed in {seconds:.0f} s", flush=True)
    return _Referenced(train, found[: len(train)]), _Referenced(val, found[len(train) :])


class _Referenced(LazyRows[Preference]):
    """Preferences with the reference's log-probabilities."""

    def __init__(self, preferences: Sequence[Preference], found: NDArray[np.float32]) -> None:
        self._preferences, self._found = preferences, found

    def __len__(self) -> int:
        return len(self._preferences)

    def row(self, index: int) -> Preference:
        """See `LazyRows.row`."""
        return replace(self._preferences[index], ref_logprobs=tuple(self._found[index].tolist()))


def _completed(
    found: NDArray[np.float32],
    config: DpoConfig,
    preferences: Sequence[Preference],
    sizes: Sizes,
    load: Callable[[], CausalLM],
    write: Callable[[NDArray[np.float32]], None],
    world: World,
    stopping: Stopping,
) -> NDArray[np.float32]:
    """Return the log-probabilities of all samples, [preferences, samples of each]. Every rank calls this.

    Args:
        found: those of the first preferences, which are known.
        write: stores those of the first preferences.
    """
    pace = Pace(world, stopping)
    for rows in _results(config, preferences, sizes, len(found), Reference(load()), world):
        found = np.concatenate([found, rows])
        stores, stops = pace.after_round(len(found) == len(preferences))
        if stores:
            world.together(lambda rows=found: write(rows) if world.is_main else None)
        if stops:
            raise Stopped(
                f"stopped before the first step: the reference's log-probabilities of {len(found):,} of "
                f"{len(preferences):,} samples or pairs are stored"
            )
    return found


def _results(
    config: DpoConfig,
    preferences: Sequence[Preference],
    sizes: Sizes,
    first: int,
    reference: Reference,
    world: World,
) -> Iterator[NDArray[np.float32]]:
    """Yield the log-probabilities of the next preferences, from the first one without them, until there are all."""
    for start, part in rounds(sizes, first, world):
        own = np.zeros(part.lengths.shape, np.float32)
        for micro in Work.of(part).micro_batches(world, config.trainer):
            batch = pack_preferences([preferences[start + index] for index in micro], own.shape[1]).to(world.device)
            own[micro] = reference.logprobs(batch).cpu().numpy()
            heart.beat()
        rows = world.gather_varied(torch.from_numpy(own.ravel()))
        rows = rows[:: config.trainer.sequence_parallel]  # all ranks of a sequence group have the same ones
        yield torch.stack(rows).sum(dim=0).numpy().reshape(own.shape)


def _key(config: DpoConfig, preferences: Sequence[Preference]) -> str:
    samples = (sample for preference in preferences for sample in preference.samples)
    model = config.model
    quantize = None if config.ref.path else model.lora.quantize  # the model without its adapters keeps its 4 bits
    return results_key(config.ref.path or model.path, [model.dtype, config.trainer.device, quantize], samples)


def _read(path: Path, key: str, width: int) -> NDArray[np.float32]:
    """Return the stored log-probabilities of the first preferences: none if they are not of this model and this data,
    or if the file is damaged."""
    try:
        with np.load(path) as stored:
            if str(stored["key"]) == key:
                return stored["logprobs"].reshape(-1, width)  # type: ignore[no-any-return]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        pass
    return np.zeros((0, width), np.float32)


def _write(path: Path, key: str, logprobs: NDArray[np.float32]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("xb") as file:
            np.savez(file, key=np.array(key), logprobs=logprobs)
    except OSError as error:
        raise RunError(f"{path} could not be written: {explained(error, path)}") from error
