"""The sessions of the training checks: what crashes or hangs loses only its own result."""

import argparse
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.formats.acceptance import Line, append, read, results_file
from hpc_rl.node.health import train as doctor_train
from hpc_rl.node.health.train import SessionNode, entry, follow, lead, settle
from hpc_rl.slurm.allocation import Allocation

ROOT = Path(__file__).parents[3]
OPTIONS = argparse.Namespace(device="cpu", processes=1, start_timeout=600, interface=None, first_port=None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Line]]:
    """Run the sessions of torchrun and Ray with checks that have the given fates, and return their lines."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(doctor_train, "GRACE_S", 0.2)

    def go(nodes: int = 1, **fates: dict[str, str]) -> list[Line]:
        def fake(node: SessionNode, number: int, launcher: str) -> list[str]:
            words = [f"{name}={fate}" for name, fate in fates.get(launcher, {"ok": "pass"}).items()]
            rank = str(node.allocation.node_rank)
            return ["tests.node.fake_session", rank, str(node.results), str(node.session(number)), launcher, *words]

        monkeypatch.setattr(doctor_train, "entry", fake)
        allocation = Allocation("7", 0, ("a", "b")[:nodes], 0, 1)
        followers = []
        if nodes == 2:
            second = SessionNode(Allocation("7", 0, ("a", "b"), 1, 1), tmp_path, OPTIONS, [])
            followers = [threading.Thread(target=follow, args=(second, tmp_path))]
        for follower in followers:
            follower.start()
        lead(SessionNode(allocation, tmp_path, OPTIONS, []), tmp_path / "scratch")
        for follower in followers:
            follower.join(timeout=600)
            assert not follower.is_alive()
        return read(results_file(tmp_path))

    return go


def test_a_check_that_breaks_its_processes_loses_only_itself(run: Callable[..., list[Line]]) -> None:
    lines = run(torchrun={"one": "pass", "two": "die", "three": "kill", "four": "hang", "five": "pass"})
    assert [(line.name, line.state) for line in lines] == [
        *(("one", "passed"), ("two", "failed"), ("three", "failed"), ("four", "failed"), ("five", "passed")),
        ("ok", "passed"),
    ]
    found = {line.name: line.found for line in lines}
    assert found["two"] == "rank 0: RuntimeError: CUDA error"
    assert found["three"] == "exit code 137: no output"
    assert found["four"] == "did not end within 1 s"
    assert all(line.meaning and line.setting for line in lines if line.state == "failed")


def test_processes_that_cannot_start_fail_all_checks_once(run: Callable[..., list[Line]], tmp_path: Path) -> None:
    (line, ray) = run(torchrun={"any": "broken"})
    assert (line.name, line.state, ray.state) == ("start of torchrun", "failed", "passed")
    assert line.found == "exit code 1: no module named torch"
    assert len(list((tmp_path / "train").glob("session-*.over"))) == 2


def test_processes_that_never_start_have_a_deadline(
    run: Callable[..., list[Line]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_train, "BETWEEN_CHECKS_S", 0.5 - OPTIONS.start_timeout)
    (line, _) = run(torchrun={"any": "never"}, ray={"ok": "pass"})
    assert line.found == "the processes did not start within 0 s"


def test_settled_checks_stay(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append(results, [Line(name, "ray", "planned") for name in "ab"])
    append(results, [Line("a", "ray", "planned").ended("passed", "fine")])
    settle(results, "ray", "gone", progress=True)
    assert [line.state for line in read(results)] == ["passed", "planned"]
    settle(results, "ray", "gone", progress=False)
    assert [(line.name, line.state, line.found) for line in read(results)] == [
        ("a", "passed", "fine"),
        ("b", "skipped", "ray did not start"),
        ("start of ray", "failed", "gone"),
    ]


def test_a_cut_off_line_is_left_out(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append(results, [Line("a", "ray", "passed")])
    with results.open("a") as file:
        file.write('{"name": "b", "laun')
    assert [line.name for line in read(results)] == ["a"]
    assert read(tmp_path / "none") == []


def test_a_second_node_follows(run: Callable[..., list[Line]], tmp_path: Path) -> None:
    lines = run(2, torchrun={"one": "pass", "two": "hang", "three": "pass"})
    assert [line.state for line in lines] == ["passed", "failed", "passed", "passed"]
    assert len(list((tmp_path / "train").glob("session-*.node1.json"))) == 3


def test_the_entries_are_those_of_jobs(tmp_path: Path) -> None:
    node = SessionNode(Allocation("7", 0, ("a", "b"), 0, 1), tmp_path, OPTIONS, ["--num-cpus", "3"])
    torchrun, ray = entry(node, 1, "torchrun"), entry(node, 1, "ray")
    assert torchrun[:3] == ["hpc_rl.node.torchrun", "--processes", "1"]
    assert torchrun[torchrun.index("--") + 1 :][:3] == ["-P", "-m", "hpc_rl.probes.acceptance.on_ranks"]
    assert "--num-cpus" in ray[: ray.index("--")] and "hpc_rl.probes.acceptance.on_ray" in ray[ray.index("--") :]
    assert ray[-2:] == ["--folder", str(tmp_path / "train" / "session-1")]
