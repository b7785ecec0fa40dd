"""Stopping, resuming, and checkpoints that cannot be used."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import EXIT_STOPPED, RunError, UserError
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.loop.state import PpoState
from hpc_rl.tracking.tracker import Tracker
from tests.marks import long
from tests.rl.runs.jobs import Runs, copy_of, metrics, same_metrics, series, stop_after
from tests.small_disk import await_folder, needs_root, small_disk

OPTIONS = (
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.test_freq=3",
    "trainer.val_before_train=true",
    # Two batches of an epoch of five: steps 3 and 4 are of another order, and the fourth prompt waits for it.
    "data.train_batch_size=8",
    "algorithm.kl={where: reward, coef: 0.1, target: 5.0, horizon: 100}",
)


@pytest.fixture(scope="module")
def uninterrupted(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    assert run(run_dir, *OPTIONS) == 0
    return run_dir


@pytest.mark.parametrize("before, after", [long(1, 1), (1, 2), long(2, 1)])
def test_stopped_and_continued(
    run: Runs, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str], before: int, after: int
) -> None:
    for step in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, step)
            assert run(tmp_path, *OPTIONS, f"trainer.n_gpus_per_node={before}") == EXIT_STOPPED
        assert f"stopped after step {step} of 4" in capsys.readouterr().out
        (tmp_path / "stop").unlink()
    assert run(tmp_path, *OPTIONS, f"trainer.n_gpus_per_node={after}") == 0
    assert "resuming after step 2" in capsys.readouterr().out
    same_metrics(tmp_path, uninterrupted)
    coefs = series(tmp_path, "actor/kl_coef")
    assert len(set(coefs)) == 4  # it adapts, so that one which started again would be seen
    assert series(tmp_path, "perf/total_num_tokens") == series(uninterrupted, "perf/total_num_tokens")


@pytest.mark.parametrize("phase", ["hold", long("column")])
def test_a_stop_during_a_step_discards_it(
    run: Runs, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str], phase: str
) -> None:
    """The stop comes while the responses of step 3 are scored and evaluated; step 3 starts another epoch."""
    with run.state(tmp_path, *OPTIONS) as state, pytest.MonkeyPatch.context() as patch:
        known = getattr(state.actor, phase)

        def ask(*arguments: Any) -> Any:
            if state.step == 2:
                state.run.stop.write_text("user\n")
            return known(*arguments)

        patch.setattr(state.actor, phase, ask)
        assert trainer.train(state) == EXIT_STOPPED
    assert "stopped after step 2 of 4" in capsys.readouterr().out
    (tmp_path / "stop").unlink()
    assert run(tmp_path, *OPTIONS) == 0
    same_metrics(tmp_path, uninterrupted)


def test_a_step_whose_update_has_begun_is_completed(run: Runs, tmp_path: Path, uninterrupted: Path) -> None:
    with run.state(tmp_path, *OPTIONS) as state, pytest.MonkeyPatch.context() as patch:
        update = state.actor.update

        def ask(role: str, *arguments: Any) -> Any:
            if role == "critic":
                state.run.stop.write_text("user\n")
            return update(role, *arguments)

        patch.setattr(state.actor, "update", ask)
        assert trainer.train(state) == EXIT_STOPPED
        assert state.step == 1
    (tmp_path / "stop").unlink()
    assert run(tmp_path, *OPTIONS) == 0
    same_metrics(tmp_path, uninterrupted)


def test_a_validation_that_a_stop_left_out_is_made_up_for(run: Runs, tmp_path: Path, uninterrupted: Path) -> None:
    with run.state(tmp_path, *OPTIONS) as state, pytest.MonkeyPatch.context() as patch:
        learn = trainer.learn

        def ask(state: PpoState, *arguments: Any) -> Any:
            if state.step == 2:
                state.run.stop.write_text("user\n")
            return learn(state, *arguments)

        patch.setattr(trainer, "learn", ask)
        assert trainer.train(state) == EXIT_STOPPED
        assert state.step == 3
    assert [step["step"] for step in metrics(tmp_path) if "val/score" in step] == [0]
    (tmp_path / "stop").unlink()
    assert run(tmp_path, *OPTIONS) == 0
    assert [step["step"] for step in metrics(tmp_path) if "val/score" in step] == [0, 3, 4]
    same_metrics(tmp_path, uninterrupted)


def test_a_run_stops_by_itself_before_the_walltime(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPC_RL_JOB_END", str(int(time.time()) + 150))
    assert run(tmp_path, *OPTIONS) == EXIT_STOPPED
    out = capsys.readouterr().out
    assert "stopping: the walltime ends in" in out and "stopped after step 1 of 4" in out
    assert (tmp_path / "stop").read_text() == "walltime\n"


def test_a_run_that_makes_no_step_within_its_walltime_fails(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_RL_JOB_END", str(int(time.time()) + 150))
    (tmp_path / "stop").write_text("walltime\n")
    with pytest.raises(RunError, match=r"the walltime ends before the first step of .*raise --time"):
        run(tmp_path, *OPTIONS)


def test_a_damaged_newest_checkpoint_is_passed_over(
    run: Runs, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = copy_of(uninterrupted, tmp_path / "copy")
    newest = run_dir / "checkpoints" / "step-00000004"
    data = newest / "critic" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    assert run(run_dir, *OPTIONS) == 0
    out, errors = capsys.readouterr()
    assert f"warning: checkpoint {newest} is skipped: critic/__0_0.distcp has" in errors
    assert "resuming after step 2" in out
    same_metrics(run_dir, uninterrupted)


def test_contents_that_cannot_be_read_are_passed_over_too(
    run: Runs, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = copy_of(uninterrupted, tmp_path / "copy")
    data = run_dir / "checkpoints" / "step-00000004" / "actor" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    assert run(run_dir, *OPTIONS) == 0
    out, errors = capsys.readouterr()
    assert "step-00000004 is skipped: actor/__0_0.distcp does not match its checksum" in errors
    assert "resuming after step 2" in out
    same_metrics(run_dir, uninterrupted)


def test_a_run_without_any_usable_checkpoint_does_not_start_over(
    run: Runs, tmp_path: Path, uninterrupted: Path
) -> None:
    run_dir = copy_of(uninterrupted, tmp_path / "copy")
    for metadata in run_dir.glob("checkpoints/*/actor/.metadata"):
        metadata.unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read"):
        run(run_dir, *OPTIONS)


def test_a_checkpoint_without_the_critic_that_is_asked_for(
    run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "algorithm.advantage=grpo", "trainer.total_training_steps=1") == 0
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read"):
        run(tmp_path)
    assert "is skipped: it has no critic" in capsys.readouterr().err


def test_a_finished_run_does_nothing_more(run: Runs, tmp_path: Path, uninterrupted: Path) -> None:
    run_dir = copy_of(uninterrupted, tmp_path / "copy")
    assert run(run_dir, *OPTIONS) == 0
    same_metrics(run_dir, uninterrupted, 0)


def test_other_data_is_refused(run: Runs, tmp_path: Path, uninterrupted: Path) -> None:
    run_dir = copy_of(uninterrupted, tmp_path / "copy")
    train = next(word for word in run.base if word.startswith("data.train_files=")).partition("=")[2]
    with pytest.raises(UserError, match="was trained on 23 samples, and the training data now has 46"):
        run(run_dir, *OPTIONS, f"data.train_files=[{train},{train}]")


@needs_root
def test_a_disk_without_space_for_a_checkpoint_is_named(run: Runs, tmp_path: Path, uninterrupted: Path) -> None:
    """The disk is full when step 4 is saved. The checkpoint of step 2 stays, and the run resumes from it."""
    with small_disk(tmp_path / "disk", size="16m") as disk:
        run_dir = disk.path / "run"
        log = Tracker.log

        def log_and_fill(self: Tracker, number: int, *rest: Any) -> None:
            log(self, number, *rest)
            if number == 3:
                await_folder(run_dir / "checkpoints" / "step-00000002")
                disk.fill()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tracker, "log", log_and_fill)
            message = (
                rf"step-00000004.tmp\S* could not be written: .*No space left on device.* file system {disk.path} "
            )
            with (
                run.state(run_dir, *OPTIONS) as state,
                pytest.raises(RunError, match=message),
                state.saver,
            ):
                trainer.train(state)
        disk.free()
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000002"]
        assert run(run_dir, *OPTIONS) == 0
        same_metrics(run_dir, uninterrupted)
