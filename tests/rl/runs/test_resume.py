"""Stopping, resuming, and checkpoints that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.errors import EXIT_STOPPED, UserError
from tests.rl.runs.jobs import Runs, copy_of, same_metrics, series

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


@pytest.mark.parametrize("before, after", [(1, 1), (1, 2), (2, 1)])
def test_stopped_and_continued(
    run: Runs, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str], before: int, after: int
) -> None:
    (tmp_path / "stop").touch()
    for step in (1, 2):
        assert run(tmp_path, *OPTIONS, f"trainer.n_gpus_per_node={before}") == EXIT_STOPPED
        assert f"stopped after step {step} of 4" in capsys.readouterr().out
    (tmp_path / "stop").unlink()
    assert run(tmp_path, *OPTIONS, f"trainer.n_gpus_per_node={after}") == 0
    assert "resuming after step 2" in capsys.readouterr().out
    same_metrics(tmp_path, uninterrupted)
    coefs = series(tmp_path, "actor/kl_coef")
    assert len(set(coefs)) == 4  # it adapts, so that one which started again would be seen
    assert series(tmp_path, "perf/total_num_tokens") == series(uninterrupted, "perf/total_num_tokens")


def test_a_damaged_newest_checkpoint_is_passed_over(
    run: Runs, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = copy_of(uninterrupted, tmp_path / "copy")
    newest = run_dir / "checkpoints" / "step-00000004"
    data = newest / "critic" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    assert run(run_dir, *OPTIONS) == 0
    out, errors = capsys.readouterr()
    assert f"warning: checkpoint {newest} is skipped: critic: __0_0.distcp has" in errors
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
    assert "step-00000004 is skipped: cannot be read" in errors
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
