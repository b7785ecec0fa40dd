"""Operators that a GPU executes, and waits of the host, per micro-batch: `python -m benchmarks.launches`.

A GPU that is faster than Python waits for the next kernel, so that the number of kernels is the time of a micro-batch.
The step is the trainer's and the workers' own, with the shape of Qwen3-0.6B, on simulated GPUs (tests/simulated_gpu):
every operator that torch dispatches to the GPU counts once. Some start several kernels, so that the number is a lower
bound. A micro-batch is half of the difference between steps with three and with one. All layers are alike, so that
models with two and with three of them give the count of any number. Layers are not compiled: what Inductor makes of
them cannot be counted without a GPU.

It needs the packages of the tests and a C++ compiler, but no GPU and no data.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks.common import publish, table
from tests.simulated_gpu.process import simulate
from tests.simulated_gpu.scenarios import Job, Phase, rl_step, sft_step
from tests.simulated_gpu.shapes import Shape, sizes

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Count:
    """What one micro-batch costs, and a whole optimizer step."""

    operators: int
    collectives: int
    waits: int
    """Times that the host reads a value of a tensor."""
    operators_of_a_step: int
    """Of a step with one micro-batch."""
    waits_of_a_step: int


def jobs(shape: Shape) -> dict[str, tuple[Callable[[Job], dict[str, Phase]], str, Job]]:
    """Return what is counted: the scenario, its phase, and the job."""
    found: dict[str, tuple[Callable[[Job], dict[str, Phase]], str, Job]] = {}
    for ranks, division in [(1, "auto"), (1, "full"), (8, "full"), (8, "gradients"), (8, "none")]:
        options = ("model.enable_gradient_checkpointing=false", f"trainer.sharding={division}")
        job = partial(Job, shape, ranks=ranks, gpus_per_node=min(ranks, GPUS_PER_NODE))
        where = f"{ranks} GPU{'s' if ranks > 1 else ''}, {division}"
        sft, grpo = partial(job, micro_tokens=8192, options=options), (*options, "algorithm.advantage=grpo")
        found[f"sft, full rows, {where}"] = sft_step, "update", sft(length=8192)
        if (ranks, division) == (1, "auto"):
            found[f"sft, 64 samples, {where}"] = sft_step, "update", sft(length=128)
        if division in ("auto", "full"):
            found[f"grpo update, {where}"] = (
                rl_step,
                "update actor",
                job(micro_tokens=16384, length=1024, options=(*grpo, "rollout.n=2")),
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of two layers; only print")
    arguments = parser.parse_args()
    results = {name: asdict(count(*what)) for name, what in jobs("tiny" if arguments.tiny else "Qwen3-0.6B").items()}
    text = table(["", *HEADERS.values()], rows(results))
    if arguments.tiny:
        print(text)
    else:
        publish("launches", text, results, ["torch", "transformers"])


HEADERS = {
    "operators": "operators per micro-batch",
    "collectives": "collectives",
    "waits": "waits",
    "operators_of_a_step": "operators of a step with one micro-batch",
    "waits_of_a_step": "waits of a step",
}


def rows(results: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    return [[name, *(f"{found[key]:,}" for key in HEADERS)] for name, found in results.items()]


def count(scenario: Callable[[Job], dict[str, Phase]], phase: str, job: Job) -> Count:
    """Count a step with one and with three micro-batches."""
    one, three = (_of_step(scenario, phase, replace(job, micro_batches=number)) for number in (1, 3))
    operators, collectives, waits = ((more - few) // 2 for few, more in zip(one, three, strict=True))
    return Count(operators, collectives, waits, one[0], one[2])


def _of_step(scenario: Callable[[Job], dict[str, Phase]], phase: str, job: Job) -> list[int]:
    """Return the operators, the collectives and the waits of a step."""
    two, three = (simulate(scenario, replace(job, layers=layers))[phase] for layers in (2, 3))
    counters = (
        [sum(counter.values()) for counter in (found.launches, found.calls, found.waits)] for found in (two, three)
    )
    more = sizes(job.shape)["num_hidden_layers"] - 2
    return [few + more * (many - few) for few, many in zip(*counters, strict=True)]


if __name__ == "__main__":
    main()
