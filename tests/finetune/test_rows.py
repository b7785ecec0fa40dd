"""trainer.micro_tokens=auto: the same losses as any number, with memory of GPUs that is pretended, and after a resume.

An update on the model needs 1.49 MB with rows of 128 tokens on one rank, which hold the longest sample, and 6.67 MB
with 1,024, which hold a batch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpc_rl.training.checkpoints.folders import numbered, read_progress
from tests.finetune import pretended
from tests.finetune.jobs import arguments, run_here, series, spawn
from tests.finetune.pretended import memory
from tests.marks import long

SHORT = "data.max_length=128"
AUTO = "trainer.micro_tokens=auto"
FITS, LITTLE = 7.1e6, 6.9e6
"""Bytes of a GPU: 95 % of it are enough for 1,024 tokens, or not."""
NAMES = ("train/loss", "train/grad_norm", "val/loss")


@pytest.fixture(scope="module")
def fixed(sft_config: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("fixed")
    assert run_here(sft_config, run_dir, SHORT, "trainer.micro_tokens=1024") == 0
    return run_dir


@pytest.fixture(scope="module")
def raised(sft_config: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that begins with rows of 128 tokens and goes on with 1,024, because less memory is measured."""
    run_dir = tmp_path_factory.mktemp("raised")
    with memory(LITTLE, 1e6):
        assert run_here(sft_config, run_dir, SHORT, AUTO, "trainer.save_freq=3") == 0
    return run_dir


def same(run_dir: Path, other: Path) -> None:
    for name in NAMES:
        assert series(run_dir, name) == pytest.approx(series(other, name), abs=1e-4, rel=1e-4), name


def without_last_step(run_dir: Path, to: Path) -> None:
    """Copy a run that resumes before its last steps."""
    shutil.copytree(run_dir, to, dirs_exist_ok=True)
    shutil.rmtree(numbered(to / "checkpoints")[0][1])


def recorded(run_dir: Path) -> dict[str, int] | None:
    return read_progress(numbered(run_dir / "checkpoints")[0][1]).micro_tokens


@pytest.mark.parametrize("tokens", [long("128"), "200", long("4096"), "auto"])
def test_any_number_gives_the_same_losses(sft_config: list[str], tmp_path: Path, fixed: Path, tokens: str) -> None:
    assert run_here(sft_config, tmp_path, SHORT, f"trainer.micro_tokens={tokens}") == 0
    same(tmp_path, fixed)
    assert recorded(tmp_path) is None  # nothing is decided by memory


def test_rows_on_cpus_hold_long_samples(sft_config: list[str], tmp_path: Path, fixed: Path) -> None:
    assert run_here(sft_config, tmp_path, "data.max_length=5000", AUTO) == 0
    assert series(tmp_path, "train/loss") != []


def test_rows_get_longer_if_memory_is_left(raised: Path, fixed: Path) -> None:
    same(raised, fixed)
    found = {"tokens": 1024, "is_corrected": 1, "planned": 128, "ranks": 1, "gpu_bytes": round(LITTLE)}
    assert recorded(raised) == found


def test_rows_get_shorter_if_little_memory_is_left(
    sft_config: list[str], tmp_path: Path, fixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with memory(FITS, 12e6):
        assert run_here(sft_config, tmp_path, SHORT, AUTO) == 0
    same(tmp_path, fixed)
    out = capsys.readouterr().out
    assert "trainer.micro_tokens=auto: 1,024 tokens in each pass of a rank, which hold a rank's whole part of a" in out
    assert (
        "trainer.micro_tokens=auto: 128 tokens in each pass of a rank from now on, instead of 1,024, because 0.0" in out
    )
    assert recorded(tmp_path) == {
        "tokens": 128, "is_corrected": 1, "planned": 1024, "ranks": 1, "gpu_bytes": round(FITS)
    }  # fmt: skip


def test_a_resumed_run_has_the_same_rows(
    sft_config: list[str], tmp_path: Path, raised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if other memory would be measured: the numbers are exactly those of the run that was not stopped."""
    without_last_step(raised, tmp_path)
    with memory(LITTLE, 5e6):
        assert run_here(sft_config, tmp_path, SHORT, AUTO) == 0
    assert "trainer.micro_tokens=auto: 1,024 tokens in each pass of a rank, as before" in capsys.readouterr().out
    for name in NAMES:
        assert series(tmp_path, name) == series(raised, name)


@pytest.mark.parametrize(
    ("option", "device", "expected"),
    [
        (AUTO, FITS, {"tokens": 1024, "planned": 1024, "gpu_bytes": round(FITS)}),  # GPUs with other memory
        ("trainer.micro_tokens=256", LITTLE, None),  # config.yaml was edited
    ],
)
def test_a_resumed_run_on_another_gpu_or_with_a_number(
    sft_config: list[str], tmp_path: Path, raised: Path, option: str, device: float, expected: dict[str, int] | None
) -> None:
    without_last_step(raised, tmp_path)
    with memory(device, 1e6):
        assert run_here(sft_config, tmp_path, SHORT, option) == 0
    found = recorded(tmp_path)
    assert found is None if expected is None else found is not None and expected.items() <= found.items()
    same(tmp_path, raised)


def test_the_smallest_gpu_decides_for_all_ranks(sft_config: list[str], tmp_path: Path, fixed: Path) -> None:
    """On two ranks, rows of 1,024 need 3.38 MB, of which the first rank has enough. What the second one measures counts
    too: 1,024 fit after all."""
    words = arguments(sft_config, tmp_path, SHORT, AUTO, "trainer.n_gpus_per_node=2")
    memories = [(3.6e6, 0.5e6), (3.5e6, 0.6e6)]
    results = spawn([str(pretended.__file__), json.dumps(words), json.dumps(memories)], ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "trainer.micro_tokens=auto: 128 tokens in each pass of a rank. The phase" in results[0][1]
    assert "1,024 tokens in each pass of a rank from now on, instead of 128" in results[0][1]
    assert "trainer.micro_tokens" not in results[1][1]
    assert recorded(tmp_path) == {
        "tokens": 1024, "is_corrected": 1, "planned": 128, "ranks": 2, "gpu_bytes": round(3.5e6)
    }  # fmt: skip
    same(tmp_path, fixed)


def test_another_number_of_ranks_decides_again(sft_config: list[str], tmp_path: Path, raised: Path) -> None:
    without_last_step(raised, tmp_path)
    words = arguments(sft_config, tmp_path, SHORT, AUTO, "trainer.n_gpus_per_node=2")
    results = spawn([str(pretended.__file__), json.dumps(words), json.dumps([(LITTLE, 1e6)] * 2)], ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "trainer.micro_tokens=auto: 1,024 tokens in each pass of a rank, which hold a rank's whole" in results[0][1]
    found = recorded(tmp_path)
    assert found is not None and (found["ranks"], found["planned"], found["tokens"]) == (2, 1024, 1024)
    same(tmp_path, raised)
