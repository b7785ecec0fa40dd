"""The teacher of distillation: a frozen model, or its most probable tokens, which were stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.data.lazy import Joined, Sizes
from hpc_rl.data.sample_files import Samples
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune.base import Work
from hpc_rl.finetune.precomputed import results_key, rounds, with_results
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples
from hpc_rl.training.models.distill_head import Teaching, in_chunks, live
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.teacher import teacher_model
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import reshard
from hpc_rl.training.stopping import Stopping

TopK = NDArray[Any]
"""Targets of some samples, one after the other, with the fields of `top_k_dtype`."""


@dataclass(frozen=True)
class DistillItem:
    """A sample, and the teacher's most probable tokens at its targets if they were stored."""

    sample: Sample
    top_k: TopK | None = None
    """It is read from disk when it is used."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The sample: what a micro-batch cannot divide."""
        return (self.sample,)


DISTILL_ITEMS: Samples[DistillItem] = Samples(1, 0, lambda samples, _: DistillItem(samples[0]))


class Teacher:
    """A frozen causal language model, sharded over all ranks.

    Args:
        tokens: number of its outputs to use, the first ones.
    """

    def __init__(self, config: DistillConfig, tokens: int, world: World) -> None:
        self._tokens = tokens
        self._config = config
        found = teacher_model(config.teacher.path, config.model, world.on_accelerator)
        self._model = load_sharded(found, world, config.trainer)
        self.sequence = self._model.sequence
        self.softcap = self._model.softcap

    @torch.no_grad()
    def outputs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states [N, G] and the head's weight [V, G], which is valid until `release`. Every rank calls
        both.

        Args:
            batch: a row, or this rank's slice of it; see SequenceGroup.own.
        """
        hidden_NG, weight_VG = self._model(batch, lambda hidden_NG, weight_VG: (hidden_NG, weight_VG))
        return hidden_NG, weight_VG[: self._tokens]

    def teaching(self, batch: PackedBatch) -> Teaching:
        """Return the distributions at the targets of a row, or of this rank's slice of it, which are valid until
        `release`. Every rank calls both."""
        own = self._config
        return live(*self.outputs(batch), own.algorithm.temperature, own.teacher.top_k, self.softcap)

    def release(self) -> None:
        """Free the memory of the head's weight, if it was gathered."""
        reshard(self._model)


def pack_items(items: Sequence[DistillItem]) -> PackedBatch:
    """Build the packed row of a micro-batch; the filler if a rank has no samples left."""
    samples = [item.sample for item in items]
    return pack_samples([one.input_ids for one in samples], [one.loss_mask for one in samples]) if samples else filler()


def top_k_dtype(top_k: int) -> np.dtype[Any]:
    """Return the type of a stored target: its most probable tokens, the most probable first; their log-probabilities,
    and that of all other tokens together."""
    return np.dtype([("ids", "<i4", (top_k,)), ("logprobs", "<f4", (top_k + 1,))])


def with_top_k(
    config: DistillConfig,
    tokens: int,
    train: Sequence[DistillItem],
    val: Sequence[DistillItem],
    sizes: Sizes,
    run: RunDir,
    world: World,
    stopping: Stopping,
) -> tuple[Sequence[DistillItem], Sequence[DistillItem]]:
    """Return the items with the teacher's most probable tokens, one result for each target.

    Args:
        tokens: number of the teacher's outputs to use.
        sizes: of the items of `train`, and after them of `val`.

    Raises:
        Stopped: the run stops before all are known.
    """
    items = Joined(train, val)
    bounds = np.concatenate([[0], np.cumsum(sizes.targets[:, 0])])
    folder = run.teacher_top_k / str(world.broadcast(_key(config, items) if world.is_main else None))
    compute = partial(_results, config, tokens, items, sizes, world)
    dtype = top_k_dtype(config.teacher.top_k or 0)
    what = "the teacher's most probable tokens"
    return with_results(what, folder, dtype, train, val, bounds, compute, _taught, world, stopping)


def _taught(item: DistillItem, top_k: TopK) -> DistillItem:
    return replace(item, top_k=top_k)


def _results(
    config: DistillConfig, tokens: int, items: Sequence[DistillItem], sizes: Sizes, world: World, first: int
) -> Iterator[TopK]:
    """Yield the results of the next items, from the first one without them, until there are all."""
    teacher = Teacher(config, tokens, world)
    for start, part in rounds(sizes, first, world):
        size, plan = config.trainer.sequence_parallel, Work.of(part).plan(world, config.trainer)
        micro_batches = ([items[start + index] for index in micro] for micro in plan[world.rank // size])
        own = np.concatenate([_top_k(config, teacher, micro, world) for micro in micro_batches])
        by_rank = world.gather_varied(torch.from_numpy(own.view(np.uint8)))
        of_item: dict[int, TopK] = {}
        for group, found in enumerate(by_rank[::size]):  # all ranks of a sequence group have the same ones
            order = [index for micro in plan[group] for index in micro]
            cuts = np.cumsum(part.targets[order, 0])[:-1]
            of_item |= zip(order, np.split(found.numpy().view(own.dtype), cuts), strict=False)
        yield np.concatenate([of_item[index] for index in range(len(of_item))])


def _top_k(config: DistillConfig, teacher: Teacher, items: Sequence[DistillItem], world: World) -> TopK:
    """Return the teacher's most probable tokens at the targets of a micro-batch, on all ranks of a sequence group."""
    batch = pack_items(items).to(world.device)
    hidden_NG, weight_VG = teacher.outputs(teacher.sequence.own(batch))
    teaching = live(hidden_NG, weight_VG, config.algorithm.temperature, config.teacher.top_k, teacher.softcap)
    top_k = config.teacher.top_k or 0
    ids = [hidden_NG.new_empty(0, top_k, dtype=torch.int64)]
    logprobs = [hidden_NG.new_empty(0, top_k + 1, dtype=torch.float32)]
    for taught in in_chunks(teaching, len(hidden_NG), weight_VG):
        assert taught.ids_CK is not None
        ids.append(taught.ids_CK)
        logprobs.append(taught.logprobs_CV)
    teacher.release()
    heart.beat()
    found = np.empty(len(batch.rows), top_k_dtype(top_k))
    found["ids"] = teacher.sequence.whole(torch.cat(ids), batch).cpu().numpy()
    found["logprobs"] = teacher.sequence.whole(torch.cat(logprobs), batch).cpu().numpy()
    return found


def _key(config: DistillConfig, items: Sequence[DistillItem]) -> str:
    settings = [config.model.dtype, config.trainer.device, config.teacher.top_k, config.algorithm.temperature]
    return results_key(config.teacher.path, settings, (item.sample for item in items))
