"""AdamW with moments in 8 bits. torchao's Python code works with CPUs, which these tests run."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.config.training.common import OptimConfig
from hpc_rl.errors import EXIT_STOPPED, AgreedError, UserError
from hpc_rl.plan.memory import placed_models
from hpc_rl.plan.shape import shape_of
from hpc_rl.run_dir import RunDir
from hpc_rl.training import eight_bit
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.eight_bit import CODES, FIRST, SCALE, SECOND, EightBitAdamW, new_moments
from hpc_rl.training.optim import build_optimizer, set_lr
from hpc_rl.training.parallel import offload
from hpc_rl.training.parallel.offload import ModelOffload, moments_of
from tests.finetune.jobs import ask_at, run_here, run_job, series, spawn
from tests.helpers import make_tiny_model, write_chats
from tests.plan.configs import config as planned
from tests.simulated_gpu.shapes import sizes
from tests.training import eight_bit_ranks
from tests.training.eight_bit_ranks import ALONE, begin, save, step, tensors

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: make test-torchao"
)
EIGHT = "optim.moments=8bit"


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    with pytest.raises(UserError, match=r"optim.moments=8bit needs torchao, .* pip install '.\[torchao\]' .*float32$"):
        build_optimizer(nn.Linear(64, 64), OptimConfig(moments="8bit"))


@pytest.mark.parametrize(("rank", "dtype"), [(None, "float32"), (None, "bfloat16"), (16, "bfloat16"), (8, "float32")])
def test_the_plan_counts_the_bytes_of_the_state(rank: int | None, dtype: str) -> None:
    """Of a model of 0.5B parameters: codes and scales, and what has no 8 bits."""
    kind: dict[str, Any] = sizes("0.5B")
    options = [f"model.dtype={dtype}", EIGHT, *([f"model.lora.rank={rank}"] if rank else [])]
    shapes = {"/7b": shape_of(kind, "/7b")}
    held = placed_models(planned("sft", *options), shapes, 80e9)[0].held
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kind), dtype=getattr(torch, dtype))
        parameters = list(model.parameters())
        if rank:
            linear = [layer for layer in model.model.layers.modules() if isinstance(layer, nn.Linear)]
            both = (((rank, layer.in_features), (layer.out_features, rank)) for layer in linear)
            parameters = [nn.Parameter(torch.empty(matrix)) for matrices in both for matrix in matrices]
    states = [new_moments(one) or {"both": torch.empty(2, *one.shape, dtype=one.dtype)} for one in parameters]
    found = sum(tensor.nbytes for state in states for tensor in state.values())
    assert held.moments * held.shards == pytest.approx(found, rel=0.003)
    assert found < 0.7 * 2 * sum(one.nbytes for one in parameters)


Layers = nn.Sequential


def layers() -> Layers:
    """Weights with blocks of 256 and of 64 values, and two biases and a small weight, without 8 bits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 96), nn.Linear(96, 2, bias=False))


def stepped(
    steps: int, moments: Any, change: Callable[[torch.Tensor, int], torch.Tensor] = lambda one, _: one
) -> tuple[Layers, torch.optim.Optimizer]:
    """Return a module and its optimizer after steps with random gradients.

    Args:
        change: gets each gradient and the number of the step, from 0 on, and returns the gradient to use.
    """
    model = layers()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1, moments=moments))
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        for parameter in model.parameters():
            parameter.grad = change(torch.randn(parameter.shape, generator=generator), number)
        set_lr(optimizer, 1e-3 / (1 + number))
        optimizer.step()
    return model, optimizer


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [one.detach() for one in model.parameters()]


def stored(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str) -> torch.Tensor:
    """Return a moment in float32, by its codes and scales."""
    state = optimizer.state[parameter]
    codes, scale = state[name + CODES], state[name + SCALE]
    zeros = eight_bit.torchao("subclass_8bit").OptimState8bit.zeros((1,), name == FIRST, 1)
    values = zeros.qmap[codes.int()].view(*scale.shape, -1) * scale[..., None]
    return values.view(codes.shape)


@needs_torchao
def test_state() -> None:
    model, optimizer = stepped(1, "8bit")
    assert isinstance(optimizer, EightBitAdamW)
    shapes = [
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in optimizer.state[one].items() if name != "step"}
        for one in model.parameters()
    ]
    wide = {FIRST + CODES: ((64, 512), torch.uint8), FIRST + SCALE: ((64, 2), torch.float32)}
    assert shapes[0] == {**wide, SECOND + CODES: wide[FIRST + CODES], SECOND + SCALE: wide[FIRST + SCALE]}
    assert shapes[2][SECOND + SCALE] == ((96, 1), torch.float32)
    small = [(64,), (96,), (2, 96)]
    assert [shapes[n] for n in (1, 3, 4)] == [{FIRST: (s, torch.float32), SECOND: (s, torch.float32)} for s in small]
    total = sum(one.nbytes for one in moments_of(optimizer, model.parameters()))
    assert total == 2 * (64 * 512 * (1 + 4 / 256) + 96 * 64 * (1 + 4 / 64) + 4 * (64 + 96 + 192))
    assert all(optimizer.state[one]["step"] == 1 for one in model.parameters())


@needs_torchao
def test_the_first_step_is_exact_and_its_moments_are_rounded() -> None:
    """The step has moments in float32, and rounds them at its end. Numbers up to 1 are at most 0.0141 (first moment) or
    0.0071 (second) apart, so that half of this is the largest error."""
    ours, theirs = stepped(1, "8bit"), stepped(1, "float32")
    for one, other in zip(weights(ours[0]), weights(theirs[0]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)
    for number, block in ((0, 256), (2, 64)):
        one, other = list(ours[0].parameters())[number], list(theirs[0].parameters())[number]
        for name, error in ((FIRST, 0.0071), (SECOND, 0.0036)):
            exact = theirs[1].state[other][name].view(-1, block)
            found = stored(ours[1], one, name).view(-1, block)
            largest = exact.abs().amax(dim=1, keepdim=True)
            assert torch.all((found - exact).abs() <= error * largest)
            assert torch.any((found - exact).abs() > 0.001 * largest)


@needs_torchao
def test_later_steps_are_close_and_others_are_equal() -> None:
    """Weights without 8 bits change as with AdamW, bit for bit."""
    ours, theirs = stepped(10, "8bit"), stepped(10, "float32")
    pairs = list(zip(weights(ours[0]), weights(theirs[0]), weights(layers()), strict=True))
    for number, (one, other, start) in enumerate(pairs):
        if number in (0, 2):
            difference = float((one - other).norm() / (other - start).norm())
            assert 1e-4 < difference < 0.02
        else:
            assert torch.equal(one, other)


@needs_torchao
@pytest.mark.parametrize("size", [1, 300, 1 << 20])
def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    expected = weights(stepped(2, "8bit")[0])
    monkeypatch.setattr(eight_bit, "PIECE", size)
    for one, other in zip(weights(stepped(2, "8bit")[0]), expected, strict=True):
        assert torch.equal(one, other)


@needs_torchao
def test_a_second_moment_is_not_rounded_to_zero() -> None:
    """Gradients of a row from 1e-6 to 1, and then none, as in the embedding of a token that is not in the data."""

    def wide(gradient: torch.Tensor, number: int) -> torch.Tensor:
        return gradient * torch.logspace(-6, 0, gradient.shape[-1]) * (number < 3)

    model, optimizer = stepped(10, "8bit", wide)
    codes = [value for state in optimizer.state.values() for name, value in state.items() if name == SECOND + CODES]
    assert len(codes) == 2 and min(int(one.min()) for one in codes) == 1
    moved = [(one - start).abs().max() for one, start in zip(weights(model), weights(layers()), strict=True)]
    assert max(moved) < 10 * 1e-3


@needs_torchao
def test_a_weight_without_gradient_stays() -> None:
    model = layers()
    optimizer = build_optimizer(model, OptimConfig(moments="8bit"))
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()
    changed = [not torch.equal(one, start) for one, start in zip(weights(model), weights(layers()), strict=True)]
    assert changed == [False, False, True, False, False]
    assert optimizer.state[model[0].weight]["step"] == 0


@needs_torchao
@pytest.mark.parametrize("level", ["optimizer", "all"])
def test_steps_are_the_same_with_moments_in_host_memory(monkeypatch: pytest.MonkeyPatch, level: Any) -> None:
    """In parts of at most 40,000 bytes, of which the first weight's moments take more."""
    parts = offload.parts_of
    monkeypatch.setattr(offload, "parts_of", lambda optimizer: parts(optimizer, 40_000))

    def run(moved: Any) -> tuple[list[torch.Tensor], list[int]]:
        model = layers()
        optimizer = build_optimizer(model, OptimConfig(lr=1e-3, moments="8bit"))
        away = ModelOffload(moved, model, optimizer)  # type: ignore[arg-type]  # any module will do
        for seed in range(3):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            away.step()
        return weights(model), [one.untyped_storage().nbytes() for one in moments_of(optimizer, model.parameters())]

    (expected, on_device), (found, away) = run("none"), run(level)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert min(on_device) > 0 and not any(away)


@needs_torchao
def test_weights_in_bfloat16() -> None:
    model = layers().bfloat16()
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2, moments="8bit"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for one, start in zip(weights(model), weights(layers().bfloat16()), strict=True):
        torch.testing.assert_close(one, start - 1e-2, atol=1e-3, rtol=1e-2)


@needs_torchao
def test_rates_and_sizes_do_not_compile_the_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with torch's compiler up to the point where it would generate code."""
    from torch._dynamo.utils import counters

    change = torch.compile(eight_bit._change(torch.device("cpu")), fullgraph=True, backend="aot_eager")
    expected = weights(stepped(4, "8bit")[0])
    monkeypatch.setattr(eight_bit, "_change", lambda _: change)
    counters.clear()
    torch._dynamo.reset()
    for one, other in zip(weights(stepped(4, "8bit")[0]), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2
    many = nn.ModuleList([nn.Linear(columns, rows) for columns in (256, 512, 64) for rows in (64, 65, 200)])
    optimizer = build_optimizer(many, OptimConfig(moments="8bit"))
    for rate in range(1, 4):
        for parameter in many.parameters():
            parameter.grad = torch.ones_like(parameter)
        set_lr(optimizer, 1e-3 * rate)
        optimizer.step()
    assert counters["stats"]["unique_graphs"] <= 4


@needs_torchao
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_the_compiled_step_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    change = torch.compile(eight_bit._change(torch.device("cpu")), fullgraph=True)
    expected = stepped(3, "8bit")
    monkeypatch.setattr(eight_bit, "_change", lambda _: change)
    found = stepped(3, "8bit")
    for one, other in zip(weights(found[0]), weights(expected[0]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    for one, other in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        for name, tensor in found[1].state[one].items():
            if name.endswith(CODES):
                assert (tensor.int() - expected[1].state[other][name].int()).abs().max() <= 1


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of 50 steps. Of the tiny model's 11,000 parameters of the MLP and 10,240 of the embedding, most have
    moments in 8 bits."""
    folder = tmp_path_factory.mktemp("sft")
    return [
        f"model.path={make_tiny_model(folder / 'model', tie=True)}",
        f"data.train_files={write_chats(folder / 'train.jsonl', 31)}",
        *("data.train_batch_size=8", "optim.lr=1e-2", "optim.clip_grad=2.0", "trainer.device=cpu"),
        *("trainer.micro_tokens=1024", "trainer.total_training_steps=50", "trainer.export=false"),
    ]


@needs_torchao
def test_losses_are_close_to_those_in_float32(sft: list[str], tmp_path: Path) -> None:
    """Without a memory of earlier gradients, they would differ much more."""
    assert run_here(sft, tmp_path / "float32") == 0
    assert run_here(sft, tmp_path / "8bit", EIGHT) == 0
    known = EightBitAdamW.step

    def forgetful(self: EightBitAdamW, closure: None = None) -> None:
        known(self)
        for state in self.state.values():
            for name, tensor in state.items():
                if name.endswith(SCALE):
                    tensor.zero_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EightBitAdamW, "step", forgetful)
        assert run_here(sft, tmp_path / "broken", EIGHT) == 0
    exact, found, broken = (series(tmp_path / name, "train/loss") for name in ("float32", "8bit", "broken"))
    assert len(exact) == 50 and exact[-1] < exact[0] - 1

    def difference(losses: list[float]) -> float:
        return math.fsum(abs(one - other) for one, other in zip(losses, exact, strict=True)) / 50

    print(f"mean difference of the loss: 8 bits {difference(found):.4f}, broken {difference(broken):.4f}")
    assert 0 < difference(found) < 0.03 < 0.1 < difference(broken)


@needs_torchao
def test_a_run_resumes_exactly_and_not_with_other_moments(sft: list[str], tmp_path: Path) -> None:
    steps = ("trainer.total_training_steps=5", EIGHT)
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_here(sft, whole, *steps, "trainer.offload=optimizer") == 0
    run.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        ask_at(patch, RunDir(run), micro_batch=2)
        assert run_here(sft, run, *steps) == EXIT_STOPPED
    (run / "stop").unlink()
    message = "was written with optim.moments=8bit, and the run has float32; set the option back, or choose another"
    with pytest.raises(UserError, match=message):
        run_here(sft, run, steps[0])
    assert run_here(sft, run, *steps) == 0
    assert series(run, "train/loss") == series(whole, "train/loss")
    assert run_here(sft, tmp_path / "other", "trainer.total_training_steps=1") == 0
    with pytest.raises(AgreedError, match=r"other/checkpoints/.*optim.moments=float32, and the run has 8bit; "):
        run_here(sft, tmp_path / "other", *steps)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A model on one rank: its checkpoint after two steps, and the tensors after a third one. Adapters of rank 2 have
    weights with 2 rows, so that one of three ranks has none of them."""
    folder = tmp_path_factory.mktemp("alone")
    found: list[dict[str, Any]] = []
    for name, rank in (("whole", None), ("adapters", 2)):
        model = make_tiny_model(folder / f"model-{name}", intermediate_size=128 if rank is None else 2048)
        case = {"model": str(model), "rank": rank, "read": str(folder / name)}
        training = begin(case, ALONE)
        for number in (1, 2):
            step(training, number)
        save(training, folder / name, ALONE)
        step(training, 3)
        eight = [key for key in tensors(training) if key.endswith(CODES)]
        assert len(eight) == (16 if rank is None else 4)
        torch.save(tensors(training), folder / f"{name}.pt")
        found.append(case)
    return found


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sharding", "per_node"), [(2, "full", 2), (3, "full", 3), (4, "hybrid", 2)])
def test_the_number_of_ranks_does_not_matter(
    cases: list[dict[str, Any]], tmp_path: Path, ranks: int, sharding: str, per_node: int
) -> None:
    """With the same gradients, codes, scales and their weights are equal bit for bit, also after a checkpoint of
    another number of ranks. In the others, torch's step may round the last bit in another way at the end of a rank's
    part."""
    jobs = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        jobs.append({**case, "sharding": sharding, "folder": str(folder)})
    results = spawn(["-m", eight_bit_ranks.__name__, json.dumps(jobs)], ranks, timeout=300, ranks_per_node=per_node)
    assert [code for code, _, _ in results] == [0] * ranks, results
    for job in jobs:
        expected = torch.load(f"{job['read']}.pt")
        alone = begin(job, ALONE)
        model_state.read(Path(job["folder"]) / "checkpoint", *alone, ALONE)
        step(alone, 3)
        found = {name: torch.load(Path(job["folder"]) / f"{name}.pt") for name in ("own", "resumed")}
        for tensors_of in (*found.values(), tensors(alone)):
            assert tensors_of.keys() == expected.keys()
            for name, tensor in tensors_of.items():
                if f"{name}.{FIRST}{CODES}" in expected or name.endswith((CODES, SCALE, "step")):
                    assert torch.equal(tensor, expected[name]), name
                else:
                    torch.testing.assert_close(tensor, expected[name], atol=1e-8, rtol=1e-6)


@needs_torchao
@pytest.mark.slow
def test_two_ranks_train_as_one(sft: list[str], tmp_path: Path) -> None:
    """Sums of gradients are in another order, which rounding to 8 bits makes larger."""
    options = (EIGHT, "trainer.total_training_steps=8")
    assert run_here(sft, tmp_path / "one", *options) == 0
    results = run_job(sft, tmp_path / "two", *options, "trainer.offload=optimizer", ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    assert series(tmp_path / "two", "train/loss") == pytest.approx(series(tmp_path / "one", "train/loss"), abs=1e-3)
