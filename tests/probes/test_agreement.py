"""The measurements of a run of reinforcement learning, with the run's own worker and engine in this process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.probes.acceptance import generation
from hpc_rl.probes.acceptance.bench import Bench, Layout
from hpc_rl.probes.acceptance.generation import AgreementRunner, after_update, before_update
from hpc_rl.probes.acceptance.models import main as make_model
from hpc_rl.rl.actors import calls, process
from hpc_rl.rl.actors.pools import ClusterNode, Pool, Slot
from hpc_rl.rl.loop import setup
from hpc_rl.rl.rollout import request_queue, rollout
from hpc_rl.rl.workers import group, worker

pytestmark = pytest.mark.slow


class Result:
    """Stands for Ray's reference to a result."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Here:
    """Stands for `ray.remote(Worker)`: an actor in this process, whose calls return their results at once."""

    def __init__(self, actor_class: Any) -> None:
        self._class = actor_class

    def options(self, **_: Any) -> "Here":
        return self

    def remote(self, *arguments: Any) -> Any:
        actor = self._class(*arguments)
        names = [name for name in dir(actor) if not name.startswith("_") and callable(getattr(type(actor), name, None))]

        def call(name: str) -> Any:
            return SimpleNamespace(remote=lambda *given: Result(getattr(actor, name)(*given)))

        return SimpleNamespace(**{name: call(name) for name in names})


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench with the small model, on which runs need no Ray."""
    make_model(tmp_path / "scratch", "small", 16)
    (tmp_path / "runs").mkdir()
    slots = [Slot(0, ClusterNode("n", "n", 0, 0, 1), None, 0)]  # type: ignore[arg-type]
    monkeypatch.setattr(setup, "create_pools", lambda spec, *_: {name: Pool(name, slots) for name in spec})
    monkeypatch.setattr(group, "ray", SimpleNamespace(remote=Here))
    monkeypatch.setattr(request_queue, "ray", SimpleNamespace(wait=lambda refs, **_: (refs, [])))
    monkeypatch.setattr(
        calls.Pending, "of_calls", classmethod(lambda _, found, *_a: calls.Pending.known([x.ref.value for x in found]))
    )
    monkeypatch.setattr(process, "begin", lambda _: None)
    monkeypatch.setattr(generation, "begin", lambda _: None)
    monkeypatch.setattr(process, "assigned_devices", list)
    monkeypatch.setattr(process, "group_environment", lambda *_: {})
    monkeypatch.setattr(generation, "run_driver", lambda config, runner, run, logs: runner().run(config, run, logs))
    return Bench(Layout("cpu", 1, 1, frozenset({"ray", "tensordict"})), tmp_path / "runs", tmp_path / "scratch")


def measure(bench: Bench) -> dict[str, Any]:
    return generation._drive(bench, bench.ppo({"rollout.name": "hf"}), "run", AgreementRunner)


def test_engine_and_trainer_agree_before_and_after_an_update(bench: Bench) -> None:
    found = measure(bench)
    assert found["dtype"] == "float32" and found["memory"] == {}
    assert found["before"] < 1e-4 and found["after"] < 1e-4 and found["moved"] > 0.1, found
    assert "nats" in before_update(found) and "nats after an update" in after_update(found)


def test_an_engine_that_gets_no_weights_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.Worker, "is_sharded", True)  # the engine then has a copy of the weights
    monkeypatch.setattr(rollout.InProcessRollout, "sync", lambda _: None)
    found = measure(bench)
    assert found["before"] < 1e-4
    with pytest.raises(generation.Failed, match="nats after an update"):
        after_update(found)


def test_the_speed_of_a_step(bench: Bench) -> None:
    text = generation.speed(bench, "")
    assert "tokens/s on 1 processes" in text and "update_weights" in text
