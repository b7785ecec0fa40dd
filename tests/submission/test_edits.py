"""Settings that a user has edited after an attempt."""

from pathlib import Path

from hpc_rl.run_dir import RunDir
from hpc_rl.submission.edits import edited_since


def test_settings_that_are_a_link_are_not_those_of_the_last_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    attempt = run.path / "attempt-1"
    attempt.mkdir(parents=True)
    for path in (run.config, attempt / "config.yaml", tmp_path / "mine.yaml"):
        path.write_text("a: 1\n")
    assert edited_since(run) is None
    run.config.unlink()
    run.config.symlink_to(tmp_path / "mine.yaml")
    assert edited_since(run) == attempt
