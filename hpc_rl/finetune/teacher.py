"""The teacher of distillation: a frozen model, or its most probable tokens, which were stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.data.lazy import Joined, LazyRows, Sizes
from hpc_rl.data.sample_files import Samples
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.errors import RunError, UserError
from hpc_rl.finetune.base import Work
from hpc_rl.finetune.precomputed import Pace, free_memory, results_key, rounds
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir
from hpc_rl.system.disk import explained
from hpc_rl.system.files import replacing
from hpc_rl.training import guards
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples
from hpc_rl.training.models.distill_head import Teaching, in_chunks, live
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.teacher import teacher_model
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import reshard
from hpc_rl.training.stopping import Stopped, Stopping

_STORE_BYTES = 256 << 20
"""Bytes of results after which they are stored earlier."""
TopK = NDArray[Any]
"""Targets of some samples, one after the other, with the fields of `top_k_dtype`."""


@dataclass(frozen=True)
class Lesson:
    """A sample, and the teacher's most probable tokens at its targets if they were stored."""

    sample: Sample
    top_k: TopK | None = None
    """It is read from disk when it is used."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The sample: what a micro-batch cannot divide."""
        return (self.sample,)


LESSONS: Samples[Lesson] = Samples(1, 0, lambda samples, _: Lesson(samples[0]))


class TaughtLessons(LazyRows[Lesson]):
    """Lessons with stored tokens.

    Args:
        bounds: number of stored targets before each lesson, and before the first one that follows.
        parts: the stored tokens of all targets; a part has those of whole lessons.
    """

    def __init__(self, lessons: Sequence[Lesson], bounds: NDArray[np.int64], parts: Sequence[TopK]) -> None:
        self._lessons, self._bounds, self._parts = lessons, bounds, parts
        self._part_ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return len(self._lessons)

    def row(self, index: int) -> Lesson:
        """See `LazyRows.row`."""
        start, end = self._bounds[index : index + 2].tolist()
        number = int(np.searchsorted(self._part_ends, start, side="right"))
        before = int(self._part_ends[number]) - len(self._parts[number])
        return replace(self._lessons[index], top_k=self._parts[number][start - before : end - before])


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


def pack_lessons(lessons: Sequence[Lesson]) -> PackedBatch:
    """Build the packed row of a micro-batch; the filler if a rank has no samples left."""
    samples = [lesson.sample for lesson in lessons]
    return pack_samples([one.input_ids for one in samples], [one.loss_mask for one in samples]) if samples else filler()


def top_k_dtype(top_k: int) -> np.dtype[Any]:
    """Return the type of a stored target: its most probable tokens, the most probable first; their log-probabilities,
    and that of all other tokens together."""
    return np.dtype([("ids", "<i4", (top_k,)), ("logprobs", "<f4", (top_k + 1,))])


def with_top_k(
    config: DistillConfig,
    tokens: int,
    train: Sequence[Lesson],
    val: Sequence[Lesson],
    sizes: Sizes,
    run: RunDir,
    world: World,
    stopping: Stopping,
) -> tuple[TaughtLessons, TaughtLessons]:
    """Return the lessons with the teacher's most probable tokens.

    All ranks compute them together. Rank 0 stores them in the run directory, also while they are computed, so that a
    run that resumes computes only those that are missing. A file is named after the number of its first target.

    Args:
        tokens: number of the teacher's outputs to use.
        sizes: of the lessons of `train`, and after them of `val`.

    Raises:
        Stopped: the run stops before all are known.
    """
    lessons = Joined(train, val)
    bounds = np.concatenate([[0], np.cumsum(sizes.targets[:, 0])])
    folder = run.teacher_top_k / str(world.broadcast(_key(config, lessons) if world.is_main else None))
    dtype = top_k_dtype(config.teacher.top_k or 0)
    known = int(world.broadcast(sum(map(len, _stored(folder, dtype))) if world.is_main else None))
    if known < bounds[-1]:
        began = time.monotonic()
        with guards.explain_out_of_memory("the teacher's most probable tokens"):
            _complete(config, tokens, lessons, sizes, known, folder, world, stopping)
        free_memory(world)
        if world.is_main:
            print(
                f"teacher: top {config.teacher.top_k} tokens in {folder}, {time.monotonic() - began:.0f} s", flush=True
            )
    parts = world.together(lambda: _all_stored(folder, dtype, int(bounds[-1])))
    return TaughtLessons(train, bounds[: len(train) + 1], parts), TaughtLessons(val, bounds[len(train) :], parts)


def _complete(
    config: DistillConfig,
    tokens: int,
    lessons: Sequence[Lesson],
    sizes: Sizes,
    known: int,
    folder: Path,
    world: World,
    stopping: Stopping,
) -> None:
    """Compute and store what is missing. Every rank calls this.

    Args:
        known: number of targets, of the first lessons, that are stored.
    """
    first = int(np.searchsorted(np.cumsum(sizes.targets[:, 0]), known, side="right"))
    waiting: list[TopK] = []
    pace = Pace(world, stopping)
    for done, rows in _results(config, tokens, lessons, sizes, first, world):
        waiting.append(rows)
        is_full = sum(part.nbytes for part in waiting) > _STORE_BYTES
        stores, stops = pace.after_round(done == len(lessons), is_full)
        if stores:
            part = np.concatenate(waiting)
            world.together(lambda part=part, known=known: _write(folder, known, part) if world.is_main else None)
            known += len(part)
            waiting.clear()
        if stops:
            raise Stopped(
                f"stopped before the first step: the teacher's most probable tokens of {done:,} of {len(lessons):,} "
                "samples are stored"
            )


def _results(
    config: DistillConfig, tokens: int, lessons: Sequence[Lesson], sizes: Sizes, first: int, world: World
) -> Iterator[tuple[int, TopK]]:
    """Yield (number of lessons that are done, the results of the next ones) until all are done."""
    teacher = Teacher(config, tokens, world)
    for start, part in rounds(sizes, first, world):
        size, plan = config.trainer.sequence_parallel, Work.of(part).plan(world, config.trainer)
        micro_batches = ([lessons[start + index] for index in micro] for micro in plan[world.rank // size])
        own = np.concatenate([_top_k(config, teacher, micro, world) for micro in micro_batches])
        by_rank = world.gather_varied(torch.from_numpy(own.view(np.uint8)))
        of_lesson: dict[int, TopK] = {}
        for group, found in enumerate(by_rank[::size]):  # all ranks of a sequence group have the same ones
            order = [index for micro in plan[group] for index in micro]
            cuts = np.cumsum(part.targets[order, 0])[:-1]
            of_lesson |= zip(order, np.split(found.numpy().view(own.dtype), cuts), strict=False)
        yield start + len(of_lesson), np.concatenate([of_lesson[index] for index in range(len(of_lesson))])


def _top_k(config: DistillConfig, teacher: Teacher, lessons: Sequence[Lesson], world: World) -> TopK:
    """Return the teacher's most probable tokens at the targets of a micro-batch, on all ranks of a sequence group."""
    batch = pack_lessons(lessons).to(world.device)
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


def _key(config: DistillConfig, lessons: Sequence[Lesson]) -> str:
    settings = [config.model.dtype, config.trainer.device, config.teacher.top_k, config.algorithm.temperature]
    return results_key(config.teacher.path, settings, (lesson.sample for lesson in lessons))[:16]


def _stored(folder: Path, dtype: np.dtype[Any]) -> list[TopK]:
    """Return the results of the first targets, without those after a damaged file. They are not read into memory."""
    parts: list[TopK] = []
    while True:
        try:
            part = np.load(folder / f"{sum(map(len, parts))}.npy", mmap_mode="r")
        except (OSError, EOFError, ValueError):
            return parts
        if part.dtype != dtype or not len(part):
            return parts
        parts.append(part.view(np.ndarray))


def _all_stored(folder: Path, dtype: np.dtype[Any], targets: int) -> list[TopK]:
    """Return the results of all targets.

    Raises:
        UserError: a file that was just written is not there.
    """
    parts = _stored(folder, dtype)
    if (found := sum(map(len, parts))) != targets:
        raise UserError(
            f"{folder} has the teacher's most probable tokens of {found:,} instead of {targets:,} targets: check that "
            "all nodes see the same run directory, delete this folder and start the run again"
        )
    return parts


def _write(folder: Path, first: int, part: TopK) -> None:
    path = folder / f"{first}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("xb") as file:
            np.save(file, part)
    except OSError as error:
        raise RunError(f"{path} could not be written: {explained(error, path)}") from error
