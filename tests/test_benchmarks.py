"""The benchmarks for GPUs, as far as they run without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import ppo_gpu, sft_gpu
from benchmarks.ppo_gpu import OURS, TRL, Work
from hpc_rl.training.parallel.distributed import World

ROOT = Path(__file__).parent.parent
WORK = Work(512, 512, 8, "cuda", "vllm", 5)


@pytest.mark.long
def test_a_small_run_prints_the_seconds_of_each_phase() -> None:
    command = "benchmarks.ppo_gpu --tiny --device cpu --engine hf --steps 1 --algorithm grpo"
    ended = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    for phase in ("gen", "update_actor", "update_weights"):
        assert f"| {phase} | " in ended.stdout
    assert f"| {OURS} | " in ended.stdout and TRL not in ended.stdout


@pytest.mark.parametrize("benchmark", [ppo_gpu, sft_gpu])
def test_a_machine_without_gpus_is_refused(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=f"{benchmark.__name__}: torch does not find a CUDA device"):
        benchmark.main()


def test_the_measured_runs_are_those_that_the_benchmark_describes(tmp_path: Path) -> None:
    grpo, ppo = (ppo_gpu.configuration(tmp_path, algorithm, WORK) for algorithm in ("grpo", "ppo"))
    assert grpo.roles == ["actor", "rollout"]
    assert ppo.roles == ["actor", "critic", "ref", "rollout"]
    assert (grpo.data.train_batch_size, grpo.rollout.n) == (64, 8)
    assert (ppo.data.train_batch_size, ppo.rollout.n) == (512, 1)
    assert grpo.rollout.name == "vllm" and grpo.trainer.computes_on == "cuda"
    assert ppo_gpu.candidates("grpo", WORK) == [OURS, TRL] and ppo_gpu.candidates("ppo", WORK) == [OURS]


def test_the_tables_compare_whole_steps() -> None:
    metrics = {"perf/time_per_step": 2.0, "perf/max_memory_gb": 9.0, "timing_s/gen": 1.5, "timing_s/step": 2.0}
    found = {OURS: metrics, TRL: {"perf/time_per_step": 5.0, "perf/max_memory_gb": 12.0}}
    text = ppo_gpu.tables("grpo", found, WORK)
    assert "| hpc-rl | 2 | 131,072 |  | 9.0 |" in text
    assert "| TRL | 5 | 52,429 | 2.50 | 12.0 |" in text
    assert "| gen | 1.5 |" in text and "| step |" not in text


def test_each_step_of_a_run_that_failed_is_recorded(tmp_path: Path) -> None:
    steps, failure = ppo_gpu.run(OURS, "/bin/false", tmp_path, "ppo", WORK)
    assert steps == [] and failure is not None and failure.startswith("hpc-rl failed: exit code 1\n")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir(exist_ok=True)
    lines = [
        {"step": 1, "total_steps": 9, "time": 1.0, "timing_s/gen": 3.0, "timing_s/first": 1.0, "actor/loss": 1.0},
        {"step": 2, "total_steps": 9, "time": 2.0, "timing_s/gen": 2.0, "perf/max_memory_gb": 5.0},
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ppo_gpu.recorded(tmp_path) == [{"timing_s/gen": 3.0}, {"timing_s/gen": 2.0}]
    assert ppo_gpu.tables("ppo", {}, WORK) == "PPO: no step counts"


def test_fine_tuning_is_measured_with_both_kinds_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MICRO_BATCHES": 1, "WARM_UP": 0}.items():
        monkeypatch.setattr(sft_gpu, name, value)
    world = World(0, 1, torch.device("cpu"))
    results = {
        f"tiny, {lengths}": sft_gpu.measure("tiny", lengths, world, 1, enable_gradient_checkpointing=True)
        for lengths in sft_gpu.LENGTHS
    }
    for found in results.values():
        assert found["perf/throughput"] > 0
    made = sft_gpu.rows(results)
    assert [row[0] for row in made] == ["tiny, GSM8K", "tiny, full"] and made[0][2] == "device unknown"


def test_goals_and_anchors_are_next_to_the_results() -> None:
    found = {"perf/throughput": 50_000.0, "perf/mfu": 0.4, "perf/max_memory_gb": 20.0}
    (row,) = sft_gpu.rows({"0.6B, full": found})
    assert row[1:5] == ["50,000", "40.0%", "35%", "20.0"] and "26,005 tokens/s, 24.2 % MFU" in row[5]
