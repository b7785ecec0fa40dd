"""Reinforcement-learning runs on a Ray that the tests share.

`Runs` drives a run from this process, on worker processes that are reused, because the imports of a worker take longer
than a run of a tiny model. Everything else is as in a job. `run_ppo` itself, with separate processes, is for the tests
of start and end.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.actors.pools import release_pools
from hpc_rl.rl.loop import setup, trainer
from hpc_rl.rl.loop.state import PpoState
from hpc_rl.rl.rollout import engine_process
from hpc_rl.rl.rollout.engine_process import EngineProcess
from hpc_rl.rl.workers import group
from hpc_rl.rl.workers.worker import Worker
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.parallel import distributed, sharding

TIMEOUT_S = 600


def ppo(*overrides: str) -> PpoConfig:
    config = compose("ppo", overrides)
    assert isinstance(config, PpoConfig)
    return config


class Hosts:
    """Stands for `ray.remote(Worker)`: each new worker takes over the process of one of an earlier run.

    That one had the same rank of as many, since torch keeps the meshes of a process for good.
    """

    def __init__(self) -> None:
        self.engines = EngineHosts()
        self._all: dict[tuple[int, int], list[Any]] = {}
        self._taken: Counter[tuple[int, int]] = Counter()

    def options(self, **_: Any) -> Hosts:
        return self

    def remote(self, config: PpoConfig, pool: str, rank: int, size: int, *rest: Any) -> Any:
        hosts = self._all.setdefault((rank, size), [])
        number = self._taken[rank, size]
        self._taken[rank, size] += 1
        if number == len(hosts):
            hosts.append(ray.remote(num_cpus=0)(Worker).remote(config, pool, rank, size, *rest))
        else:
            hosts[number].__ray_call__.remote(begin_anew, config, pool, rank, size, *rest)
        return hosts[number]

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Let runs take these processes."""
        patch.setattr(group, "ray", SimpleNamespace(remote=lambda _: self))
        patch.setattr(engine_process, "ray", SimpleNamespace(remote=lambda _: self.engines))

    def all_free(self) -> None:
        self._taken.clear()
        self.engines.all_free()


class EngineHosts:
    """Stands for `ray.remote(EngineProcess)`: an engine without variables of its own takes over a process too."""

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._taken: list[Any] = []

    def options(self, **given: Any) -> Any:
        created = ray.remote(EngineProcess).options(**given) if "runtime_env" in given else self
        return SimpleNamespace(remote=created.remote)

    def remote(self, *arguments: Any) -> Any:
        while self._free:
            actor = self._free.pop(0)
            self._taken.append(actor)
            try:
                begun = actor.__ray_call__.remote(lambda engine, *rest: engine.__init__(*rest), *arguments)
                ray.get(begun, timeout=TIMEOUT_S)
                return actor
            except RayActorError:
                self._taken.remove(actor)  # a test has killed it
        self._taken.append(ray.remote(num_cpus=0)(EngineProcess).remote(*arguments))
        return self._taken[-1]

    def all_free(self) -> None:
        self._free += self._taken
        self._taken = []


def begin_anew(worker: Worker, *arguments: Any) -> None:
    """Take over a process. What is left of the run before goes, since each thread of gloo wakes up every 10 ms."""
    distributed.finish()
    sharding._mesh.cache_clear()
    gc.collect()
    worker.__init__(*arguments)  # type: ignore[misc]


class Runs:
    """Runs one after the other, which share the options `base`."""

    def __init__(self, base: Sequence[str], hosts: Hosts) -> None:
        self.base = base
        self._hosts = hosts

    def without(self, prefix: str) -> Runs:
        """Runs that lack these options of the base."""
        return Runs([option for option in self.base if not option.startswith(prefix)], self._hosts)

    def __call__(self, run_dir: Path, *overrides: str) -> int:
        """Run to the end and return the exit code."""
        with self.state(run_dir, *overrides) as state:
            return trainer.train(state)

    @contextmanager
    def state(self, run_dir: Path, *overrides: str) -> Iterator[PpoState]:
        """Set up a run."""
        run, logs = RunDir(run_dir), run_dir / "attempt-1"
        self._hosts.all_free()
        with pytest.MonkeyPatch.context() as patch:
            self._hosts.stand_in(patch)
            try:
                state = setup.set_up(ppo(*self.base, *overrides), run, logs)
                try:
                    with state.saver:
                        yield state
                finally:
                    state.batches.close()
                    state.scoring.close()
                    state.rollout.close()
                    state.carrier.close()
            finally:
                release_pools(str(logs))


def stop_after(patch: pytest.MonkeyPatch, step: int) -> None:
    """Ask every run of this process to stop when it has recorded this step: during the next one."""
    log = Tracker.log

    def log_and_ask(self: Tracker, number: int, *rest: Any) -> None:
        log(self, number, *rest)
        if number == step:
            assert self._samples is not None
            self._samples.path.with_name("stop").write_text("user\n")

    patch.setattr(Tracker, "log", log_and_ask)


def series(run_dir: Path, name: str) -> list[float]:
    """Return one metric of all steps that have it."""
    return [record[name] for record in read_metrics(run_dir / "metrics.jsonl") if name in record]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of each step, without times and speeds, after checking that all numbers are finite."""
    found = []
    for record in read_metrics(run_dir / "metrics.jsonl"):
        numbers = {name: value for name, value in record.items() if not name.startswith(("time", "timing_s/", "perf/"))}
        bad = [name for name, value in numbers.items() if value is None or not math.isfinite(value)]
        assert not bad, f"step {record['step']}: not finite: {bad}"
        found.append(numbers)
    return found


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def copy_of(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to, dirs_exist_ok=True)
    return to


def same_metrics(run_dir: Path, other: Path, tolerance: float = 1e-3) -> None:
    """Assert that two runs measured the same at every step."""
    found, expected = metrics(run_dir), metrics(other)
    assert [step["step"] for step in found] == [step["step"] for step in expected]
    for step, wanted in zip(found, expected, strict=True):
        assert step.keys() == wanted.keys()
        for name, value in wanted.items():
            assert step[name] == pytest.approx(value, rel=tolerance, abs=tolerance), f"step {wanted['step']}: {name}"
