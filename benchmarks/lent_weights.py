"""Weights for engines that come and go, on CPUs: `python -m benchmarks.lent_weights`.

0.25 GB in buckets of 64 MB for 1, 2 and 4 engines. The rank and each engine are Ray actors with one thread on this
machine. Variants:

- object store: `hpc_rl.rl.weights.published`, as lent engines get weights. The rank puts each bucket, and each engine
  gets it and copies it into its parameters. There is no network: all of them share the memory of the store.
- group: a process group of torch.distributed (gloo, TCP over the loopback) with the rank and all engines. It is made
  anew, as if an engine had come or left: connect, broadcast each bucket, copy it into the parameters, and leave.
- group, kept: the broadcasts alone, in a group that nobody joins or leaves.

Of four engines, one "dies" (SIGKILL) or "stops" (SIGSTOP) after half of the buckets. The number is the time until the
other three have all weights; for the group, until all others have an error, with a time limit of 20 s (torch's default
is 30 minutes). NCCL was not measured: it needs GPUs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from benchmarks.common import in_turns, median, median_ratio, publish, table

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

TENSORS, ROWS, COLUMNS = 15, 2048, 2048
"""15 matrices of 16.8 MB."""
BUCKET_BYTES = 64 * 10**6
ENGINES = (1, 2, 4)
LIMIT_S, TIMEOUT_S = 20.0, 300.0
STORE, GROUP, KEPT = "object store", "group", "group, kept"


class Member:
    """The rank or an engine, in an actor."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        shape = (ROWS, COLUMNS)
        self.model = torch.nn.ParameterDict({f"w{i}": torch.nn.Parameter(torch.zeros(shape)) for i in range(TENSORS)})

    def pid(self) -> int:
        return os.getpid()

    def load_weights(self, weights: Any) -> None:
        import torch

        with torch.no_grad():
            for name, tensor in weights:
                self.model[name].copy_(tensor)

    def change(self) -> None:
        import torch

        with torch.no_grad():
            for parameter in self.model.values():
                parameter.add_(1.0)

    def first(self) -> float:
        return min(float(parameter[-1, -1]) for parameter in self.model.values())

    def put(self) -> list[Any]:
        import torch

        from hpc_rl.rl.weights import published
        from hpc_rl.rl.weights.base import WeightSource
        from hpc_rl.training.parallel.distributed import World

        source = WeightSource(self.model, torch.float32)
        return published.publish(source, World(0, 1, torch.device("cpu")), BUCKET_BYTES)

    def get(self, buckets: Sequence[Any], ends_after: int = TENSORS, how: int = 0) -> None:
        """Take the weights, as EngineProcess.take_weights.

        Args:
            ends_after: buckets after which the process sends itself the signal `how`.
        """
        import ray

        from hpc_rl.rl.weights.base import BucketReceiver

        receiver = BucketReceiver(self)
        for index, bucket in enumerate(buckets):
            if index == ends_after:
                os.kill(os.getpid(), how)
            receiver.update_weights(ray.get(bucket))

    def join(self, port: int, rank: int, size: int, limit_s: float) -> None:
        import torch.distributed as dist

        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=limit_s)
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s))

    def broadcast(self, rank: int, ends_after: int = TENSORS, how: int = 0) -> str:
        """Send or receive all buckets; return the error, if there is one."""
        import torch
        import torch.distributed as dist

        from hpc_rl.rl.weights.base import WeightSource
        from hpc_rl.rl.weights.buckets import aligned, plan_buckets, used_bytes

        entries = WeightSource(self.model, torch.float32).metadata()
        for index, bucket in enumerate(plan_buckets(entries, BUCKET_BYTES)):
            if index == ends_after:
                os.kill(os.getpid(), how)
            memory = torch.empty(aligned(used_bytes(bucket)), dtype=torch.uint8)
            if rank == 0:
                for entry in bucket:
                    entry.view(memory).copy_(self.model[entry.name].detach())
            try:
                dist.broadcast(memory, 0)
            except RuntimeError as error:
                return str(error).splitlines()[0]
            if rank:
                self.load_weights((entry.name, entry.view(memory)) for entry in bucket)
        return ""

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Bench:
    """The rank and the engines."""

    def __init__(self) -> None:
        import ray

        self._kind = ray.remote(num_cpus=0)(Member)
        self.rank, *self.all = (self._kind.remote() for _ in range(max(ENGINES) + 1))
        self.engines = self.all

    def of(self, method: str, actors: Sequence[Any] | None = None, *arguments: Any) -> list[Any]:
        import ray

        chosen = [self.rank, *self.engines] if actors is None else actors
        return list(ray.get([getattr(actor, method).remote(*arguments) for actor in chosen], timeout=TIMEOUT_S))

    def store(self) -> float:
        start = time.perf_counter()
        (buckets,) = self.of("put", [self.rank])
        self.of("get", self.engines, buckets)
        return time.perf_counter() - start

    def connect(self, limit_s: float = TIMEOUT_S) -> None:
        import ray

        port, size = free_port(), len(self.engines) + 1
        members = enumerate([self.rank, *self.engines])
        ray.get([member.join.remote(port, rank, size, limit_s) for rank, member in members], timeout=TIMEOUT_S)

    def send(self) -> float:
        import ray

        start = time.perf_counter()
        members = enumerate([self.rank, *self.engines])
        errors = ray.get([member.broadcast.remote(rank) for rank, member in members], timeout=TIMEOUT_S)
        assert not any(errors), errors
        return time.perf_counter() - start

    def group(self) -> float:
        start = time.perf_counter()
        self.connect()
        self.send()
        self.of("leave")
        return time.perf_counter() - start

    def kept(self) -> float:
        self.connect()
        try:
            return self.send()
        finally:
            self.of("leave")

    def check(self, run: Callable[[], float]) -> None:
        """Raise AssertionError if an engine does not have the rank's weights afterwards."""
        self.of("change", [self.rank])
        run()
        values = self.of("first")
        assert min(values) == max(values), values

    def death_in_store(self, how: int) -> float:

        start = time.perf_counter()
        (buckets,) = self.of("put", [self.rank])
        dying, *others = self.engines
        dying.get.remote(buckets, len(buckets) // 2, how)
        self.of("get", others, buckets)
        seconds = time.perf_counter() - start
        self.replace(dying)
        return seconds

    def death_in_group(self, how: int) -> float:
        import ray

        (buckets,) = self.of("put", [self.rank])
        self.connect(LIMIT_S)
        start = time.perf_counter()
        dying, *others = self.engines
        dying.broadcast.remote(1, len(buckets) // 2, how)
        members = [(0, self.rank), *enumerate(others, 2)]
        errors = ray.get([member.broadcast.remote(rank) for rank, member in members], timeout=TIMEOUT_S)
        seconds = time.perf_counter() - start
        print(f"# {errors}", file=sys.stderr, flush=True)
        assert all(errors), errors
        self.of("leave", [self.rank, *others])
        self.replace(dying)
        return seconds

    def replace(self, dying: Any) -> None:
        """Start another engine in the place of the first one."""
        import ray

        ray.kill(dying)
        self.engines = [self._kind.remote(), *self.engines[1:]]
        self.of("pid", self.engines)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def deaths(bench: Bench) -> dict[str, float]:
    found = {}
    for name, how in {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}.items():
        found[f"{STORE}, one {name}"] = bench.death_in_store(how)
        found[f"{GROUP}, one {name}"] = bench.death_in_group(how)
    return found


def rows_of(results: Any) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    for count, seconds in results["seconds"].items():
        for name, times in seconds.items():
            ratio = "" if name == STORE else f"{median_ratio(times, seconds[STORE]):.2f}"
            rows.append([f"{count} engine{'s' * (count != '1')}, {name}", f"{median(times):.2f}", ratio])
    return [*rows, *([f"4 engines, {name}", f"{s:.2f}", ""] for name, s in results["death"].items())]


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="ray")
    ray.init(
        "local",
        _temp_dir=folder,
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=1300 * 10**6,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level="warning",
    )
    results: dict[str, Any] = {"bytes": TENSORS * ROWS * COLUMNS * 4, "seconds": {}}
    bench = Bench()
    variants = {STORE: bench.store, GROUP: bench.group, KEPT: bench.kept}
    for run in variants.values():  # page faults, once per training run
        bench.check(run)
    for count in ENGINES:
        bench.engines = bench.all[:count]
        results["seconds"][str(count)] = in_turns(variants, options.repeats)
    results["death"] = deaths(bench)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    headers = ["", "seconds", "relative to the object store"]
    publish("lent_weights", table(headers, rows_of(results)), results, ["torch", "ray"])


if __name__ == "__main__":
    main()
