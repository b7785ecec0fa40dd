"""When lent nodes come and leave. tests/rl/runs/test_request_queue.py has their engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from hpc_rl.errors import RunError
from hpc_rl.formats.offer import LENT, read_lent_nodes, refusal_file
from hpc_rl.rl.rollout import lent
from tests.rl.ppo_config import ppo_config


def test_the_times_of_a_node_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue: Any = SimpleNamespace(tokens=[], version=0)
    engines = lent.LentEngines(ppo_config(), queue, lambda: [], None, tmp_path)
    engines._next_look = 0.0
    node = {"NodeID": "a", "Alive": True, "Resources": {LENT: 0.0}, "NodeName": "lent.41.0.gpu17.cluster"}
    monkeypatch.setattr(lent, "LOOK_S", 0.0)
    for now, alive in ((100.0, True), (150.0, True), (200.0, False), (250.0, False)):
        monkeypatch.setattr(lent.time, "time", lambda now=now: now)
        monkeypatch.setattr(lent.ray, "nodes", lambda alive=alive: [{**node, "Alive": alive}])
        engines.look()
        engines._record()
        (found,) = read_lent_nodes(tmp_path)
        assert (found.job, found.node, found.joined) == ("41", "gpu17.cluster", 100.0)
        assert found.left == (None if alive else 200.0)


def test_a_node_where_no_engine_starts_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admitted: list[str] = []

    def admit(_actor: Any, label: Any, *_more: str) -> int:
        admitted.append(label.name)
        queue.tokens.append(0)
        return len(admitted) - 1

    queue: Any = SimpleNamespace(own=0, tokens=[], version=0, admit=admit, prepare=lambda _engine: None)
    engines = lent.LentEngines(ppo_config(), queue, lambda: [], None, tmp_path)
    engines._next_look = 0.0
    name = "lent.41.0.gpu17"
    node = {"NodeID": "a", "Alive": True, "Resources": {LENT: 2.0}, "NodeName": name}
    monkeypatch.setattr(lent, "LOOK_S", 0.0)
    monkeypatch.setattr(lent.ray, "nodes", lambda: [node])
    monkeypatch.setattr(lent, "reserve", lambda *_: [])
    monkeypatch.setattr(lent.LentEngines, "_create", lambda *_: None)
    for place in (0, 1):
        for _ in range(lent.MOST_STARTS):
            assert not refusal_file(tmp_path, name).exists()
            engines.look()
            newest = max(index for index, label in enumerate(admitted) if label.startswith(f"lent engine {place} "))
            engines.left(newest, RunError("no memory"), 0, 0)
    assert len(admitted) == 2 * lent.MOST_STARTS
    assert refusal_file(tmp_path, name).read_text().startswith("its engines ended 3 times without a response (see ")
    waits = "the run has no engine: it waits for nodes of `hpc-rl lend`"
    assert waits not in capsys.readouterr().out  # another one was started
    engines.look()
    engines.look()
    assert capsys.readouterr().out == f"{waits}\n"


def test_a_ray_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RayError("timeout")

    queue: Any = SimpleNamespace(tokens=[])
    engines = lent.LentEngines(ppo_config(), queue, lambda: [], None, tmp_path)
    engines._next_look = 0.0
    monkeypatch.setattr(lent.ray, "nodes", fail)
    engines.look()
    assert engines._next_look > 0


def test_an_engine_is_on_the_node_that_it_was_reserved_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of two jobs may share an address."""
    monkeypatch.setattr(lent, "placement_group", lambda bundles, strategy: (bundles, strategy))
    address = {"NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "gpu17"}
    node = {"NodeID": "a", "NodeName": "lent.41.0.gpu17", "Resources": {LENT: 2.0}, **address}
    for device, more in (("cuda", {"GPU": 1}), ("cpu", {})):
        (first, _) = lent.reserve(node, device, 2)
        assert first.group == ([{**more, LENT: 1, "lent.41.0.gpu17": 0.001}] * 2, "STRICT_PACK")


@pytest.mark.parametrize(("sleeps", "staleness", "publishes"), [(False, 0, 1), (True, 0, 0), (False, 1, 0)])
def test_weights_are_published_between_steps_only_if_there_is_room(
    sleeps: bool, staleness: int, publishes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[int] = []
    queue: Any = SimpleNamespace(tokens=[], version=3)
    config = ppo_config(f"rollout.staleness={staleness}", "rollout.engines=lent")
    engines = lent.LentEngines(config, queue, lambda: published.append(1) or [], None, tmp_path, sleeps)  # type: ignore[func-returns-value]
    engines._next_look = 0.0
    node = {"NodeID": "a", "Alive": True, "Resources": {LENT: 0.0}, "NodeName": "lent.41.0.gpu17"}
    monkeypatch.setattr(lent.ray, "nodes", lambda: [node])
    engines.look()
    assert len(published) == publishes
