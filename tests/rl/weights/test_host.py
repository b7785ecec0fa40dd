from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hpc_rl.errors import UserError
from hpc_rl.rl.actors.cluster import start_ray
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.weights.base import BucketReceiver, EngineActors, WeightSource
from hpc_rl.rl.weights.host import HostSender, assign_engines
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World

TIMEOUT_S = 600
BUCKET_BYTES = 4 * 1000
"""Small, so that the model needs many buckets."""


def test_each_engine_is_served_by_one_rank_on_its_node() -> None:
    assert assign_engines(["b", "a", "b", "c"], ["a", "a", "b"]) == [[1, 3], [], [0, 2]]
    assert assign_engines(["x"], ["a", "b"]) == [[0], []]


def make_model() -> nn.Module:
    """Make layers of several sizes, one of them larger than a bucket."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(3000, 2), *(nn.Linear(20, 20) for _ in range(12)), nn.LayerNorm(7))


class Holder:
    """An engine that holds parameters, in a Ray actor."""

    def __init__(self) -> None:
        self.receiver = BucketReceiver(self)

    def build(self, dtype: torch.dtype) -> None:
        self.model = make_model().to(dtype)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.calls: list[str] = []
        self.refuses = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                assert weight.dtype == parameters[name].dtype
                parameters[name].copy_(weight)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.received = init_info

    def init_info(self) -> dict[str, Any]:
        return self.received

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update: Any) -> None:
        self.calls.append("update")
        if self.refuses:
            raise UserError("no such weights here")
        self.receiver.update_weights(update)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def refuse(self) -> None:
        self.refuses = True

    def parameters(self) -> list[Any]:
        return [parameter.detach().float().numpy() for parameter in self.model.parameters()]

    def take_calls(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls

    def pid(self) -> int:
        return os.getpid()


LOG: list[str] = []
"""What this process did: it gathered a tensor, or waited for the other rank on the CPU."""


class LoggedSource(WeightSource):
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in super().__iter__():
            LOG.append("gather")
            yield pair


class LoggedWorld(World):
    def barrier(self) -> None:
        LOG.append("wait")
        super().barrier()


class Trainer:
    """One of two training ranks, in a Ray actor."""

    def __init__(self, rank: int, group: str) -> None:
        environment = {"RANK": rank, "WORLD_SIZE": 2, "HPC_RL_GROUP_DIR": group}
        os.environ.update({name: str(value) for name, value in environment.items()})
        self.both = distributed.start("cpu", TIMEOUT_S)

    def build(self, ranks: int, dtype: torch.dtype, engines: list[Any], nodes: list[str]) -> None:
        self.model = make_model()
        world = LoggedWorld(self.both.rank if ranks == 2 else 0, ranks, torch.device("cpu"))
        if ranks == 2:
            fully_shard(self.model)
        self.source = LoggedSource(self.model, dtype)
        named = EngineActors(engines, [ActorLabel("first", "engine"), ActorLabel("second", "engine")], nodes, TIMEOUT_S)
        self.sender = HostSender(self.source, named, world, BUCKET_BYTES)

    def send(self) -> None:
        self.sender.send_weights()

    def step(self, by: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(by)

    def take_log(self) -> list[str]:
        log = [*LOG]
        LOG.clear()
        return log

    def places(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.model.parameters()]

    def parameters(self) -> list[Any]:
        return [tensor.float().numpy() for _, tensor in self.source]


class Setting:
    """Two training ranks and two engines, one of which counts as being on another node."""

    def __init__(self, group: str) -> None:
        engine, trainer = ray.remote(num_cpus=0)(Holder), ray.remote(num_cpus=0)(Trainer)
        self.engines = [engine.remote() for _ in range(2)]
        self.ranks = [trainer.remote(rank, group) for rank in range(2)]
        self.active = self.ranks

    def build(self, ranks: int, dtype: torch.dtype) -> None:
        self.active = self.ranks[:ranks]
        self.engine_calls("build", dtype)
        nodes = [ray.get_runtime_context().get_node_id(), "elsewhere"]
        self.calls("build", ranks, dtype, self.engines, nodes)

    def calls(self, method: str, *arguments: Any) -> list[Any]:
        return _each(self.active, method, *arguments)

    def engine_calls(self, method: str, *arguments: Any) -> list[Any]:
        return _each(self.engines, method, *arguments)

    def check(self) -> None:
        sent = self.calls("parameters")[0]
        for received in self.engine_calls("parameters"):
            for got, wanted in zip(received, sent, strict=True):
                np.testing.assert_array_equal(got, wanted)


def _each(actors: list[Any], method: str, *arguments: Any) -> list[Any]:
    found: list[Any] = ray.get([getattr(actor, method).remote(*arguments) for actor in actors], timeout=TIMEOUT_S)
    return found


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as folder:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        start_ray(
            num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20, _temp_dir=folder
        )
        yield Setting(f"{folder}/group")
        ray.shutdown()


@pytest.mark.parametrize("ranks, dtype", [(1, torch.float32), (1, torch.bfloat16), (2, torch.float32)])
def test_engines_have_the_trainers_weights(setting: Setting, ranks: int, dtype: torch.dtype) -> None:
    setting.build(ranks, dtype)
    for by in (0.5, 0.25):
        setting.calls("step", by)
        setting.calls("send")
        setting.check()
        for calls in setting.engine_calls("take_calls"):
            assert (calls[0], calls[-1]) == ("start", "finish")
            assert 8 < calls.count("update") == len(calls) - 2 < 26  # the model has 28 parameters


def test_a_rank_waits_on_its_cpu_until_the_engines_have_taken_a_bucket(setting: Setting) -> None:
    """In a gather it would wait on a GPU. All ranks wait before the gathers of each bucket."""
    setting.build(2, torch.float32)
    setting.calls("take_log")
    setting.calls("send")
    buckets = setting.engine_calls("take_calls")[0].count("update")
    first, second = setting.calls("take_log")
    assert first == second and first[0] == "wait" and first.count("wait") == buckets
    assert all(again == "gather" for one, again in itertools.pairwise(first) if one == "wait")


def test_whole_parameters_move_into_shared_memory_once(setting: Setting) -> None:
    setting.build(1, torch.float32)
    before = setting.calls("places")[0]
    setting.calls("send")
    shared = setting.calls("places")[0]
    setting.calls("send")
    assert not set(before) & set(shared)
    assert setting.calls("places")[0] == shared


def test_an_engines_error_reaches_the_trainer(setting: Setting) -> None:
    setting.build(1, torch.float32)
    ray.get(setting.engines[0].refuse.remote(), timeout=TIMEOUT_S)
    with pytest.raises(UserError, match="no such weights here"):
        setting.calls("send")


def test_each_engine_has_different_ranks(setting: Setting) -> None:
    """vLLM passes the rank of the first engine's first worker."""
    nodes = [ray.get_runtime_context().get_node_id()] * 2
    names = [ActorLabel("first", "engine"), ActorLabel("second", "engine")]
    engines = EngineActors(setting.engines, names, nodes, TIMEOUT_S, workers_each=3)
    engines.init_weight_transfer_engine({"rank_offset": 1, "master_port": 5})
    assert setting.engine_calls("init_info") == [
        {"rank_offset": 1, "master_port": 5},
        {"rank_offset": 4, "master_port": 5},
    ]
    engines.init_weight_transfer_engine({})
    assert setting.engine_calls("init_info") == [{}, {}]


def test_a_dead_engine_is_left_out(setting: Setting) -> None:
    """Has to be the last test that uses these engines."""
    setting.build(1, torch.float32)
    os.kill(ray.get(setting.engines[1].pid.remote(), timeout=TIMEOUT_S), signal.SIGKILL)
    setting.engines.pop()
    for by in (0.5, 0.25):
        setting.calls("step", by)
        setting.calls("send")
        setting.check()
