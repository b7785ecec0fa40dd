"""A teacher on ranks of its own: the same losses and gradients as with the teacher on the student's ranks."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hpc_rl.errors import EXIT_STOPPED, AgreedError, RunError
from hpc_rl.finetune import teacher_ranks, trainer
from hpc_rl.finetune.teacher_ranks import Teams, divided, split
from hpc_rl.finetune.train import parse
from hpc_rl.node.causes import Kind, kind_of
from hpc_rl.run_dir import RunDir
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World
from tests.finetune.jobs import ALONE, arguments, run_here, run_job, run_several, run_stopped, series, spawn
from tests.helpers import make_tiny_model, write_chats

KIND = ["--kind", "distill"]
COMPARED = ("train/loss", "train/divergence", "train/cross_entropy", "train/agreement", "train/grad_norm", "val/loss")


def write_gradients(patch: pytest.MonkeyPatch, run: RunDir, world: World) -> None:
    """Write the gradients of each step before they are clipped, by the numbers of their parameters."""
    clip = trainer.clip_gradients

    def write_and_clip(parameters: Iterable[nn.Parameter], limit: float) -> float:
        listed = list(parameters)
        grads = [one.grad for one in listed if one.grad is not None]
        whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        if world.is_main:
            torch.save(dict(enumerate(whole)), run.path / "gradients.pt")
        return clip(listed, limit)

    patch.setattr(trainer, "clip_gradients", write_and_clip)


def die_at(patch: pytest.MonkeyPatch, micro_batch: int) -> None:
    answer, answered = teacher_ranks._answer, itertools.count()

    def answer_or_die(*arguments: Any) -> list[torch.Tensor]:
        if next(answered) == micro_batch:
            raise RuntimeError("the teacher dies")
        return answer(*arguments)

    patch.setattr(teacher_ranks, "_answer", answer_or_die)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three steps. A rank has several micro-batches of one sample in each, and some ranks have one without a sample."""
    folder = tmp_path_factory.mktemp("distill")
    make_tiny_model(folder / "model", tie=True)
    make_tiny_model(folder / "teacher", hidden=48)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    torch.nn.init.normal_(theirs.lm_head.weight, std=0.3)
    theirs.save_pretrained(folder / "teacher")
    write_chats(folder / "train.jsonl", 22)
    return [
        *KIND,
        f"model.path={folder / 'model'}",
        f"teacher.path={folder / 'teacher'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'train.jsonl'}",
        *("data.train_batch_size=8", "data.max_length=128", "trainer.packing=false", "trainer.test_freq=2"),
        *("optim.lr=1e-2", "trainer.device=cpu", "trainer.export=false"),
        *("algorithm.sft_coeff=0.3", "algorithm.temperature=2", "trainer.n_gpus_per_node=8"),
    ]


def same(expected: Path, found: Path, tolerance: float = 1e-5) -> None:
    for name in COMPARED:
        assert series(expected, name), name
        assert series(found, name) == pytest.approx(series(expected, name), rel=tolerance, abs=tolerance), name


def gradients(
    base: Sequence[str], folder: Path, ranks: int, losses: dict[str, list[str]], *more: str
) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of the first step with several losses, which rank 0 of the student writes."""
    more = (*more, "trainer.total_training_steps=1")
    for name, words in losses.items():  # a group of all ranks has the number of the groups before it as its name
        run = arguments(base, folder / name, *words, *more)
        results = spawn([__file__, "gradients", json.dumps([run])], ranks, timeout=600)
        assert [code for code, _, _ in results] == [0] * ranks, results
    return {name: torch.load(folder / name / "gradients.pt") for name in losses}


def test_gradients_are_those_of_a_teacher_on_the_ranks_of_the_student(base: list[str], tmp_path: Path) -> None:
    losses = {"whole": [], "top k": ["teacher.top_k=7", "algorithm.divergence=js"]}
    expected = gradients(base, tmp_path / "shared", 3, losses)
    found = gradients(base, tmp_path / "own", 4, losses, "teacher.ranks_per_node=1")
    for name in losses:
        assert max(one.abs().max() for one in found[name].values()) > 1e-3
        for key, one in expected[name].items():
            torch.testing.assert_close(found[name][key], one, atol=1e-5, rtol=1e-5, msg=f"{name}: {key}")
        same(tmp_path / "shared" / name, tmp_path / "own" / name)


@pytest.mark.long
def test_several_nodes(base: list[str], tmp_path: Path) -> None:
    """Two nodes of three ranks, of which two train."""
    assert run_here(base, tmp_path / "alone") == 0
    splits = {
        "hybrid": ["trainer.sharding=hybrid", "teacher.ranks_per_node=1"],
        "none": ["trainer.sharding=none", "teacher.ranks_per_node=1", "trainer.packing=true"],
    }
    runs = [(base, tmp_path / name, more) for name, more in splits.items()]
    results = run_several(runs, ranks=6, ranks_per_node=3, timeout=600)
    assert ["exit codes 0 0" in out for _, out, _ in results] == [True] * 6, results
    for name in splits:
        same(tmp_path / "alone", tmp_path / name, tolerance=1e-4)


@pytest.mark.long
def test_more_ranks_of_the_teacher_than_of_the_student(base: list[str], tmp_path: Path) -> None:
    assert run_here(base, tmp_path / "alone") == 0
    more = ["teacher.ranks_per_node=2", "trainer.sharding=gradients"]
    results = run_several([(base, tmp_path / "run", more)], ranks=3, timeout=600)
    assert ["exit codes 0" in out for _, out, _ in results] == [True] * 3, results
    same(tmp_path / "alone", tmp_path / "run", tolerance=1e-4)


def test_stopped_within_a_step_and_resumed_without_own_ranks(base: list[str], tmp_path: Path) -> None:
    assert run_here(base, tmp_path / "alone") == 0
    results = run_stopped([(base, tmp_path / "run", ["teacher.ranks_per_node=1"])], micro_batch=6, ranks=3)
    assert [f"exit codes {EXIT_STOPPED}" in out for _, out, _ in results] == [True] * 3, results
    assert 0 < len(series(tmp_path / "run", "train/loss")) < len(series(tmp_path / "alone", "train/loss"))
    (tmp_path / "run/stop").unlink()
    assert run_here(base, tmp_path / "run") == 0
    same(tmp_path / "alone", tmp_path / "run", tolerance=1e-4)


def test_a_teacher_that_dies_ends_the_run(base: list[str], tmp_path: Path) -> None:
    run = arguments(base, tmp_path, "teacher.ranks_per_node=1")
    results = spawn([__file__, "die", json.dumps([run])], ranks=2, timeout=600)
    assert [code for code, _, _ in results] == [1, 1], results
    assert "the teacher dies" in results[1][2]
    assert kind_of(1, False, results[0][2]) == Kind.CONNECTION, "it is not taken for the cause"


def test_a_teacher_that_cannot_be_loaded(base: list[str], tmp_path: Path) -> None:
    (path,) = [word.removeprefix("teacher.path=") for word in base if word.startswith("teacher.path=")]
    shutil.copytree(path, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    empty = f"teacher.path={tmp_path / 'empty'}"
    results = run_job(base, tmp_path / "run", empty, "teacher.ranks_per_node=1", ranks=2)
    assert [code for code, _, _ in results] == [2, 2], results
    assert results[0][2].startswith("rank 1: ") and "teacher.path" in results[0][2], results


def test_a_mistake_that_all_ranks_find_is_printed_once(base: list[str], tmp_path: Path) -> None:
    mistake = ["teacher.ranks_per_node=1", "teacher.top_k=200000"]
    results = run_job(base, tmp_path / "run", *mistake, ranks=2)
    assert [code for code, _, _ in results] == [2, 2], results
    assert "teacher.top_k 200000 is not less than the" in results[0][2] and not results[1][2], results


def teams(per_node: int, teachers: int, nodes: int, rank: int) -> Teams:
    world = World(rank, per_node * nodes, torch.device("cpu"), per_node)
    return Teams(world, world, world, *divided(world, teachers))


def test_a_team_may_take_longer_than_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[tuple[list[int], str | None, timedelta | None]] = []

    def new_group(_: World, ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None) -> None:
        groups.append((list(ranks), backend, timeout))

    monkeypatch.setattr(World, "new_group", new_group)
    found = split(World(2, 4, torch.device("cpu"), 4), 2)
    week = timedelta(days=7)
    assert groups == [([0, 1, 2, 3], "gloo", week), ([2, 3], None, None), ([2, 3], "gloo", week)]
    assert (found.everyone.size, found.own.size, found.waiting.size, found.waiting.rank) == (4, 2, 2, 0)


def test_a_first_forward_pass_without_memory_is_explained() -> None:
    def outputs(_: PackedBatch) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    teacher: Any = SimpleNamespace(outputs=outputs)
    config: Any = None
    with pytest.raises(RunError, match="out of memory in the teacher's forward pass"):
        teacher_ranks._introduce(config, teacher, teams(per_node=2, teachers=1, nodes=1, rank=1))


def test_who_serves_whom() -> None:
    one = teams(per_node=4, teachers=1, nodes=2, rank=7)
    assert (one.students, one.teachers) == ((0, 1, 2, 4, 5, 6), (3, 7))
    assert one.teaches and one.pupils == [4, 5, 6] and one.most_pupils == 3
    uneven = teams(per_node=5, teachers=2, nodes=1, rank=4)
    assert [uneven.teacher_of(student) for student in uneven.students] == [3, 3, 4]
    assert uneven.pupils == [2] and uneven.most_pupils == 2
    many = teams(per_node=3, teachers=2, nodes=2, rank=1)
    assert [teams(3, 2, 2, rank).pupils for rank in many.teachers] == [[0], [], [3], []]
    assert not teams(3, 2, 2, 0).teaches


@pytest.mark.parametrize("world", [ALONE, replace(ALONE, ranks_per_node=1), replace(ALONE, size=6, ranks_per_node=2)])
def test_ranks_that_cannot_be_divided_are_refused(world: World) -> None:
    with pytest.raises(AgreedError, match=r"^teacher\.ranks_per_node=2 needs more ranks than that on each node"):
        split(world, 2)


if __name__ == "__main__":
    world = distributed.start("cpu", start_timeout_s=600)
    what, arguments_of_runs = sys.argv[1], json.loads(sys.argv[2])
    for each in arguments_of_runs:
        config, run = parse(each)
        with pytest.MonkeyPatch.context() as patch:
            if what == "gradients":
                write_gradients(patch, run, world)
            elif not world.is_main:
                die_at(patch, 3)
            assert trainer.train(config, run, world) == 0
    distributed.finish()
