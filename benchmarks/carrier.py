"""A step's experience carried by Ray's calls and by TransferQueue: `python -m benchmarks.carrier`.

512 responses of 1k and of 4k tokens with prompts of 256, on two ranks without a model. A step is what the loop of
GRPO with a KL term in the loss does with the carrier: responses are held, each rank computes the log-probabilities of
policy and reference (here it copies given numbers), and each rank receives advantages, weights and both
log-probabilities for an update. At the end the carrier forgets the step. With `2 pools`, the ranks of a second pool
hold the responses, too, and compute the reference's log-probabilities. With `2 shuffled passes`, responses are held
again for each of two updates, as with actor.shuffle.

Bytes through the driver: of all arguments and results of calls, pickled, and of the arrays that the driver stores.
These numbers are exact, and the same on every machine. The bytes between nodes are not measured: there is one node.
Both carriers have to bring the same bytes to the ranks, which a checksum compares.
"""

from __future__ import annotations

import argparse
import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import in_turns, median, median_ratio, publish, seconds, table

RESPONSES, PROMPT, RANKS, MICRO_TOKENS = 512, 256, 2, 16_384
TIMEOUT_S = 600
MB = 1e6


class Rank:
    """A rank without a model."""

    def hold(self, parcel: Any) -> int:
        shard = parcel.open()
        self.sampled = int(shard.response_lengths.sum())
        return zlib.crc32(shard.tokens)

    def column(self, sink: Any) -> Any:
        import numpy as np

        return sink.send(np.arange(self.sampled, dtype=np.float32))

    def update(self, parcel: Any) -> int:
        columns = parcel.open()
        found = 0
        for name in sorted(columns):
            found = zlib.crc32(columns[name], found)
        return found


class Step:
    """The calls of one step.

    Args:
        pools: the ranks of each pool.
        passes: number of shuffled passes; 0 for one pass over the responses as they are.
    """

    def __init__(self, carrier: Any, pools: Sequence[Sequence[Any]], tokens: int, passes: int) -> None:
        import numpy as np
        import torch
        from tensordict import TensorDict

        from hpc_rl.rl.loop.assignment import assign_responses, shuffled
        from hpc_rl.rl.loop.experience import jagged

        self.carrier, self.pools = carrier, pools
        draw = np.random.default_rng(0)
        lengths = draw.integers(tokens // 2, tokens * 3 // 2, RESPONSES)
        self.lengths = torch.from_numpy(lengths)
        prompts = torch.full((RESPONSES,), PROMPT)

        def ids(sizes: Any) -> Any:
            return jagged(torch.from_numpy(draw.integers(0, 1 << 17, int(sizes.sum()), np.int32)), sizes)

        rows = {"prompt_ids": ids(prompts), "response_ids": ids(self.lengths)}
        self.experience = TensorDict(rows, batch_size=[RESPONSES])
        flat = torch.from_numpy(draw.standard_normal(int(lengths.sum()), np.float32))
        self.own = {name: jagged(flat, self.lengths) for name in ("advantages", "weights")}
        self.assignment = assign_responses(lengths + PROMPT, lengths, None, RANKS, MICRO_TOKENS)
        self.passes = [
            assign_responses(
                lengths + PROMPT, lengths, RESPONSES // 4, RANKS, MICRO_TOKENS, shuffled(RESPONSES, 0, 0, epoch)
            )
            for epoch in range(passes)
        ]
        self.bytes = 0
        self.counts = False

    def run(self) -> list[int]:
        """Return the checksums of the ranks."""
        shards = self.carrier.shards(self.experience, self.assignment)
        found = [checksum for pool in self.pools for checksum in self.call(pool, "hold", shards)]
        columns: dict[str, Any] = dict(self.own)
        for name, pool in (("old_logprobs", self.pools[0]), ("ref_logprobs", self.pools[-1])):
            columns[name] = self.computed(pool)
        for assignment in self.passes or [self.assignment]:
            if self.passes:
                found += self.call(self.pools[0], "hold", self.carrier.shards(self.experience, assignment))
            found += self.call(self.pools[0], "update", self.carrier.columns(assignment, columns))
        self.carrier.clear()
        return found

    def computed(self, pool: Sequence[Any]) -> Any:
        import torch

        from hpc_rl.rl.carriers.base import DirectSink
        from hpc_rl.rl.loop.experience import jagged

        kept = self.carrier.kept(self.assignment, self.lengths)
        if kept is not None:
            self.call(pool, "column", kept[0])
            return kept[1]
        parts = self.call(pool, "column", [DirectSink()] * RANKS)
        return jagged(torch.from_numpy(self.assignment.join(parts)), self.lengths)

    def call(self, pool: Sequence[Any], method: str, arguments: Sequence[Any]) -> list[Any]:
        import ray

        calls = [getattr(rank, method).remote(argument) for rank, argument in zip(pool, arguments, strict=True)]
        results: list[Any] = ray.get(calls, timeout=TIMEOUT_S)
        if self.counts:
            self.bytes += sum(len(pickle.dumps(each)) for each in (*arguments, *results))
        return results

    def count(self) -> int:
        """Return the bytes through the driver of one step."""
        client = getattr(self.carrier, "_client", None)
        self.counts, self.bytes = True, 0
        if client is not None:
            put = client.put

            def counted(partition: str, order: Any, lengths: Any, fields: Mapping[str, Any]) -> None:
                self.bytes += sum(flat.nbytes for flat in fields.values())
                put(partition, order, lengths, fields)

            client.put = counted
        self.run()
        self.counts = False
        if client is not None:
            client.put = put
        return self.bytes


def rows_of(results: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            name,
            *(f"{size / MB:.1f}" for size in measured["bytes"].values()),
            f"{measured['bytes']['transfer_queue'] / measured['bytes']['ray']:.2f}",
            *(f"{median(times):.3f}" for times in measured["seconds"].values()),
            f"{median_ratio(measured['seconds']['transfer_queue'], measured['seconds']['ray']):.1f}",
        ]
        for name, measured in results.items()
    ]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    import ray

    from hpc_rl.rl.carriers.through_ray import RayCarrier
    from hpc_rl.rl.carriers.transfer_queue.carrier import TransferQueueCarrier

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    ray.init(
        include_dashboard=False,
        object_store_memory=1 << 30,
        log_to_driver=False,
        logging_level="warning",
        _node_ip_address="127.0.0.1",
    )
    ranks = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(2 * RANKS)]
    node = ray.get_runtime_context().get_node_id()
    carriers = {"ray": RayCarrier(), "transfer_queue": TransferQueueCarrier([node] * 2)}
    one, two = [ranks[:RANKS]], [ranks[:RANKS], ranks[RANKS:]]
    cases: dict[str, tuple[list[list[Any]], int]] = {
        "1 pool": (one, 0),
        "2 pools": (two, 0),
        "1 pool, 2 shuffled passes": (one, 2),
    }
    results: dict[str, Any] = {}
    for tokens in (1024, 4096):
        for name, (pools, passes) in cases.items():
            steps = {carrier: Step(made, pools, tokens, passes) for carrier, made in carriers.items()}
            first, second = (step.run() for step in steps.values())  # imports and connections, once per run
            assert first == second, "the carriers brought other bytes"
            sizes = {carrier: step.count() for carrier, step in steps.items()}
            timed: dict[str, Callable[[], float]] = {
                carrier: lambda step=step: seconds(step.run) for carrier, step in steps.items()
            }
            measured = in_turns(timed, arguments.repeats)
            results[f"{tokens:,} tokens, {name}"] = {"bytes": sizes, "seconds": measured}
    carriers["transfer_queue"].close()
    ray.shutdown()
    headers = ["", "Ray, MB", "TransferQueue, MB", "ratio", "Ray, s", "TransferQueue, s", "ratio"]
    publish("carrier", table(headers, rows_of(results)), results, ["torch", "ray", "TransferQueue", "pyzmq"])


if __name__ == "__main__":
    main()
