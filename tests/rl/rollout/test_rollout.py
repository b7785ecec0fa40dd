"""Placement of engines, and what they hold and generate with, on simulated engines.

The rules of tests/rl/rollout/simulated_engines.py replace any assertion about the order of calls.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.training.common import LoraConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.actors import calls, deaths
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.actors.deaths import ActorDiedError
from hpc_rl.rl.actors.pools import ClusterNode, Pool, Slot
from hpc_rl.rl.rollout import engine_process, request_queue, rollout
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.rollout import InProcessRollout, engine_slots
from hpc_rl.rl.rollout.vllm import adapters as vllm_adapters
from hpc_rl.rl.weights.base import EngineActors
from hpc_rl.system.accelerators import ENV_RAY_HIDES
from tests.rl.ppo_config import ppo_config
from tests.rl.rollout.simulated_engines import SLICES, Cluster, Setting

CUDA = ("trainer.device=cuda", "trainer.n_gpus_per_node=4", "rollout.name=vllm")
TWO_POOLS = "pools={spec: {train: [2], engines: [2]}, roles: {rollout: engines}}"
STALE_PARTIAL = ("rollout.staleness=1", "rollout.partial=true")
MODEL_S = 1800.0


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


def sharing(ray: Cluster) -> Setting:
    """Two engines on the GPUs of the policy's workers, when all have loaded their models."""
    setting = Setting(ray, ppo_config(*CUDA), pool(2), 0.5)
    setting.rollout.wait_before_workers(MODEL_S)
    setting.workers.train(0)
    setting.rollout.wait_until_ready(MODEL_S)
    return setting


def separate(ray: Cluster, *overrides: str) -> Setting:
    """Two engines in a pool of their own, when all have loaded their models."""
    setting = Setting(ray, ppo_config("trainer.n_gpus_per_node=4", TWO_POOLS, *overrides), pool(2), 1.0)
    setting.rollout.wait_until_ready(MODEL_S)
    return setting


def placements(ray: Cluster) -> list[Placement]:
    return [engine.placement for engine in ray.engines]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    for module in (engine_process, request_queue, calls, deaths):
        monkeypatch.setattr(module, "ray", found)
    for module in (request_queue, calls):
        clock = SimpleNamespace(monotonic=lambda: found.now, perf_counter=lambda: found.now)
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return found


def test_engines_take_neighbouring_slots_of_one_entry() -> None:
    ranks = [[slot.rank for slot in slots] for slots in engine_slots(pool(4, 2), 2)]
    assert ranks == [[0, 1], [2, 3], [4, 5]]
    assert [[slot.rank for slot in slots] for slots in engine_slots(pool(1, 1), 1)] == [[0], [1]]


def test_engines_on_the_policys_gpus_share_them_and_sleep(ray: Cluster) -> None:
    setting = sharing(ray)
    assert placements(ray) == [Placement("cuda", "ipc", sleeps=True, gpu_share=0.5)] * 2
    assert [engine.options["num_gpus"] for engine in ray.engines] == [0.5, 0.5]
    variables = ray.engines[0].options["runtime_env"]["env_vars"]
    assert "VLLM_NO_USAGE_STATS" in variables and "OMP_NUM_THREADS" not in variables
    setting.workers.train(1)
    setting.rollout.sync()
    assert ray.places == [(0, "asleep", 1), (1, "asleep", 1)]
    setting.rollout.wake()
    assert ray.places == [(0, "ready", 1), (1, "ready", 1)] and setting.queue.version == 1
    setting.rollout.sleep()
    assert ray.places == [(0, "asleep", None), (1, "asleep", None)] and not any(ray.gpus.values())


def test_engines_that_share_gpus_sleep_from_their_start_on(ray: Cluster) -> None:
    """They are asleep while the workers load their models, and receive weights before they generate."""
    ray.load_s = 1000.0  # longer than any other call may take
    setting = Setting(ray, ppo_config(*CUDA), pool(2), 0.5)
    setting.rollout.wait_before_workers(MODEL_S)
    assert ray.places == [(0, "asleep", None), (1, "asleep", None)] and not any(ray.gpus.values())
    setting.workers.train(0)
    setting.rollout.wait_until_ready(MODEL_S)
    assert ray.places == [(0, "asleep", None), (1, "asleep", None)] and setting.connected == [0, 1]
    setting.rollout.wake()
    assert ray.places == [(0, "ready", 0), (1, "ready", 0)] and setting.available == [0, 1]


def test_weights_that_were_lost_in_the_sleep_are_sent_again(ray: Cluster) -> None:
    """A step that does not change the policy ends without a sync."""
    setting = sharing(ray)
    for updates in (1, 2):
        setting.workers.train(5)
        for _ in range(2):  # the engines are awake already
            setting.rollout.wake()
            assert ray.places == [(0, "ready", 5), (1, "ready", 5)] and setting.queue.version == updates
        setting.rollout.sleep()
        assert ray.places == [(0, "asleep", None), (1, "asleep", None)]


@pytest.mark.parametrize("partial", [True, False])
def test_weights_change_while_no_engine_generates(ray: Cluster, partial: bool) -> None:
    """What an engine has begun goes on with the new weights, or is complete before."""
    setting = separate(ray, *STALE_PARTIAL) if partial else separate(ray)
    asked = setting.ask()
    setting.queue.turn(0.0)
    setting.workers.train(1)
    setting.rollout.sync()
    assert asked.is_complete is not partial
    setting.queue.wait([asked])
    assert asked.completions() == [[0, 0, 1, 1] if partial else [0] * SLICES]


def test_engines_on_other_gpus_do_not_sleep(ray: Cluster) -> None:
    setting = Setting(ray, ppo_config(*CUDA, TWO_POOLS), pool(2), 1.0)
    assert placements(ray) == [Placement("cuda", "nccl")] * 2
    assert not any(ENV_RAY_HIDES in engine.options["runtime_env"]["env_vars"] for engine in ray.engines)
    setting.rollout.wait_until_ready(MODEL_S)
    assert setting.connected == [0, 1] and setting.workers.engines.nodes == ["id0", "id0"]
    assert setting.workers.transfer == "nccl"
    for method in (setting.rollout.wake, setting.rollout.sleep):
        method()
        assert ray.places == [(0, "ready", 0), (1, "ready", 0)] and setting.queue.version == 0
    setting.workers.train(1)
    setting.rollout.sync()
    assert ray.places == [(0, "ready", 1), (1, "ready", 1)] and setting.workers.connections == 1
    setting.rollout.close()
    assert ray.places == [(0, "closed", 1), (1, "closed", 1)]


def test_an_engine_over_several_gpus_leaves_them_to_its_processes(ray: Cluster) -> None:
    Setting(ray, ppo_config(*CUDA, TWO_POOLS, "rollout.tensor_parallel_size=2"), pool(2, 2), 1.0)
    assert placements(ray) == [Placement("cuda", "nccl", bundles=(0, 1))] * 2
    assert [engine.options["num_gpus"] for engine in ray.engines] == [0.0, 0.0]
    assert {engine.options["runtime_env"]["env_vars"][ENV_RAY_HIDES] for engine in ray.engines} == {"0"}


def test_engines_on_cpus_get_weights_through_host_memory(ray: Cluster) -> None:
    config = ppo_config("rollout.name=vllm", "trainer.n_gpus_per_node=2", "rollout.tensor_parallel_size=2")
    Setting(ray, config, pool(2), 0.5)
    assert placements(ray) == [Placement("cpu", "host", gpu_share=0.5)]
    assert ray.engines[0].options["num_cpus"] == 0.5
    assert ray.engines[0].options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"


def test_an_engine_that_died_is_replaced_with_the_next_sync(ray: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    setting = separate(ray)
    began, asked = ray.now, [setting.ask(), setting.ask()]
    setting.queue.turn(0.0)
    ray.engines[1].die()
    capsys.readouterr()
    setting.queue.wait(asked)
    died = "rollout engine 1 on node gpu0 (log in /logs) died: Ray ended it (killed)"
    assert capsys.readouterr().out.startswith(f"warning: {died}; another engine starts in its place")
    assert "runtime_env" not in ray.engines[0].options and ray.engines[2].arguments == ray.engines[1].arguments
    assert ray.places == [(0, "ready", 0), (2, "loading", 0)] and setting.queue.loaded == [0]
    assert setting.queue.repeated == 1 and ray.now == began
    ray.now += ray.load_s
    for version in (1, 2):
        setting.workers.train(version)
        setting.rollout.sync()
        assert ray.places == [(0, "ready", version), (2, "ready", version)] and setting.queue.version == version
        assert setting.connected == [0, 2] and setting.workers.connections == 2 and setting.available == [0, 1]


def test_an_engine_that_died_without_a_request_gets_no_weights(ray: Cluster) -> None:
    setting = separate(ray)
    began = ray.now
    ray.engines[1].die()
    setting.workers.train(1)
    setting.rollout.sync()
    assert ray.places == [(0, "ready", 1), (2, "loading", 0)] and ray.now == began
    assert setting.connected == setting.available == [0] and setting.queue.version == 1


def test_an_engine_that_starts_while_another_falls_asleep_sleeps_too(ray: Cluster) -> None:
    setting = sharing(ray)
    setting.rollout.wake()
    ray.engines[0].takes_s["sleep"] = 4 * ray.load_s
    ray.engines[1].die()
    setting.rollout.sleep()
    assert ray.places == [(0, "asleep", None), (2, "asleep", None)] and not any(ray.gpus.values())


@pytest.mark.parametrize("when", ["sleep", "second sleep", "answer", "wake"])
def test_an_engine_that_died_in_its_sleep_is_replaced(ray: Cluster, when: str) -> None:
    """Found before it sleeps, before it gets weights, and before it wakes."""
    setting = sharing(ray)
    if when == "second sleep":
        setting.workers.train(1)
        ray.engines[1].die()
        setting.rollout.sleep()
        assert ray.places == [(0, "asleep", None), (2, "asleep", None)]
        return
    if when == "sleep":
        setting.rollout.wake()
        ray.engines[1].die()
        setting.rollout.sleep()
        assert ray.places == [(0, "asleep", None), (2, "asleep", None)] and not any(ray.gpus.values())
        return
    setting.workers.train(1)
    if when == "wake":
        setting.rollout.sync()
    ray.engines[1].die()
    setting.rollout.wake()
    if when == "answer":
        assert ray.places == [(0, "ready", 1), (2, "ready", 1)] and setting.connected == [0, 2]
        return
    ray.now += ray.load_s
    setting.queue.turn(0.0)
    assert ray.places == [(0, "ready", 1), (2, "ready", 0)]
    assert setting.available == [0] and setting.queue.started == {1}


def test_an_engine_that_loads_its_model_does_not_delay_the_others(ray: Cluster) -> None:
    setting = separate(ray)
    began = ray.now
    ray.engines[0].die()
    for version in (1, 2):
        setting.workers.train(version)
        setting.rollout.sync()
        assert ray.places == [(2, "loading", 0), (1, "ready", version)] and ray.now == began
        assert setting.connected == [1], "not the dead one"
        assert setting.workers.connections == 2 and setting.available == [1] and setting.queue.version == version
    ray.now += ray.load_s
    setting.rollout.sync()
    assert ray.places == [(2, "ready", 2), (1, "ready", 2)] and setting.connected == [2, 1]
    assert setting.available == [0, 1]
    ray.engines[2].die()
    setting.rollout.sync()
    setting.rollout.close()
    assert ray.places == [(3, "loading", 0), (1, "closed", 2)] and ray.now == began + ray.load_s


def test_engines_that_share_gpus_have_loaded_before_the_training_goes_on(ray: Cluster) -> None:
    setting = sharing(ray)
    setting.rollout.wake()
    ray.load_s = 2 * MODEL_S
    ray.engines[1].die()
    assert not setting.queue.tell("answer")
    with pytest.raises(RunError, match=r"^no answer within 1800 s \(trainer.model_timeout_s\) from rollout engine 1"):
        setting.rollout.sleep()
    ray.now += MODEL_S
    setting.rollout.sleep()
    assert ray.places == [(0, "asleep", None), (2, "asleep", None)]
    setting.workers.train(1)
    setting.rollout.wake()
    assert ray.places == [(0, "ready", 1), (2, "ready", 1)] and setting.connected == [0, 2]


def test_engines_that_die_again_and_again_end_the_run(ray: Cluster) -> None:
    setting = separate(ray)
    for number in (2, 4, 6):
        for engine in ray.engines[-2:]:
            engine.die()
        assert not setting.queue.tell("answer")
        ray.now += ray.load_s
        setting.rollout.sync()
        assert ray.places == [(number, "ready", 0), (number + 1, "ready", 0)] and setting.available == [0, 1]
    ray.engines[-1].die()
    with pytest.raises(ActorDiedError, match=r"^rollout engine 1 .* died"):
        setting.rollout.sync()


def test_without_any_engine_the_first_that_has_loaded_its_model_gets_weights(ray: Cluster) -> None:
    setting = separate(ray)
    for engine in (0, 1):
        ray.load_s = 300.0 - 100.0 * engine
        ray.engines[engine].die()
        assert not setting.queue.tell("answer")
    began, asked = ray.now, setting.ask()
    setting.queue.turn(0.0)
    setting.workers.train(1)
    setting.rollout.sync()
    assert ray.places == [(2, "loading", 0), (3, "loading", 0)] and not setting.available and ray.now == began
    setting.queue.wait([asked])
    assert asked.completions() == [[1] * SLICES] and ray.now == began + ray.load_s
    assert ray.places == [(2, "loading", 0), (3, "ready", 1)] and setting.connected == [3] and setting.available == [1]


@pytest.mark.parametrize("frees_memory", [True, False])
def test_engines_in_the_policys_processes(frees_memory: bool) -> None:
    """They take memory when they generate, and end with the workers."""
    state = {"weights": 0, "memory": 1}
    workers: Any = SimpleNamespace(
        engines=lambda: EngineActors([], [], [], 1.0),
        sync_engine=lambda: Pending(lambda _: state.update(weights=1)),
        sleep_engine=lambda: Pending(lambda _: state.update(memory=0)),
    )
    in_process = InProcessRollout(workers, ppo_config(), frees_memory, Path("/logs"))
    in_process.sync()
    assert state == {"weights": 1, "memory": 1} and in_process.queue.version == 1
    in_process.sleep()
    assert state == {"weights": 1, "memory": 0 if frees_memory else 1}
    in_process.wake()
    in_process.close()
    assert state == {"weights": 1, "memory": 0 if frees_memory else 1} and in_process.queue.version == 1
