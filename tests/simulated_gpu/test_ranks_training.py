"""The trainer on pretended GPUs of two nodes: its numbers are those of one GPU, whatever the layout."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_rl.config.training.common import ModelConfig, OptimConfig, TrainingConfig
from hpc_rl.finetune.train import parse
from hpc_rl.finetune.trainer import train
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import causal_lm
from hpc_rl.training.models.lm_head import cross_entropy_sum
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.optim import build_optimizer
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload
from hpc_rl.training.parallel.sharding import begin_micro_batch, own_part
from tests.helpers import make_tiny_model, write_chats
from tests.marks import long
from tests.simulated_gpu.ranks import Rank, run_ranks
from tests.simulated_gpu.record import Call, Collective, note

Run = tuple[Path, Sequence[str]]
LAYOUTS = {
    "full": ["trainer.sharding=full"],
    "hybrid": ["trainer.sharding=hybrid", "trainer.offload=optimizer"],
    "gradients, two share rows": ["trainer.sharding=gradients", "trainer.sequence_parallel=2"],
    "none": ["trainer.sharding=none", "trainer.save_async=false"],
}
RESUMED = {4: ("full", "hybrid"), 1: ("gradients, two share rows", "none")}
"""Runs of which another number of ranks takes the second step again."""
COMPARED = ("train/loss", "train/grad_norm", "val/loss")
WEIGHTS, SUMS = "bfloat16", "float32"
"""Types in which weights are gathered, and gradients are added up."""


def trained(world: World, base: Sequence[str], runs: Sequence[Run]) -> list[int]:
    """Be a rank of several runs, one after the other; return their exit codes."""
    codes = []
    for path, overrides in runs:
        note("run", path.name)
        codes.append(train(*parse(["--run-dir", str(path), *base, *overrides]), world))
    return codes


def divide_unevenly(world: World, path: str, folder: Path) -> list[float]:
    """Be a rank whose parts of the weights differ in size, and whose weights and moments leave the device."""
    trainer = TrainingConfig(sharding="full")
    model = load_sharded(causal_lm(ModelConfig(path=path)), world, trainer)
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2))
    offload = ModelOffload("all", model, optimizer)
    losses = []
    for number in range(3):
        ids = np.arange(5, 30, dtype=np.int32) + number
        batch = pack_samples([ids], [np.arange(len(ids)) > 0]).to(world.device)
        begin_micro_batch(model, trainer, last=True)
        with offload.computing(changed=True):
            loss = model(batch, partial(cross_entropy_sum, targets_N=batch.targets_N, scale=1.0))
            loss.backward()
            offload.step()
        optimizer.zero_grad()
        assert all(own_part(one).untyped_storage().nbytes() == 0 for one in model.parameters())
        losses.append(loss.item())
    with offload.whole():
        model_state.write(
            folder / str(world.size), model_state.snapshot(model, optimizer, None, world, copy=True), world
        )
    return losses


def series(path: Path, name: str) -> list[float]:
    """One metric of all steps that have it."""
    return [record[name] for record in read_metrics(path / "metrics.jsonl") if name in record]


def assert_same(expected: Path, found: Path) -> None:
    """Compare losses and gradients. Products are in bfloat16: only their order differs between layouts."""
    for name in COMPARED:
        assert len(series(expected, name)) >= 1, name
        assert series(found, name) == pytest.approx(series(expected, name), rel=2e-4), name


@dataclass(frozen=True)
class Trained:
    """Runs of one rank and of eight ranks."""

    folder: Path
    base: list[str]
    ranks: list[Rank]

    def of_run(self, name: str, rank: int = 0) -> list[Collective | Call]:
        """Return what a rank did in a run."""
        rows: dict[str, list[Collective | Call]] = defaultdict(list)
        current = ""
        for row in self.ranks[rank].record:
            current = row.subject if isinstance(row, Call) and row.name == "run" else current
            rows[current].append(row)
        return rows[name]

    def streams(self, name: str, collective: str, dtype: str) -> set[tuple[str, int]]:
        """Return on which streams a run had these collectives, with the number of ranks of their groups."""
        return {
            (row.stream, len(row.ranks))
            for row in self.of_run(name)
            if isinstance(row, Collective) and (row.name, row.dtype) == (collective, dtype)
        }


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two steps with two micro-batches on each of eight ranks, or fewer if they share rows. Gradients are clipped."""
    folder = tmp_path_factory.mktemp("runs")
    base = [
        f"model.path={make_tiny_model(folder / 'model', num_attention_heads=4)}",
        f"data.train_files={write_chats(folder / 'train.jsonl', 32)}",
        f"data.val_files={write_chats(folder / 'val.jsonl', 9)}",
        *("data.train_batch_size=16", "data.max_length=64", "optim.lr=1e-2", "optim.clip_grad=1.0"),
        *("trainer.micro_tokens=64", "trainer.save_freq=1", "trainer.device=cuda", "trainer.export=false"),
        "trainer.n_gpus_per_node=4",
    ]
    run_ranks(trained, 1, base, [(folder / "one", [])], device="cuda")
    runs = [(folder / name, overrides) for name, overrides in LAYOUTS.items()]
    ranks = run_ranks(trained, 8, base, runs, nodes=2, device="cuda")
    assert [rank.value for rank in ranks] == [[0] * len(LAYOUTS)] * 8
    return Trained(folder, base, ranks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_ranks_equal_one(trained_runs: Trained, name: str) -> None:
    assert_same(trained_runs.folder / "one", trained_runs.folder / name)


def test_gathers_and_reductions_are_on_streams_of_their_own(trained_runs: Trained) -> None:
    """Exchanges of small numbers, which the host waits for, are on the default stream."""
    expected = {"full": {8}, "hybrid": {4}, "gradients, two share rows": {8}}
    for name, sizes in expected.items():
        gathers = trained_runs.streams(name, "all_gather_single", WEIGHTS)
        reductions = trained_runs.streams(name, "reduce_scatter_single", SUMS)
        assert {size for _, size in gathers} == {size for _, size in reductions} == sizes, name
        streams = {stream for stream, _ in gathers | reductions}
        assert len(streams) == 2 and "default" not in streams, name
        assert {stream for stream, _ in trained_runs.streams(name, "allgather", "float64")} == {"default"}, name
    # Each rank adds up gradients with the rank of the other node that has the same shard, beside the other two streams.
    beside = {one for one in trained_runs.streams("hybrid", "allreduce", SUMS) if one[0] != "default"}
    [(stream, size)] = beside
    assert size == 2
    assert stream not in {one for one, _ in trained_runs.streams("hybrid", "all_gather_single", WEIGHTS)}


@pytest.mark.long
def test_eight_ranks_of_which_four_share_rows_equal_one(trained_runs: Trained, tmp_path: Path) -> None:
    runs = [(tmp_path / "four", ["trainer.sharding=full", "trainer.sequence_parallel=4"])]
    ranks = run_ranks(trained, 8, trained_runs.base, runs, nodes=2, device="cuda")
    assert [rank.value for rank in ranks] == [[0]] * 8
    assert_same(trained_runs.folder / "one", tmp_path / "four")


@pytest.mark.parametrize("count", [long(4), 1])
def test_other_ranks_resume_from_a_checkpoint(trained_runs: Trained, count: int, tmp_path: Path) -> None:
    """From the first of two checkpoints, which was written while the second step computed."""
    runs = []
    for name in RESUMED[count]:
        shutil.copytree(trained_runs.folder / name, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000002")
        runs.append((tmp_path / name, LAYOUTS[name] if count > 1 else []))
    ranks = run_ranks(trained, count, trained_runs.base, runs, nodes=min(count, 2), device="cuda")
    assert [rank.value for rank in ranks] == [[0] * len(runs)] * count
    for name in RESUMED[count]:
        assert_same(trained_runs.folder / "one", tmp_path / name)


def test_checkpoints_are_written_in_a_group_of_their_own(trained_runs: Trained) -> None:
    """The main threads have collectives at the same time, so that both need an order of their own."""
    for rank in trained_runs.ranks:
        of_writers = {row.group for row in rank.collectives if row.thread.startswith("background-writer")}
        others = {row.group for row in rank.collectives if not row.thread.startswith("background-writer")}
        assert of_writers and not of_writers & others


def test_moments_in_host_memory_move_on_a_side_stream(trained_runs: Trained) -> None:
    calls = [row for row in trained_runs.of_run("hybrid") if isinstance(row, Call)]
    copied = {row.subject for row in calls if row.name == "record_stream"}
    assert copied and "default" not in copied
    assert {"wait_stream", "record", "synchronize"} <= {row.name for row in calls}


def test_ranks_that_do_not_divide_the_weights(trained_runs: Trained, tmp_path: Path) -> None:
    """Weights and moments are in host memory between the steps, and parts of a weight are padded or empty."""
    model = str(trained_runs.folder / "model")
    [[expected], found] = (
        [rank.value for rank in run_ranks(divide_unevenly, count, model, tmp_path, device="cuda")] for count in (1, 3)
    )
    assert found == [pytest.approx(expected, rel=2e-4)] * 3
    one, three = (model_state.read_weights(tmp_path / str(count)) for count in (1, 3))
    for name, weight in one.items():
        torch.testing.assert_close(three[name], weight, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.long
def test_a_teacher_on_ranks_of_its_own(trained_runs: Trained, tmp_path: Path) -> None:
    """Two nodes of two ranks, of which one trains. Questions and answers of both are messages between GPUs."""
    teacher = make_tiny_model(tmp_path / "teacher", hidden=48)
    data = [word for word in trained_runs.base if word.startswith(("data.", "model.")) and "val_files" not in word]
    base = [*("--kind", "distill", f"teacher.path={teacher}", "trainer.device=cuda", "trainer.export=false"), *data]
    base += ["data.val_files=" + str(trained_runs.folder / "val.jsonl"), "trainer.micro_tokens=64"]
    run_ranks(trained, 1, base, [(tmp_path / "alone", [])], device="cuda")
    more = ["teacher.ranks_per_node=1", "trainer.n_gpus_per_node=2", "trainer.sharding=hybrid"]
    ranks = run_ranks(trained, 4, base, [(tmp_path / "divided", more)], nodes=2, device="cuda")
    assert [rank.value for rank in ranks] == [[0]] * 4
    assert_same(tmp_path / "alone", tmp_path / "divided")
    # Rank 0 trains and asks rank 1; it sends the header of a question in host memory, and the rest between GPUs.
    assert {row.detail for row in ranks[0].collectives if row.name in ("send", "recv")} == {"1"}
    assert {row.detail for row in ranks[2].collectives if row.name in ("send", "recv")} == {"3"}


def leave_out(world: World, path: str) -> list[float]:
    """Be a rank; rank 1 does not use the MLP of the first layer, like an expert that no token chooses."""
    trainer = TrainingConfig(sharding="full")
    model = load_sharded(causal_lm(ModelConfig(path=path)), world, trainer)
    mlp = model.hf.get_submodule("model.layers.0.mlp")
    if world.rank == 1:
        mlp.forward = torch.nn.Identity()  # type: ignore[method-assign]
    ids = np.arange(5, 30, dtype=np.int32)
    batch = pack_samples([ids], [np.arange(len(ids)) > 0]).to(world.device)
    begin_micro_batch(model, trainer, last=True)
    model(batch, partial(cross_entropy_sum, targets_N=batch.targets_N, scale=1.0)).backward()
    return [one.grad.full_tensor().norm().item() for one in mlp.parameters()]


def test_a_rank_that_does_not_use_a_weight(trained_runs: Trained) -> None:
    found = run_ranks(leave_out, 2, str(trained_runs.folder / "model"), device="cuda")
    assert found[0].value == found[1].value and min(found[0].value) > 0
