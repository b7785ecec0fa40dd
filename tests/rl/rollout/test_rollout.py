"""Placement of engines and the order of calls, with actors that only record what they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.common import LoraConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.actors.calls import ActorCall, Pending
from hpc_rl.rl.actors.deaths import ActorDiedError
from hpc_rl.rl.actors.pools import ClusterNode, Pool, Slot
from hpc_rl.rl.rollout import request_queue, rollout
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.rollout import InProcessRollout, SeparateRollout, engine_slots
from hpc_rl.rl.rollout.vllm import adapters as vllm_adapters
from hpc_rl.rl.weights.base import EngineActors
from hpc_rl.system.accelerators import ENV_RAY_HIDES
from tests.rl.ppo_config import ppo_config

CUDA = ("trainer.device=cuda", "trainer.n_gpus_per_node=4", "rollout.name=vllm")
ANSWER = ("engine0.answer", "engine1.answer")
SYNC = ("neighbours.free_cache", *ANSWER, "policy.send_weights")
WAKE = ("neighbours.free_cache", "engine0.wake", "engine1.wake")
SLEEP = ("engine0.sleep", "engine1.sleep")
TWO_POOLS = "pools={spec: {train: [2], engines: [2]}, roles: {rollout: engines}}"


def test_adapters_that_an_engine_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rank is not in the configuration if they continue from a folder."""
    config = ppo_config("model.lora.path=adapters", "rollout.merge_lora=false", "rollout.name=vllm")
    monkeypatch.setattr(rollout, "new_like", lambda _: LoraConfig(rank=512))
    assert rollout.adapter_config(config)["r"] == 512
    monkeypatch.setattr(rollout, "new_like", lambda _: LoraConfig(rank=513))
    with pytest.raises(UserError, match=r"model\.lora\.rank is 513, .* of rank 512 or less"):
        rollout.adapter_config(config)
    assert ENGINES["vllm"].max_lora_rank == vllm_adapters.RANKS[-1]


def pool(*sizes: int) -> Pool:
    """Each entry is a placement group on a node of its own."""
    slots: list[Slot] = []
    for entry, size in enumerate(sizes):
        node = ClusterNode(f"id{entry}", f"gpu{entry}", entry, size, size)
        group: Any = SimpleNamespace(id=entry)
        slots += [Slot(len(slots) + bundle, node, group, bundle) for bundle in range(size)]
    return Pool("engines", slots)


class Recorder:
    """Stands for workers or an engine: any method is recorded, and returns a result at once."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def __getattr__(self, method: str) -> Any:
        def called(*arguments: Any) -> Any:
            self._log.append(f"{self._name}.{method}")
            self.arguments = arguments
            return EngineActors([], [], [], 1.0) if method == "engines" else Pending.known(None)

        return called


class Actors:
    """Stands for Ray: the engines that were requested, with their options and arguments."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.requests: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self.loading: set[int] = set()
        """Engines whose `start` does not return."""
        self.dead: set[int] = set()
        self.slow: set[str] = set()
        """Calls that return after all others."""

    def remote(self, _kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *args: self._new(options, args)))

    def wait(self, refs: Sequence[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        late = {f"engine{number}.start" for number in self.loading}
        late |= self.slow if {*refs} - late - self.slow else set()
        return [ref for ref in refs if ref not in late], [ref for ref in refs if ref in late]

    def answers(self, calls: Sequence[ActorCall]) -> Pending[list[Any]]:
        if any(call.ref.startswith(f"engine{number}.") for call in calls for number in self.dead):
            return Pending(died)
        return Pending.known([None for _ in calls])

    def _new(self, options: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
        number = len(self.requests)
        self.requests.append((options, arguments))

        def method(name: str) -> Any:
            def remote(*given: Any) -> Any:
                self.log.append(f"engine{number}.{name}")
                return self.log[-1]

            return SimpleNamespace(remote=remote)

        names = ("start", "answer", "sleep", "wake", "close")
        return SimpleNamespace(number=number, **{name: method(name) for name in names})

    @property
    def placements(self) -> list[Placement]:
        return [arguments[3] for _, arguments in self.requests]


def died(_timeout_s: float) -> NoReturn:
    raise ActorDiedError("died", 137)


class Setting:
    def __init__(self, config: PpoConfig, engines: Pool, share: float, actors: Actors) -> None:
        self.log = actors.log
        self.policy = Recorder("policy", self.log)
        neighbours: Any = Recorder("neighbours", self.log) if share < 1 else None
        policy: Any = self.policy
        self.rollout = SeparateRollout(config, engines, share, policy, neighbours, Path("/logs"))


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    found = Actors([])
    for module in (rollout, request_queue):
        monkeypatch.setattr(module, "ray", found)
    monkeypatch.setattr(Pending, "of_calls", staticmethod(found.answers))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return found


def test_engines_take_neighbouring_slots_of_one_entry() -> None:
    ranks = [[slot.rank for slot in slots] for slots in engine_slots(pool(4, 2), 2)]
    assert ranks == [[0, 1], [2, 3], [4, 5]]
    assert [[slot.rank for slot in slots] for slots in engine_slots(pool(1, 1), 1)] == [[0], [1]]


def test_engines_on_the_policys_gpus_share_them_and_sleep(actors: Actors) -> None:
    setting = Setting(ppo_config(*CUDA), pool(2), 0.5, actors)
    assert actors.placements == [Placement("cuda", "ipc", sleeps=True, gpu_share=0.5)] * 2
    assert [options["num_gpus"] for options, _ in actors.requests] == [0.5, 0.5]
    variables = actors.requests[0][0]["runtime_env"]["env_vars"]
    assert "VLLM_NO_USAGE_STATS" in variables and "OMP_NUM_THREADS" not in variables
    setting.rollout.wait_until_ready(1.0)
    setting.rollout.sync()
    setting.rollout.wake()
    setting.rollout.sleep()
    assert setting.log[3:] == [*SYNC, *WAKE, *SLEEP]


def test_engines_that_share_gpus_sleep_from_their_start_on(actors: Actors) -> None:
    """They are asleep while the workers load their models, and receive weights before they generate."""
    setting = Setting(ppo_config(*CUDA), pool(2), 0.5, actors)
    setting.rollout.wait_before_workers(1.0)
    assert setting.log == ["engine0.start", "engine1.start", *SLEEP]
    setting.rollout.wait_until_ready(1.0)
    setting.rollout.wake()
    assert setting.log[4:] == ["policy.connect_engines", *SYNC, *WAKE]


def test_weights_that_were_lost_in_the_sleep_are_sent_again(actors: Actors) -> None:
    """A step that does not change the policy ends without a sync."""
    setting = Setting(ppo_config(*CUDA), pool(2), 0.5, actors)
    setting.rollout.wait_until_ready(1.0)
    setting.rollout.wake()
    setting.rollout.wake()
    setting.rollout.sleep()
    setting.rollout.wake()
    assert setting.log[3:] == [*WAKE, *WAKE, *SLEEP, *SYNC, *WAKE]


def test_engines_on_other_gpus_do_not_sleep(actors: Actors) -> None:
    setting = Setting(ppo_config(*CUDA, TWO_POOLS), pool(2), 1.0, actors)
    assert actors.placements == [Placement("cuda", "nccl")] * 2
    assert not any(ENV_RAY_HIDES in options["runtime_env"]["env_vars"] for options, _ in actors.requests)
    setting.rollout.wait_until_ready(1.0)
    assert setting.policy.arguments[1] == "nccl" and setting.policy.arguments[0].nodes == ["id0", "id0"]
    setting.rollout.wake()
    setting.rollout.sleep()
    setting.rollout.sync()
    setting.rollout.close()
    sync = (*ANSWER, "policy.send_weights")
    assert setting.log[2:] == ["policy.connect_engines", *sync, "engine0.close", "engine1.close"]


def test_an_engine_over_several_gpus_leaves_them_to_its_processes(actors: Actors) -> None:
    Setting(ppo_config(*CUDA, TWO_POOLS, "rollout.tensor_parallel_size=2"), pool(2, 2), 1.0, actors)
    assert actors.placements == [Placement("cuda", "nccl", bundles=(0, 1))] * 2
    assert [options["num_gpus"] for options, _ in actors.requests] == [0.0, 0.0]
    assert {options["runtime_env"]["env_vars"][ENV_RAY_HIDES] for options, _ in actors.requests} == {"0"}


def test_engines_on_cpus_get_weights_through_host_memory(actors: Actors) -> None:
    config = ppo_config("rollout.name=vllm", "trainer.n_gpus_per_node=2", "rollout.tensor_parallel_size=2")
    Setting(config, pool(2), 0.5, actors)
    assert actors.placements == [Placement("cpu", "host", gpu_share=0.5)]
    assert actors.requests[0][0]["num_cpus"] == 0.5
    assert actors.requests[0][0]["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"


def separate(actors: Actors) -> Setting:
    """Two engines in a pool of their own, which the policy's workers reach."""
    setting = Setting(ppo_config("trainer.n_gpus_per_node=4", TWO_POOLS), pool(2), 1.0, actors)
    setting.rollout.wait_until_ready(1.0)
    del setting.log[:]
    return setting


def reached(setting: Setting) -> list[int]:
    """Return the numbers of the engines to which the policy's workers were connected last."""
    return [actor.number for actor in setting.rollout._reached]


def test_an_engine_that_died_is_replaced_with_the_next_sync(actors: Actors, capsys: pytest.CaptureFixture[str]) -> None:
    setting = separate(actors)
    assert "runtime_env" not in actors.requests[0][0]
    error = ActorDiedError("rollout engine 1 died: killed (signal 9)", 137)
    queue = setting.rollout.queue
    queue._lose(1, error)
    assert actors.requests[2][1] == actors.requests[1][1] and setting.log == ["engine2.start"]
    assert capsys.readouterr().out.startswith(f"warning: {error}; another engine starts in its place")
    assert queue.loaded == [0]
    setting.rollout.sync()
    answer = ["engine0.answer", "engine2.answer"]
    assert setting.log[1:] == [*answer, "policy.connect_engines", "policy.send_weights"] and reached(setting) == [0, 2]
    assert queue._dispatch.available == [0, 1] and queue.version == 1
    setting.rollout.sync()
    assert setting.log[5:] == [*answer, "policy.send_weights"] and queue.version == 2


def test_an_engine_that_died_without_a_request_gets_no_weights(actors: Actors) -> None:
    setting = separate(actors)
    actors.dead.add(1)
    actors.loading.add(2)
    setting.rollout.sync()
    assert setting.log == [*ANSWER, "engine2.start", "policy.connect_engines", "policy.send_weights"]
    assert reached(setting) == [0] and setting.rollout.queue.version == 1


def test_an_engine_that_starts_while_another_falls_asleep_sleeps_too(actors: Actors) -> None:
    setting = Setting(ppo_config(*CUDA), pool(2), 0.5, actors)
    setting.rollout.wait_until_ready(1.0)
    del setting.log[:]
    actors.dead.add(1)
    actors.slow.add("engine0.sleep")
    setting.rollout.sleep()
    assert setting.log == [*SLEEP, "engine2.start", "engine0.sleep", "engine2.sleep"]


@pytest.mark.parametrize("when", ["sleep", "answer", "wake"])
def test_an_engine_that_died_in_its_sleep_is_replaced(actors: Actors, when: str) -> None:
    """Found before it sleeps, before it gets weights, and before it wakes."""
    setting = Setting(ppo_config(*CUDA), pool(2), 0.5, actors)
    setting.rollout.wait_until_ready(1.0)
    if when == "answer":
        setting.rollout.sleep()
    elif when == "wake":
        setting.rollout.sync()
    del setting.log[:]
    actors.dead.add(1)
    if when == "sleep":
        setting.rollout.sleep()
        assert setting.log == [*SLEEP, "engine2.start", "engine0.sleep", "engine2.sleep"]
        return
    setting.rollout.wake()
    reconnected = [*SYNC[:3], "engine2.start", "policy.connect_engines", "policy.send_weights"]
    if when == "answer":
        assert setting.log == [*reconnected, WAKE[0], "engine0.wake", "engine2.wake"] and reached(setting) == [0, 2]
        return
    assert setting.log == [*WAKE, "engine2.start"]
    setting.rollout.queue.turn(0.0)
    assert setting.rollout.queue._dispatch.available == [0] and setting.rollout.queue.started == {1}


def test_an_engine_that_loads_its_model_does_not_delay_the_others(actors: Actors) -> None:
    setting = separate(actors)
    actors.loading.add(2)
    setting.rollout.queue._lose(0, ActorDiedError("died", 137))
    for syncs in (1, 2):
        setting.rollout.sync()
        sent = ["engine1.answer", "policy.connect_engines", "policy.send_weights"]
        assert setting.log[1:] == sent + ["engine1.answer", "policy.send_weights"] * (syncs - 1)
        assert reached(setting) == [1], "not the dead one"
        assert setting.rollout.queue._dispatch.available == [1] and setting.rollout.queue.version == syncs
    setting.rollout.close()
    assert setting.log[6:] == ["engine1.close"]
    actors.loading.clear()
    setting.rollout.sync()
    assert setting.log[9:] == ["policy.connect_engines", "policy.send_weights"] and reached(setting) == [2, 1]
    assert setting.rollout.queue._dispatch.available == [0, 1]


def test_engines_that_share_gpus_have_loaded_before_the_training_goes_on(actors: Actors) -> None:
    setting = Setting(ppo_config(*CUDA), pool(2), 0.5, actors)
    setting.rollout.wait_until_ready(1.0)
    del setting.log[:]
    actors.loading.add(2)
    setting.rollout.queue._lose(1, ActorDiedError("died", 137))
    setting.rollout.queue._heard[1] -= setting.rollout._model_s
    with pytest.raises(RunError, match=r"^no answer within 1800 s \(trainer.model_timeout_s\) from rollout engine 1"):
        setting.rollout.sleep()
    actors.loading.clear()
    setting.rollout.sleep()
    setting.rollout.wake()
    answer = ("engine0.answer", "engine2.answer")
    reconnected = (SYNC[0], *answer, "policy.connect_engines", "policy.send_weights")
    awake = (WAKE[0], "engine0.wake", "engine2.wake")
    assert setting.log == ["engine2.start", "engine0.sleep", "engine2.sleep", *reconnected, *awake]


def test_engines_that_die_again_and_again_end_the_run(actors: Actors) -> None:
    queue = separate(actors).rollout.queue
    for _ in range(3):
        queue._lose(0, ActorDiedError("died", 137))
        queue._lose(1, ActorDiedError("died", 137))
    with pytest.raises(ActorDiedError, match=r"^died$"):
        queue._lose(1, ActorDiedError("died", 137))


def test_without_any_engine_the_first_that_has_loaded_its_model_gets_weights(actors: Actors) -> None:
    setting = separate(actors)
    queue = setting.rollout.queue
    actors.loading |= {2, 3}
    for engine in (0, 1):
        queue._lose(engine, ActorDiedError("died", 137))
    queue.turn(0.0)
    setting.rollout.sync()
    assert setting.log == ["engine2.start", "engine3.start"] and not queue.is_stranded
    actors.loading.remove(3)
    queue.turn(0.0)
    assert queue.is_stranded and queue.loaded == [1]
    queue.turn(0.0)
    sync = ["engine3.answer", "policy.connect_engines", "policy.send_weights"]
    assert setting.log[2:] == sync and reached(setting) == [3]
    assert queue._dispatch.available == [1] and not queue.is_stranded


@pytest.mark.parametrize("frees_memory", [True, False])
def test_engines_in_the_policys_processes(frees_memory: bool) -> None:
    log: list[str] = []
    workers: Any = Recorder("policy", log)
    in_process = InProcessRollout(workers, ppo_config(), frees_memory)
    for method in (in_process.sync, in_process.sleep, in_process.wake, in_process.close):
        method()
    assert log == ["policy.engines", "policy.sync_engine", *(["policy.sleep_engine"] if frees_memory else [])]
