"""What counts as a failure of a training check, and what the processes of a session write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import RunError
from hpc_rl.formats.acceptance import append, read
from hpc_rl.probes.acceptance import attention, generation, on_ranks, training
from hpc_rl.probes.acceptance.bench import Bench, Failed, Layout, Skip
from hpc_rl.probes.acceptance.generation import after_update, before_update, released
from hpc_rl.probes.acceptance.models import SMALL, write_long_chats
from hpc_rl.probes.acceptance.on_ray import run as run_on_ray
from hpc_rl.probes.acceptance.session import CheckSession, attempt, words_of
from hpc_rl.probes.acceptance.table import rows
from hpc_rl.probes.acceptance.training import FirstSteps, difference, speed_text
from hpc_rl.training.parallel.distributed import World

CPU = Layout("cpu", 1, 1, frozenset({"ray", "tensordict"}))
ALONE = World(0, 1, torch.device("cpu"))


def failing() -> str:
    raise Failed("3 is not 4")


def skipping() -> str:
    raise Skip("no")


def test_outcomes() -> None:
    assert attempt(lambda: "fine") == ("passed", "fine")
    assert attempt(failing) == ("failed", "3 is not 4")
    assert attempt(skipping) == ("skipped", "no")
    assert on_ranks.agreed(("failed", "x"), ALONE) == ("failed", "x")
    assert words_of(ValueError("one\ntwo")) == "ValueError: one"
    assert words_of(KeyError()) == "KeyError"


def test_differences_of_losses_norms_and_gradients() -> None:
    one = FirstSteps([2.0, 4.0], [1.0, 1.0], {"w": torch.tensor([3.0, 4.0])})
    other = FirstSteps([2.0, 4.4], [1.0, 1.0], {"w": torch.tensor([3.0, 4.5])})
    losses, gradients = difference(other, one)
    assert losses == pytest.approx(0.1) and gradients == pytest.approx(0.1)
    louder = FirstSteps([2.0, 4.0], [1.0, 1.5], one.gradients)
    assert difference(louder, one) == (0.0, pytest.approx(0.5))


@pytest.mark.parametrize(
    ("judge", "found", "fails"),
    [
        (before_update, {"before": 1e-5, "dtype": "float32"}, False),
        (before_update, {"before": 1e-2, "dtype": "float32"}, True),
        (before_update, {"before": 1e-2, "dtype": "bfloat16"}, False),
        (before_update, {"before": float("nan"), "dtype": "bfloat16"}, True),
        (after_update, {"after": 1e-4, "moved": 0.5, "dtype": "float32"}, False),
        (after_update, {"after": 0.04, "moved": 0.5, "dtype": "float32"}, False),
        (after_update, {"after": 0.5, "moved": 0.5, "dtype": "bfloat16"}, True),
        (after_update, {"after": 1e-4, "moved": 1e-3, "dtype": "float32"}, True),
        (released, {"memory": {"start": 1e9, "awake": 41e9, "asleep": 3e9, "again": 41e9}}, False),
        (released, {"memory": {"start": 1e9, "awake": 41e9, "asleep": 39e9, "again": 41e9}}, True),
    ],
)
def test_judgements(judge: Callable[[Any], str], found: dict[str, Any], fails: bool) -> None:
    state, words = attempt(lambda: judge(found))
    assert state == ("failed" if fails else "passed")
    assert "nats" in words or "GB" in words


def test_the_speed_in_words() -> None:
    metrics = {"perf/tokens_per_s": 26000.4, "perf/throughput": 13000.2, "perf/max_memory_gb": 31.7}
    assert "MFU unknown" in speed_text(metrics, "perf/mfu", 2)
    assert "26,000 tokens/s on 2 processes (13,000 each), 40.0 % MFU" in speed_text(
        {**metrics, "perf/mfu": 0.4}, "perf/mfu", 2
    )


def bench_in(folder: Path) -> Bench:
    folder.mkdir()
    return Bench(CPU, folder, folder)


def test_wrong_attention_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_in(tmp_path / "bench")
    assert "float32, forward and backward" in attention.kernels(bench, ALONE, "")
    product = attention._product
    for change in (lambda q, w, s: product(q, None, s), lambda q, w, s: product(q, w, None)):
        monkeypatch.setattr(attention, "_product", change)
        with pytest.raises(Failed, match="relative error"):
            attention.kernels(bench, ALONE, "")


def test_a_run_is_compared_with_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_in(tmp_path / "bench")
    bench.memory["reference"] = FirstSteps([2.0], [1.0], {"w": torch.ones(3)})
    monkeypatch.setattr(training, "measure", lambda *_: FirstSteps([2.0], [1.0], {"w": torch.ones(3)}))
    assert training.sharding(bench, ALONE, "full").startswith("differs from float32 on one CPU by 0.0e+00")
    for worse in ([2.1], [1.0], torch.ones(3)), ([2.0], [1.0], torch.tensor([1.0, 1.0, float("nan")])):
        monkeypatch.setattr(training, "measure", lambda *_, w=worse: FirstSteps(w[0], w[1], {"w": w[2]}))
        with pytest.raises(Failed, match="at most 1e-04 and 1e-03 are expected"):
            training.packing(bench, ALONE, "")


def test_a_failed_run_is_not_repeated_for_its_other_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_in(tmp_path / "bench")
    calls = []

    def drive(*_: object) -> dict[str, Any]:
        calls.append(1)
        raise RunError("an engine died")

    monkeypatch.setattr(generation, "_drive", drive)
    with pytest.raises(RunError, match="an engine died"):
        generation.log_probabilities(bench, "vllm")
    with pytest.raises(Skip, match="failed in an earlier check"):
        generation.weight_transfer(bench, "vllm, same devices, host")
    assert len(calls) == 1


def test_compiled_engines_start_twice_and_both_starts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Layout("cuda", 1, 4, CPU.packages), tmp_path, tmp_path)
    good = {"before": 1e-3, "after": 1e-3, "moved": 0.5, "dtype": "bfloat16", "start_s": 40.0}
    outcomes, started = [good, {**good, "start_s": 8.0}], []

    def drive(_bench: Bench, config: PpoConfig, name: str, _runner: object) -> dict[str, Any]:
        started.append((name, config.rollout.tensor_parallel_size, config.rollout.engine_kwargs["enforce_eager"]))
        return outcomes[len(started) - 1]

    monkeypatch.setattr(generation, "_drive", drive)
    found = generation.compiled(bench, "tensor parallel 2")
    assert found.startswith("first start in 40 s: mean") and "; second start in 8 s: mean" in found
    assert started == [(f"compiled-tensor-parallel-2-{start}", 2, False) for start in ("first", "second")]
    started.clear()
    outcomes[1] = {**good, "before": 3.0}
    with pytest.raises(Failed, match=r"^second start: mean difference 3"):
        generation.compiled(bench, "tensor parallel 2")


def test_the_drivers_checks_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.jsonl"
    session = CheckSession(CPU, results, tmp_path)
    session.plan()
    before = read(results)
    session.plan()
    assert read(results) == before and len(before) == len(rows(CPU))

    def broken(*_: object) -> dict[str, Any]:
        raise ValueError("boom")

    monkeypatch.setattr(generation, "_drive", broken)
    run_on_ray(session, bench_in(tmp_path / "bench"))
    lines = {line.name: line for line in read(results)}
    assert lines["log-probabilities (hf)"].found == lines["speed of PPO"].found == "ValueError: boom"
    blocked = lines["weight transfer (hf, same devices, in the trainer's process)"]
    assert (blocked.state, blocked.found) == ("skipped", "needs the check 'log-probabilities (hf)', which failed")
    assert not session.left("ray") and session.left("torchrun")
    append(results, [row.line().ended("failed", "x") for row in session.left("torchrun")])
    assert not session.left("torchrun")


def test_configurations_ignore_the_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sft.yaml").write_text("optim: {lr: 7}\n")
    monkeypatch.chdir(tmp_path)
    bench = bench_in(tmp_path / "bench")
    assert bench.sft().optim.lr == 1e-3 and bench.ppo().rollout.calculate_log_probs
    assert bench.sft({"trainer.sharding": "none"}).trainer.sharding == "none"
    assert bench.large() == SMALL and Bench(Layout("cuda", 1, 1, frozenset()), tmp_path, tmp_path).large() != SMALL


def test_long_samples(tmp_path: Path) -> None:
    write_long_chats(tmp_path / "long.jsonl", 64)
    lines = (tmp_path / "long.jsonl").read_text().splitlines()
    assert len(lines) == 64 and min(map(len, lines)) > 2500
