"""New weights for an engine in another process, compared with a plain copy: `python -m benchmarks.weight_sync`.

100M parameters, float32, one thread per process. Both processes are Ray actors; the engine's has the parameters of the
`hf` engine. Variants:

- copy: into tensors in the same process, parameter by parameter.
- sync: HostSender as in training on one rank, whose parameters are in shared memory.
- sync, gathered: as in training on several ranks, without the time for gathering: a bucket is written, then read.
- sync, other node: the path of buckets to engines on other nodes, Ray's object store (here without a network).
- object store: one ray.put and one call per bucket, without any of the above.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from benchmarks.common import in_turns, median, median_ratio, publish, table

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

if TYPE_CHECKING:
    import torch

HIDDEN, LAYERS, VOCABULARY = 768, 12, 20_000
TIMEOUT_S = 300


def make_model() -> torch.nn.Module:
    """Make a model of Llama's shapes with 100M parameters and tied embeddings."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        tie_word_embeddings=True,
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


class Engine:
    """An hf engine in an actor."""

    def __init__(self) -> None:
        from hpc_rl.rl.rollout.hf.engine import HfEngine
        from hpc_rl.rl.weights.base import BucketReceiver

        self.model = make_model()
        self.engine = HfEngine(self.model, eos_token_ids=[0])
        self.receiver = BucketReceiver(self.engine)

    def start_weight_update(self) -> None:
        self.receiver.start_weight_update()

    def update_weights(self, update: Any) -> None:
        self.receiver.update_weights(update)

    def finish_weight_update(self) -> None:
        self.receiver.finish_weight_update()

    def load(self, names: list[str], arrays: list[Any]) -> None:
        import torch

        self.engine.load_weights(zip(names, map(torch.from_numpy, arrays), strict=True))

    def checksum(self) -> float:
        return sum(parameter.double().sum().item() for parameter in self.model.parameters())


class Trainer:
    """A single training rank in an actor."""

    def __init__(self, engine: Any, node: str, bucket_mb: int) -> None:
        import torch

        from hpc_rl.rl.actors.deaths import ActorLabel
        from hpc_rl.rl.weights.base import EngineActors, WeightSource
        from hpc_rl.rl.weights.host import HostSender
        from hpc_rl.training.parallel.distributed import World

        class Gathered(WeightSource):
            """Weights that behave as if they had just been gathered from several ranks."""

            def is_in_place(self) -> bool:
                return False

        self.engine, self.bucket_bytes = engine, bucket_mb * 10**6
        self.model = make_model()
        self.target = [torch.empty_like(parameter).copy_(parameter) for parameter in self.model.parameters()]
        world = World(0, 1, torch.device("cpu"))
        name = ActorLabel("engine", "engine")
        near, far = (EngineActors([engine], [name], [place], TIMEOUT_S) for place in (node, "elsewhere"))
        whole, gathered = WeightSource(self.model, torch.float32), Gathered(self.model, torch.float32)
        self.senders = {
            "sync": HostSender(whole, near, world, self.bucket_bytes),
            "sync, gathered": HostSender(gathered, near, world, self.bucket_bytes),
            "sync, other node": HostSender(gathered, far, world, self.bucket_bytes),
        }

    def copy(self) -> float:
        import torch

        start = time.perf_counter()
        with torch.no_grad():
            for target, parameter in zip(self.target, self.model.parameters(), strict=True):
                target.copy_(parameter)
        return time.perf_counter() - start

    def sync(self, variant: str) -> float:
        start = time.perf_counter()
        self.senders[variant].send_weights()
        return time.perf_counter() - start

    def object_store(self) -> float:
        import ray

        from hpc_rl.rl.weights.buckets import TensorEntry, plan_buckets
        from hpc_rl.rl.weights.host import IN_FLIGHT

        parameters = dict(self.model.named_parameters())
        entries = [TensorEntry(name, parameter.dtype, tuple(parameter.shape)) for name, parameter in parameters.items()]
        start = time.perf_counter()
        pending: list[Any] = []
        for bucket in plan_buckets(entries, self.bucket_bytes // IN_FLIGHT):
            if len(pending) == IN_FLIGHT:
                ray.get(pending.pop(0), timeout=TIMEOUT_S)
            names = [entry.name for entry in bucket]
            arrays = ray.put([parameters[name].detach().numpy() for name in names])
            pending.append(self.engine.load.remote(names, arrays))
        ray.get(pending, timeout=TIMEOUT_S)
        return time.perf_counter() - start

    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def change(self) -> float:
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.01)
        return sum(parameter.double().sum().item() for parameter in self.model.parameters())


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bucket-mb", type=int, default=256, help="rollout.sync_bucket_mb")
    arguments = parser.parse_args()
    ray.init(include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False, logging_level="warning")
    engine = ray.remote(num_cpus=0)(Engine).remote()
    node = ray.get_runtime_context().get_node_id()
    trainer = ray.remote(num_cpus=0)(Trainer).remote(engine, node, arguments.bucket_mb)

    def of(method: str, *own: Any) -> Any:
        return ray.get(getattr(trainer, method).remote(*own), timeout=TIMEOUT_S)

    variants = {
        "copy": lambda: of("copy"),
        "sync": lambda: of("sync", "sync"),
        "sync, gathered": lambda: of("sync", "sync, gathered"),
        "sync, other node": lambda: of("sync", "sync, other node"),
        "object store": lambda: of("object_store"),
    }
    first = {name: run() for name, run in variants.items()}  # page faults and connections, once per training run
    changed = of("change")
    of("sync", "sync")
    assert abs(ray.get(engine.checksum.remote(), timeout=TIMEOUT_S) - changed) < 1e-3 * abs(changed), "weights differ"
    nbytes = of("nbytes")
    measured = in_turns(variants, arguments.repeats)
    ray.shutdown()
    rows = [
        [
            name,
            f"{nbytes / median(times) / 1e9:.2f}",
            f"{median_ratio(measured['copy'], times):.0%}",
            f"{first[name]:.2f}",
        ]
        for name, times in measured.items()
    ]
    results = {
        "bytes": nbytes,
        "seconds": measured,
        "first": first,
        "rate against copy": {name: median_ratio(measured["copy"], times) for name, times in measured.items()},
    }
    headers = ["", "10^9 bytes/s", "against the copy", "first time, s"]
    publish("weight_sync", table(headers, rows), results, ["torch", "ray"])


if __name__ == "__main__":
    main()
