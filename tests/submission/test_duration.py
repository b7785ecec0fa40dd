"""The time of a job: from an earlier run, from published figures, or unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.plan.duration import Duration
from hpc_rl.runs.earlier import RunSpeed
from hpc_rl.submission.duration import count_lines, duration_of, gpu_kind
from tests.plan.configs import SHAPES, config

MEASURED = RunSpeed("sft-1", throughput=2000.0, tokens=500.0, peak_gb=30.0, planned_gb=31.0)


def test_as_fast_as_an_earlier_run() -> None:
    found = duration_of(config("sft", "trainer.nnodes=2"), SHAPES, 80e9, MEASURED, rows=2048)
    assert found == Duration((16.0, 16.0), 2, 2, "as fast as run sft-1: 2,000 tokens/s/GPU, samples of 500 tokens")


def test_a_range() -> None:
    found = duration_of(config("sft", "slurm.gpu_type=h100"), SHAPES, 80e9, None)
    assert isinstance(found, Duration)
    assert found.basis == "at 12 to 55 % of 989 TFLOPS, all at their full length of 1,024 tokens"
    assert found.step[1] == pytest.approx(found.step[0] * 0.55 / 0.12)
    generates = duration_of(config("generate", "slurm.gpu_type=a100"), SHAPES, 80e9, None)
    assert isinstance(generates, Duration)
    assert "of 312 TFLOPS and 20 to 75 % of 1.555 TB/s, all at" in generates.basis


@pytest.mark.parametrize(
    ("kind", "words", "reason"),
    [
        ("sft", (), "unknown, because slurm.gpu_type is not set: use a name such as h100 or a100"),
        ("sft", ("slurm.gpu_type=a100_3g.20gb",), "unknown, because slurm.gpu_type=a100_3g.20gb names no known model"),
        ("ppo", ("slurm.gpu_type=h100", "rollout.name=hf"), "unknown, because no speed is known for rollout.name=hf"),
    ],
)
def test_an_unknown_speed(kind: str, words: tuple[str, ...], reason: str) -> None:
    found = duration_of(config(kind, *words), SHAPES, 80e9, None)
    assert isinstance(found, str) and found.startswith(reason)


def test_the_kind_of_gpus() -> None:
    assert gpu_kind(config("sft", "slurm.gpu_type=h100"), 80e9) == "h100"
    assert gpu_kind(config("sft"), 80e9) == "80 GB"


def test_lines_of_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("{}\n\n{}")
    second.write_text("{}\n")
    assert count_lines([first, second]) == 3
    assert count_lines([first, tmp_path / "none.jsonl"]) is None
    assert count_lines([first, tmp_path / "b.parquet"]) is None


def test_very_large_files_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n{}\n")
    monkeypatch.setattr("hpc_rl.submission.duration._MOST_BYTES", 6)
    assert count_lines([path]) == 2
    monkeypatch.setattr("hpc_rl.submission.duration._MOST_BYTES", 5)
    assert count_lines([path]) is None


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        count_lines([path])
