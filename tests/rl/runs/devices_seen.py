"""Which of two pretended GPUs each kind of process of a run sees, on a Ray cluster of its own.

    CUDA_VISIBLE_DEVICES=4,5 python devices_seen.py FOLDER [lent]

What each process sees is printed as JSON; reward functions and environments run as in a run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.formats.offer import LENT
from hpc_rl.rewards.processes import RewardProcesses
from hpc_rl.rl.actors import cluster, process
from hpc_rl.rl.actors.pools import create_pools
from hpc_rl.rl.converse.environment_hosts import EnvironmentHost
from hpc_rl.rl.rollout import engine_process, rollout
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.engine_process import EngineProcess
from hpc_rl.rl.rollout.lent import reserve
from hpc_rl.rl.workers.worker import Worker
from hpc_rl.run_dir import RunDir
from hpc_rl.system.accelerators import ACCELERATORS
from tests.rl.ppo_config import REQUIRED, SMALL

NAMES = [row.visible[0] for row in ACCELERATORS]
TIMEOUT_S = 300


def visible() -> dict[str, str]:
    """What the variables of all vendors let this process see."""
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def reward(response: str, answer: Any) -> float:
    """A reward function: the number of variables with which its process sees a device."""
    return float(sum(value not in ("", "-1") for value in visible().values()))


class Looking:
    """What is added to an actor of a run, and a plain actor of somebody else."""

    def seen(self) -> dict[str, str]:
        return visible()


class Rank(Looking, Worker): ...


class Host(Looking, EnvironmentHost): ...


class Engine(Looking, EngineProcess):
    """An engine on several GPUs starts a process on each as vLLM's executor does (vllm/v1/executor/ray_executor_v2.py),
    which narrows nothing and looks at the ids that Ray assigns."""

    def started(self, groups: list[Any], share: float) -> list[Any]:
        runtime = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        own = ray.remote(Looking)
        made = [
            own.options(
                num_cpus=0,
                num_gpus=share,
                runtime_env=runtime,
                scheduling_strategy=PlacementGroupSchedulingStrategy(groups[0], placement_group_bundle_index=bundle),
            ).remote()
            for bundle in self._placement.bundles
        ]
        return ray.get([one.seen.remote() for one in made], timeout=TIMEOUT_S)


class LentRunner:
    """The driver of a run whose node is a lent one."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        process.begin(cluster.driver_log(logs))
        engine_process.EngineProcess = Engine  # type: ignore[misc]
        found: dict[str, Any] = {}
        placement = Placement("cuda", "host")
        for parallel in (1, 2):
            places = [reserve(ray.nodes()[0], "cuda", parallel) for _ in range(2 // parallel)]
            for index, slots in enumerate(places):
                engine = engine_process.request_engine(config, "lent", index, placement, slots, 0.0, logs)
                found[f"engine {index} of {len(places)}"] = ray.get(engine.seen.remote(), timeout=TIMEOUT_S)
            spread = engine.started.remote([slots[0].group], 1.0)
            found[f"its {parallel} processes"] = ray.get(spread, timeout=TIMEOUT_S)
            for slots in places:
                remove_placement_group(slots[0].group)
        (logs / "found.json").write_text(json.dumps(found))
        return 0


class Runner:
    """The driver."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        process.begin(cluster.driver_log(logs))
        found: dict[str, Any] = {"the driver": visible()}
        scorer = RewardProcesses([(f"{__file__}:reward", {})], 1, TIMEOUT_S)
        (scored,) = scorer.results([(0, "", None, {})])
        found["a reward process"] = scored.score
        scorer.close()
        pool = create_pools({"global_pool": [2]}, "cuda", TIMEOUT_S, str(logs))["global_pool"]
        actors: dict[str, Any] = {}
        for slot in pool.slots:
            options = slot.options("cuda", 0.25)
            made = ray.remote(Rank).options(**options).remote(config, "global_pool", slot.rank, 2, 2, frozenset(), logs)
            actors[f"rank {slot.rank}"] = made
        actors["an environment host"] = ray.remote(Host).options(num_cpus=0).remote("n", logs)
        actors["somebody else's actor"] = ray.remote(Looking).options(num_cpus=0).remote()
        engine_process.EngineProcess = Engine  # type: ignore[misc]
        for parallel in (1, 2):
            size = {"rollout": config.rollout.model_copy(update={"tensor_parallel_size": parallel})}
            fleet = rollout.Fleet(config.model_copy(update=size), pool, Placement("cuda", "nccl", gpu_share=0.25), logs)
            for index, actor in enumerate(fleet.engines.actors):
                actors[f"engine {index} of {2 // parallel}"] = actor
        found |= dict(
            zip(actors, ray.get([one.seen.remote() for one in actors.values()], timeout=TIMEOUT_S), strict=True)
        )
        spread = actors["engine 0 of 1"].started.remote([pool.slots[0].group], 0.25)
        found["the processes of engine 0 of 1"] = ray.get(spread, timeout=TIMEOUT_S)
        (logs / "found.json").write_text(json.dumps(found))
        return 0


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    options = ("trainer.device=cuda", "trainer.n_gpus_per_node=2", "rollout.name=vllm")
    is_lent = sys.argv[2:] == ["lent"]
    more = f", resources: {{{LENT}: 2}}" if is_lent else ""
    config = compose("ppo", [*REQUIRED, *SMALL, *options, f"ray_kwargs.ray_init={{num_cpus: 4, num_gpus: 2{more}}}"])
    assert isinstance(config, PpoConfig)
    code = cluster.run_driver(config, LentRunner if is_lent else Runner, RunDir(folder), folder)
    print((folder / "found.json").read_text())
    sys.exit(code)
