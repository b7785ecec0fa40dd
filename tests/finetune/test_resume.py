"""Stopping, resuming, and checkpoints that cannot be used."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_rl.errors import EXIT_STOPPED, RunError, UserError
from hpc_rl.finetune import trainer
from hpc_rl.finetune.base import Found
from hpc_rl.finetune.sft import Sft
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.checkpoints import checkpoint, folders, model_state
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.models.causal_lm import CausalLM
from tests.finetune.jobs import ask_at, run_here, run_job, run_stopped, series
from tests.marks import long
from tests.small_disk import await_folder, needs_root, small_disk

SPLIT = "trainer.packing=false"
"""Each of the eight samples of a step is a micro-batch."""


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
    options = ("trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2")
    results = run_job(sft_config, tmp_path, *options, ranks=2)
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
    options = ("trainer.sharding=none", "trainer.save_async=false", "trainer.export=true", "trainer.offload=optimizer")
    options = (*options, "model.enable_gradient_checkpointing=true", "model.enable_activation_offload=true")
    results = run_job(sft_config, tmp_path, *options, ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming after step 2" in results[0][1]
    same_as(uninterrupted, tmp_path)
    stored = checkpoint.newest(tmp_path / "checkpoints")
    assert stored is not None
    weights = model_state.read_weights(stored[0] / folders.MODEL)
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters():
        assert torch.equal(weight, weights[name]), name


def test_a_stop_within_a_step_discards_it_on_all_ranks(
    sft_config: list[str], tmp_path: Path, uninterrupted: Path
) -> None:
    options = (SPLIT, "trainer.profile_steps=1")
    kinds = ("full", "gradients", "none")
    runs = [(sft_config, tmp_path / kind, [*options, f"trainer.sharding={kind}"]) for kind in kinds]
    for code, out, errors in run_stopped(runs, micro_batch=6, ranks=2):
        assert (code, out.splitlines()[-1:]) == (0, ["exit codes 75 75 75"]), errors
    assert {path.name for path in tmp_path.glob("full/profiles/step-00000001/*")} == {"rank0.json.gz", "rank1.json.gz"}
    for _, run_dir, _ in runs:
        found = checkpoint.newest(run_dir / "checkpoints")
        assert found is not None and found[1].step == len(series(run_dir, "train/loss")) == 1
        (run_dir / "stop").unlink()
        assert run_here(sft_config, run_dir) == 0
        same_as(uninterrupted, run_dir)


def test_a_discarded_step_leaves_no_trace_in_the_random_state(
    sft_config: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of this test is random, like that of a model with dropout."""
    known = Sft.loss

    def noisy(self: Sft, model: CausalLM, batch: PackedBatch, scale: float) -> Found:
        found = known(self, model, batch, scale)
        return found._replace(loss=found.loss * (1 + torch.rand(())))

    monkeypatch.setattr(Sft, "loss", noisy)
    assert run_here(sft_config, tmp_path / "whole", SPLIT) == 0
    with pytest.MonkeyPatch.context() as patch:
        ask_at(patch, RunDir(tmp_path / "run"), 12)
        assert run_here(sft_config, tmp_path / "run", SPLIT) == EXIT_STOPPED
    (tmp_path / "run" / "stop").unlink()
    assert len(series(tmp_path / "run", "train/loss")) == 1
    assert run_here(sft_config, tmp_path / "run", SPLIT) == 0
    assert series(tmp_path / "run", "train/loss") == series(tmp_path / "whole", "train/loss")


def test_a_validation_that_a_stop_left_out_is_made_up_for(
    sft_config: list[str], tmp_path: Path, uninterrupted: Path
) -> None:
    (tmp_path / "stop").touch()
    for _ in range(3):
        assert run_here(sft_config, tmp_path) == EXIT_STOPPED
    assert series(tmp_path, "val/loss") == []
    assert run_here(sft_config, tmp_path) == EXIT_STOPPED
    assert series(tmp_path, "val/loss") == series(uninterrupted, "val/loss")[:1]
    (tmp_path / "stop").unlink()
    assert run_here(sft_config, tmp_path) == 0
    same_as(uninterrupted, tmp_path)


def test_a_run_that_ends_in_a_validation_keeps_what_its_last_step_measured(
    sft_config: list[str], tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(state: trainer.TrainerState) -> None:
        raise RunError("killed")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="killed"):
        patch.setattr(trainer, "validate", die)
        run_here(sft_config, tmp_path, "trainer.save_freq=3")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert run_here(sft_config, tmp_path) == 0
    same_as(uninterrupted, tmp_path)
    times = series(tmp_path, "timing_s/forward_backward")
    assert len(times) == 7  # without the step that did not end


def test_a_run_stops_by_itself_before_the_walltime_and_is_resumed(
    sft_config: list[str], tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_RL_JOB_END", str(int(time.time()) + 100))
    assert run_here(sft_config, tmp_path) == EXIT_STOPPED
    assert (tmp_path / "stop").read_text() == "walltime\n"
    assert series(tmp_path, "train/loss") == series(uninterrupted, "train/loss")[:1]
    assert checkpoint.newest(tmp_path / "checkpoints") is not None
    (tmp_path / "stop").unlink()  # as the job script does
    monkeypatch.delenv("HPC_RL_JOB_END")
    assert run_here(sft_config, tmp_path) == 0
    same_as(uninterrupted, tmp_path)


def test_a_run_that_cannot_make_a_step_within_its_walltime_is_not_queued_again(
    sft_config: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_RL_JOB_END", str(int(time.time()) + 100))
    (tmp_path / "stop").write_text("walltime\n")
    with pytest.raises(RunError, match=r"the walltime ends before the first step of .*raise --time"):
        run_here(sft_config, tmp_path, SPLIT)
    assert not (tmp_path / "checkpoints").exists()


def test_a_damaged_newest_checkpoint_is_skipped(
    sft_config: list[str], copy: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = copy / "checkpoints" / "step-00000008"
    data = newest / "model" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    (copy / "checkpoints" / "step-00000009.tmp").mkdir()
    assert run_here(sft_config, copy) == 0
    out, errors = capsys.readouterr()
    assert f"warning: checkpoint {newest} is skipped: model/__0_0.distcp has" in errors
    assert "resuming after step 6" in out
    same_as(uninterrupted, copy)
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008", "step-00000008.aside"]


def test_contents_that_cannot_be_read_are_skipped_too(
    sft_config: list[str], copy: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = copy / "checkpoints" / "step-00000008" / "model" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    assert run_here(sft_config, copy) == 0
    out, errors = capsys.readouterr()
    assert "step-00000008 is skipped: model/__0_0.distcp does not match its checksum" in errors
    assert "resuming after step 6" in out
    same_as(uninterrupted, copy)


@pytest.mark.parametrize("file", [long(".metadata"), "hf/config.json", long("checksums.json")])
def test_every_damaged_file_is_found(
    sft_config: list[str], copy: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    flip(copy / "checkpoints" / "step-00000008" / "model" / file)
    assert run_here(sft_config, copy) == 0
    out, errors = capsys.readouterr()
    assert f"step-00000008 is skipped: model/{file} does not match its checksum" in errors
    assert "resuming after step 6" in out and "step-00000008 is now step-00000008.aside" in out
    same_as(uninterrupted, copy)


def test_a_step_that_can_be_read_again_does_not_replace_what_was_trained(
    sft_config: list[str], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one checkpoint to keep, the run resumes before a damaged one and stops after one more step."""
    data = copy / "checkpoints" / "step-00000008" / "model" / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    (copy / "stop").touch()
    keep = "trainer.max_ckpt_to_keep=1"
    assert run_here(sft_config, copy, keep) == EXIT_STOPPED
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert names == ["step-00000007", "step-00000008.aside"]
    (copy / "stop").unlink()
    (copy / "checkpoints" / "step-00000008.aside" / "model" / "__0_0.distcp").write_bytes(whole)
    capsys.readouterr()
    assert run_here(sft_config, copy, keep) == 0
    assert "resuming after step 7" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_version_has_no_checksums(
    sft_config: list[str], copy: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in copy.glob("checkpoints/**/checksums.json"):
        file.unlink()
    shutil.rmtree(copy / "checkpoints" / "step-00000008" / "model" / "hf")
    assert run_here(sft_config, copy) == 0
    out, errors = capsys.readouterr()
    assert "step-00000008 is skipped: model/hf/config.json has 0 of 1 bytes" in errors
    assert "resuming after step 6" in out
    same_as(uninterrupted, copy)


@needs_root
@pytest.mark.parametrize("outage", ["full", "read-only"])
def test_a_disk_without_space_for_a_checkpoint(
    sft_config: list[str], tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, outage: str
) -> None:
    """The disk is full, or read-only, when step 6 is saved. The checkpoint of step 3 stays, and the run resumes."""
    with small_disk(tmp_path / "disk") as disk:
        run_dir, options = disk.path / "run", ("trainer.save_freq=3", "trainer.max_ckpt_to_keep=2")
        step, log = disk.fill if outage == "full" else disk.read_only, Tracker.log

        def log_and_break(self: Tracker, number: int, *rest: Any) -> None:
            log(self, number, *rest)
            if number == 5:
                await_folder(run_dir / "checkpoints" / "step-00000003")
                step()

        with monkeypatch.context() as patch:
            patch.setattr(Tracker, "log", log_and_break)
            reason = "No space left on device" if outage == "full" else "Read-only file system"
            with pytest.raises(RunError, match=rf"step-00000006.tmp\S* could not be written: .*{reason}.*{disk.path} "):
                run_here(sft_config, run_dir, *options)
        disk.read_only(False)
        disk.free()
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003"]
        assert run_here(sft_config, run_dir, *options) == 0
        same_as(uninterrupted, run_dir)


@needs_root
def test_a_run_goes_on_while_its_metrics_cannot_be_written(
    sft_config: list[str], tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        log = Tracker.log

        def log_and_change(self: Tracker, number: int, *rest: Any) -> None:
            if number in (2, 6):
                disk.read_only(number == 2)
            log(self, number, *rest)
            if number == 5:
                assert len(series(disk.path / "run", "train/loss")) == 1

        monkeypatch.setattr(Tracker, "log", log_and_change)
        assert run_here(sft_config, disk.path / "run") == 0
        same_as(uninterrupted, disk.path / "run")


def flip(file: Path) -> None:
    """Change 64 bits in the middle of a file."""
    data = bytearray(file.read_bytes())
    for place in range(len(data) // 2, min(len(data), len(data) // 2 + 64)):
        data[place] ^= 1
    file.write_bytes(data)


def test_a_run_without_any_usable_checkpoint_does_not_start_over(sft_config: list[str], copy: Path) -> None:
    for metadata in copy.glob("checkpoints/*/*/.metadata"):
        metadata.unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read"):
        run_here(sft_config, copy)


def test_a_finished_run_is_reported(sft_config: list[str], copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(sft_config, copy) == 0
    assert "has already finished after 8 steps" in capsys.readouterr().out
    assert len(series(copy, "train/loss")) == 8


def test_an_export_that_failed_is_made_up_for(
    sft_config: list[str], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of an earlier end of the run does not count."""
    exports, weights = "trainer.export=true", copy / "model" / "model.safetensors"
    assert run_here(sft_config, copy, exports) == 0
    first, written = weights.read_bytes(), weights.stat().st_mtime_ns
    assert run_here(sft_config, copy, exports) == 0
    assert weights.stat().st_mtime_ns == written

    def fail(*_: Any, **__: Any) -> None:
        raise RunError("the disk is full")

    more = "trainer.total_epochs=3"
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "export", fail)
        with pytest.raises(RunError, match="the disk is full"):
            run_here(sft_config, copy, exports, more)
    assert weights.read_bytes() == first
    assert run_here(sft_config, copy, exports, more) == 0
    assert weights.read_bytes() != first


def test_other_data_is_refused(sft_config: list[str], copy: Path) -> None:
    val = next(word for word in sft_config if word.startswith("data.val_files=")).partition("=")[2]
    with pytest.raises(UserError, match="was trained on 31 samples, and the training data now has 9"):
        run_here(sft_config, copy, f"data.train_files=[{val}]")
