"""Stopping, resuming, and checkpoints that cannot be used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.training import checkpoint, model_state
from tests.finetune.jobs import run_here, run_job, series


@pytest.fixture(scope="module")
def uninterrupted(sft_config: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    assert run_here(sft_config, run_dir, "trainer.save_freq=3") == 0
    return run_dir


@pytest.fixture
def copy(uninterrupted: Path, tmp_path: Path) -> Path:
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    return tmp_path


def same_as(uninterrupted: Path, run_dir: Path) -> None:
    for name in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "train/epoch", "perf/total_num_tokens"):
        assert series(run_dir, name) == pytest.approx(series(uninterrupted, name), abs=1e-4), name


def test_stopped_on_two_ranks_and_resumed_on_one(sft_config: list[str], tmp_path: Path, uninterrupted: Path) -> None:
    (tmp_path / "stop").write_text("enough")
    results = run_job(sft_config, tmp_path, ranks=2)
    assert [code for code, _, _ in results] == [EXIT_STOPPED] * 2, results
    assert "stopped after step 1 of 8" in results[0][1]
    (tmp_path / "stop").unlink()
    ((code, out, errors),) = run_job(sft_config, tmp_path)
    assert code == 0, errors
    assert "resuming after step 1" in out
    same_as(uninterrupted, tmp_path)


def test_stopped_on_one_rank_and_resumed_on_two(sft_config: list[str], tmp_path: Path, uninterrupted: Path) -> None:
    (tmp_path / "stop").touch()
    assert run_here(sft_config, tmp_path) == EXIT_STOPPED
    assert run_here(sft_config, tmp_path) == EXIT_STOPPED
    (tmp_path / "stop").unlink()
    options = ("trainer.sharding=none", "trainer.save_async=false", "trainer.export=true")
    results = run_job(sft_config, tmp_path, *options, ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming after step 2" in results[0][1]
    same_as(uninterrupted, tmp_path)
    stored = checkpoint.newest(tmp_path / "checkpoints")
    assert stored is not None
    weights = model_state.read_weights(stored[0] / checkpoint.MODEL)
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters():
        assert torch.equal(weight, weights[name]), name


def test_a_damaged_newest_checkpoint_is_skipped(
    sft_config: list[str], copy: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = copy / "checkpoints" / "step-00000008"
    data = newest / "model" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    (copy / "checkpoints" / "step-00000009.tmp").mkdir()
    assert run_here(sft_config, copy) == 0
    out, errors = capsys.readouterr()
    assert f"warning: checkpoint {newest} is skipped: model: __0_0.distcp has" in errors
    assert "resuming after step 6" in out
    same_as(uninterrupted, copy)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


def test_contents_that_cannot_be_read_are_skipped_too(
    sft_config: list[str], copy: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = copy / "checkpoints" / "step-00000008" / "model" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    assert run_here(sft_config, copy) == 0
    out, errors = capsys.readouterr()
    assert "step-00000008 is skipped: cannot be read" in errors
    assert "resuming after step 6" in out
    same_as(uninterrupted, copy)


def test_a_run_without_any_usable_checkpoint_does_not_start_over(sft_config: list[str], copy: Path) -> None:
    for metadata in copy.glob("checkpoints/*/*/.metadata"):
        metadata.unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read"):
        run_here(sft_config, copy)


def test_a_finished_run_is_reported(sft_config: list[str], copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(sft_config, copy) == 0
    assert "has already finished after 8 steps" in capsys.readouterr().out
    assert len(series(copy, "train/loss")) == 8


def test_other_data_is_refused(sft_config: list[str], copy: Path) -> None:
    val = next(word for word in sft_config if word.startswith("data.val_files=")).partition("=")[2]
    with pytest.raises(UserError, match="was trained on 31 samples, and the training data now has 9"):
        run_here(sft_config, copy, f"data.train_files=[{val}]")
