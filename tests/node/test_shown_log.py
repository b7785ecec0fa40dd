from pathlib import Path

import pytest

from hpc_rl.node import shown_log
from hpc_rl.node.causes import End
from hpc_rl.node.shown_log import ShownLog


def test_the_cause_comes_before_what_was_held_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_log, "LOG_POLL_S", 0.0)
    monkeypatch.setattr(shown_log, "print_cause", lambda cause: print(f"cause: {cause.text}"))
    log = ShownLog(tmp_path / "log", "rank 0")
    log.path.write_text("step 1\n")
    log.show()
    assert capsys.readouterr().out == ""
    with log.path.open("a") as file:
        file.write("Connection closed\n")
    log.show()
    assert capsys.readouterr().out == "step 1\n"
    log.end(End(1, 137, text="rank 1 was killed", process="rank 1"))
    assert capsys.readouterr().out == "cause: rank 1 was killed\nConnection closed\n"


def test_trouble_is_held_back_until_the_process_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(shown_log.time, "monotonic", lambda: now)
    log = ShownLog(tmp_path / "log", "rank 0")
    seen = []
    for text in ("step 1\nTraceback (most recent call last):\n", "  File x\n", "step 2\n", "", "RuntimeError: x\n", ""):
        with log.path.open("a") as file:
            file.write(text)
        log.show()
        seen.append(capsys.readouterr().out)
        now += shown_log.HOLD_S / 2
    trouble = "Traceback (most recent call last):\n  File x\nstep 2\n"
    assert seen == ["", "step 1\n", "", trouble, "", ""]


def test_a_log_that_shows_the_cause_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_log, "print_cause", lambda cause: print(f"cause: {cause.text}"))
    log = ShownLog(tmp_path / "log", "rank 0")
    log.path.write_text("Traceback\n")
    log.end(End(0, 1, text="rank 0 failed", process="rank 0"))
    assert capsys.readouterr().out == "Traceback\ncause: rank 0 failed\n"
