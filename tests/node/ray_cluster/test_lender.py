"""Which attempt of a run a lent node joins."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.formats.offer import Offer
from hpc_rl.node.ray_cluster import lender
from hpc_rl.node.ray_cluster.lender import Host
from hpc_rl.run_dir import RunDir
from hpc_rl.software.ray_token import TOKEN

ADDRESS = "10.0.0.1:6379"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    attempt = tmp_path / "attempt-1"
    attempt.mkdir(mode=0o700)
    (attempt / TOKEN).write_text("1f")
    Offer(ADDRESS, "model", {}).write(attempt)
    monkeypatch.setattr(lender, "LOOK_S", 0.0)
    return RunDir(tmp_path)


def reached(monkeypatch: pytest.MonkeyPatch, *answers: bool) -> None:
    left = iter(answers)
    monkeypatch.setattr(Host, "is_reached", lambda _: next(left))


def signs(monkeypatch: pytest.MonkeyPatch, of_life: Iterator[float]) -> None:
    monkeypatch.setattr(Host, "last_sign", lambda _: next(of_life))


def awaited(run: RunDir, lost: dict[Path, int] | None = None) -> Host | None:
    return lender._await_host(run, "n1", 600, lambda: False, lost or {})


def test_an_attempt_that_is_open_and_reached_is_joined(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    reached(monkeypatch, False, False, True)
    signs(monkeypatch, iter([5.0] * 9))  # the first node may be lost, and the run queued again
    host = awaited(run)
    assert host is not None and host.attempt_dir == run.path / "attempt-1" and host.offer.gcs_address == ADDRESS


def test_a_run_that_lives_and_is_not_reached_is_an_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    reached(monkeypatch, False, False)
    signs(monkeypatch, iter([5.0, 5.0, 5.0, 6.0]))
    with pytest.raises(UserError, match=r"^node n1 does not reach the first node of run .* \(10\.0\.0\.1:6379\)"):
        awaited(run)


def test_a_node_that_was_in_the_run_waits_until_it_is_reached_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached(monkeypatch, False, False, True)
    signs(monkeypatch, iter(map(float, range(9))))
    assert awaited(run, {run.path / "attempt-1": 1}) is not None
