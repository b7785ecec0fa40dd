"""The reference of preference objectives: a frozen model, or its stored log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hpc_rl.config.training.preferences import DpoConfig
from hpc_rl.data.lazy import Joined, Sizes
from hpc_rl.data.pairs import Preference
from hpc_rl.finetune.base import Work
from hpc_rl.finetune.pair_batch import PairBatch, pack_preferences, response_logprobs
from hpc_rl.finetune.precomputed import Results, results_key, rounds, with_results
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.lora import without_adapters
from hpc_rl.training.models.scalar_model import refuse_other_vocabulary
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import reshard
from hpc_rl.training.stopping import Stopping


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
    """Return the preferences with the reference's log-probabilities, one result for each preference.

    Args:
        sizes: of the items of `train`, and after them of `val`.
        load: returns the model whose log-probabilities without adapters these are; called only if some are missing.

    Raises:
        Stopped: the run stops before all are known.
    """
    preferences = Joined(train, val)
    bounds = np.arange(len(preferences) + 1)
    folder = run.ref_logprobs / str(world.broadcast(_key(config, preferences) if world.is_main else None))
    compute = partial(_results, config, preferences, sizes, load, world)
    dtype = logprobs_dtype(len(preferences[0].samples))
    what = "the reference's log-probabilities"
    return with_results(what, folder, dtype, train, val, bounds, compute, _referenced, world, stopping)


def logprobs_dtype(samples: int) -> np.dtype[Any]:
    """Return the type of a preference's stored log-probabilities: of each sample's response."""
    return np.dtype([("logprobs", "<f4", (samples,))])


def _referenced(preference: Preference, found: Results) -> Preference:
    return replace(preference, ref_logprobs=tuple(found["logprobs"][0].tolist()))


def _results(
    config: DpoConfig,
    preferences: Sequence[Preference],
    sizes: Sizes,
    load: Callable[[], CausalLM],
    world: World,
    first: int,
) -> Iterator[Results]:
    """Yield the log-probabilities of the next preferences, from the first one without them, until there are all."""
    reference = Reference(load())
    for start, part in rounds(sizes, first, world):
        own = np.zeros(part.lengths.shape, np.float32)
        for micro in Work.of(part).micro_batches(world, config.trainer):
            batch = pack_preferences([preferences[start + index] for index in micro], own.shape[1]).to(world.device)
            own[micro] = reference.logprobs(batch).cpu().numpy()
            heart.beat()
        rows = world.gather_varied(torch.from_numpy(own.ravel()))
        rows = rows[:: config.trainer.sequence_parallel]  # all ranks of a sequence group have the same ones
        yield torch.stack(rows).sum(dim=0).numpy().view(logprobs_dtype(own.shape[1]))


def _key(config: DpoConfig, preferences: Sequence[Preference]) -> str:
    samples = (sample for preference in preferences for sample in preference.samples)
    model = config.model
    quantize = None if config.ref.path else model.lora.quantize  # the model without its adapters keeps its 4 bits
    return results_key(config.ref.path or model.path, [model.dtype, config.trainer.device, quantize], samples)
