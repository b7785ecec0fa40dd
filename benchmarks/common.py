"""Shared by all benchmarks: the table, the results file, and measurements in turns."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def in_turns(variants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure every variant once, then all of them again, so that other load on the machine affects all alike.

    Each variant returns its own measurement, so that it can exclude its preparation.
    """
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name, run in variants.items():
            measured[name].append(run())
            print(f"# {repeat + 1}/{repeats} {name}: {measured[name][-1]:.4g}", file=sys.stderr, flush=True)
    return measured


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pin(process: int, core: int) -> None:
    """Keep all threads of a process, and those that they start, on one core."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios within each repeat, which temporary load on the machine does not change."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; every column but the first is aligned right."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headers, rule, *rows])


def publish(
    name: str, text: str, results: Mapping[str, Any], packages: Sequence[str], more: Mapping[str, Any] | None = None
) -> None:
    """Print the table and write results/NAME.json with machine, versions and command.

    Args:
        more: further entries of the file.
    """
    versions = {"python": platform.python_version(), **{package: version(package) for package in packages}}
    document = {
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions,
        "results": results,
        **(more or {}),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    print(text)
    print(f"\n{document['machine']}; " + ", ".join(f"{k} {v}" for k, v in versions.items()), flush=True)


def machine() -> str:
    """Describe cores, processor, memory and, if there is one, the GPU."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f"; {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores, {platform.machine()} ({model}), {memory:.0f} GiB{gpu}"
