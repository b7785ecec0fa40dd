"""docs/benchmarks.md and docs/scale.md: the numbers of each table follow from benchmarks/results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    async_rl,
    carrier,
    driver,
    generate,
    gpu_jobs,
    lenders,
    lent_nodes,
    lent_weights,
    ray_up,
    rollout,
    rollout_simulation,
    scale_meeting,
    sft_gpu,
)
from benchmarks.common import median, median_ratio
from benchmarks.rollout_simulation import Outcome

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("benchmarks", "scale")}
TOKENS = 2048
"""Generated tokens of a step of benchmarks/ppo.py: 32 responses of 64 tokens."""


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]


def fine_tuning() -> Iterator[str]:
    for name in ("sft_4096", "sft_151936"):
        for measured in result(name).values():
            for who, speeds in measured.items():
                ratio = "" if who == "hpc-rl" else f"{median_ratio(measured['hpc-rl'], speeds):.2f}"
                yield f"| {who} | {median(speeds):,.0f} | {ratio} |"


def preferences() -> Iterator[str]:
    for name in ("preferences_4096", "preferences_151936"):
        for measured in result(name).values():
            for who, speeds in measured.items():
                ratio = "" if who == "hpc-rl" else f"{median_ratio(measured['hpc-rl'], speeds):.2f}"
                yield f"| {who} | {median(speeds):,.2f} | {ratio} |"


def ranks() -> Iterator[str]:
    measured = result("scaling")
    for name, speeds in measured.items():
        yield f"| {name} | {median(speeds):,.0f} | {median_ratio(speeds, measured['1 rank']):.2f} |"


def reinforcement_learning() -> Iterator[str]:
    found = result("ppo")
    trl = {"grpo": "TRL 1.16.0", "ppo": f"TRL {found['trl of ppo']}"}
    for algorithm, title in trl.items():
        seconds = {who: [turn["processor_s"] for turn in turns] for who, turns in found[algorithm].items()}
        for who, own in seconds.items():
            name = f"{algorithm.upper()}, {title if who == 'TRL' else who}"
            ratio = "" if who == "hpc-rl" else f"{median_ratio(own, seconds['hpc-rl']):.2f}"
            yield f"| {name} | {median(own) / TOKENS * 1000:.2f} | {ratio} |"


def weight_sync() -> Iterator[str]:
    titles = {"copy": "plain copy", "sync": "one training rank", "sync, gathered": "gathered"}
    titles |= {"sync, other node": "other node", "object store": "one `ray.put` per bucket"}
    measured = result("weight_sync")["seconds"]
    for name, title in titles.items():
        ratio = "" if name == "copy" else f"{median_ratio(measured['copy'], measured[name]):.0%}".replace("%", " %")
        yield f"| {title} | {median(measured[name]):.3f} | {ratio} |"


def weights_of_lent_engines() -> Iterator[str]:
    yield from map(line, lent_weights.rows_of(result("lent_weights")))


def generation_on_lent_nodes() -> Iterator[str]:
    for engine in ("hf", "vllm"):
        yield from (line([engine, *row]) for row in lent_nodes.rows_of(result(f"lent_nodes_{engine}")))


def start_of_ray() -> Iterator[str]:
    yield from map(line, ray_up.rows_of(result("ray_up")))


def adapters() -> Iterator[str]:
    measured = result("lora")
    speeds = measured["tokens per second"]
    for who, own in speeds.items():
        ratio = "" if who == "hpc-rl" else f"{median_ratio(speeds['hpc-rl'], own):.2f}"
        yield f"| {who} | {median(own):,.0f} | {ratio} |"
    for who, size in measured["bytes of a checkpoint"].items():
        yield f"| {who} | {size / 1e6:.1f} |"


def generation() -> Iterator[str]:
    yield from map(line, generate.rows_of(result("generate")["responses_per_s"]))


def line(row: list[str]) -> str:
    return "| " + " | ".join(row) + " |"


def engines() -> Iterator[str]:
    for engine in ("hf", "vllm"):
        for n, measured in result(f"rollout_{engine}").items():
            yield from map(line, rollout.rows_of(int(n), measured))


def asynchronous() -> Iterator[str]:
    yield from map(line, async_rl.rows_of(result("async_rl")["runs"]))


def carriers() -> Iterator[str]:
    yield from map(line, carrier.rows_of(result("carrier")))


def simulation() -> Iterator[str]:
    for count, outcomes in result("rollout_simulation").items():
        found = {name: Outcome(**outcome) for name, outcome in outcomes.items()}
        yield from map(line, rollout_simulation.rows_of(int(count), found))


def jobs_on_a_gpu() -> Iterator[str]:
    results = {}
    for name, found in result("gpu_jobs").items():
        job, device = name.split(", ")
        results[job, device] = gpu_jobs.Result(**found)
    for job, device in results:
        if device == "cuda":
            yield line([job, *gpu_jobs.row(job, results)])


def fine_tuning_on_a_gpu() -> Iterator[str]:
    for file in ("sft_gpu_h200", "sft_gpu"):
        yield from map(line, sft_gpu.rows({name: row for name, row in result(file).items() if name != "devices"}))


TABLES = (
    fine_tuning,
    preferences,
    ranks,
    reinforcement_learning,
    weight_sync,
    weights_of_lent_engines,
    generation_on_lent_nodes,
    start_of_ray,
    adapters,
    generation,
    engines,
    asynchronous,
    carriers,
    simulation,
    jobs_on_a_gpu,
    fine_tuning_on_a_gpu,
)


SCALE = {
    "scale_meeting": scale_meeting.rows_of,
    "scale_ray_up": ray_up.rows_of,
    "driver": driver.rows_of,
    "lenders": lenders.rows_of,
}
"""Results of `make bench-scale`, and what makes the rows of their tables."""


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_a_table_has_the_numbers_of_the_measurements(table: Any) -> None:
    rows = list(table())
    assert rows and [row for row in rows if row not in PAGES["benchmarks"]] == []


@pytest.mark.parametrize("name", SCALE)
def test_a_table_of_scale_has_the_numbers_of_the_measurements(name: str) -> None:
    rows = [*map(line, SCALE[name](result(name)))]
    assert rows and [row for row in rows if row not in PAGES["scale"]] == []
