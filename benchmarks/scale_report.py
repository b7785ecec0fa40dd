"""The report of a run with 1,000,000 steps: `python -m benchmarks.scale_report`.

metrics.jsonl has a line with the metrics of supervised fine-tuning for each step. The command is measured as a user
types it, with the start of Python: wall time, processor time, its largest resident size, and the size of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import publish, table

STEPS, TIMEOUT_S = 1_000_000, 3600
MEASURED = """
import resource, runpy, sys, time
sys.argv[0] = "hpc-rl"
try:
    runpy.run_module("hpc_rl.cli", run_name="__main__", alter_sys=True)
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""
"""The command, and after it a line with its processor seconds and its largest resident size in bytes."""


def write_metrics(path: Path, steps: int) -> None:
    """Write the metrics of so many steps, with a validation after each thousandth of them."""
    draw = random.Random(0)
    every = max(1, steps // 1000)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            record: dict[str, float] = {"step": step, "total_steps": steps, "time": 1.7e9 + step}
            loss = 1 + 2 * math.exp(-step / steps * 5) + 0.1 * draw.random()
            record |= {"train/loss": loss, "train/lr": 1e-5, "train/grad_norm": 1 + draw.random(), "train/epoch": 1.5}
            record |= {
                "perf/tokens_per_s": 9e4 + draw.random(),
                "perf/throughput": 1e4,
                "perf/mfu": 0.4 + draw.random() / 100,
            }
            record |= {"perf/max_memory_gb": 61.5, "perf/eta_s": float(steps - step), "perf/time_per_step": 0.5}
            record |= {"timing_s/data": 0.01 * draw.random(), "timing_s/update": 0.4, "timing_s/step": 0.5}
            if step % every == 0:
                record["val/loss"] = loss + 0.1
            file.write(json.dumps(record) + "\n")


def measure(folder: Path, steps: int) -> dict[str, float]:
    """Return seconds and bytes."""
    run = folder / "runs" / "long"
    (run / "attempt-1").mkdir(parents=True)
    (run / "config.yaml").write_text("trainer: {}\n")
    status = {"job_id": "local-1", "attempt": 1, "state": "COMPLETED", "exit_code": 0}
    (run / "status.json").write_text(json.dumps(status))
    write_metrics(run / "metrics.jsonl", steps)
    argv = [sys.executable, "-c", MEASURED, "report", "long"]
    began = time.monotonic()
    ended = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    wall_s = time.monotonic() - began
    if ended.returncode:
        raise SystemExit(f"hpc-rl report: {ended.stdout}{ended.stderr}")
    processor_s, memory = ended.stdout.splitlines()[-1].split()
    return {
        "wall_s": wall_s,
        "processor_s": float(processor_s),
        "memory_bytes": float(memory),
        "metrics_bytes": (run / "metrics.jsonl").stat().st_size,
        "page_bytes": (run / "report.html").stat().st_size,
    }


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            f"{int(steps):,} steps",
            f"{found['metrics_bytes'] / 1e6:.0f}",
            f"{found['wall_s']:.1f}",
            f"{found['processor_s']:.1f}",
            f"{found['memory_bytes'] / 1e9:.2f}",
            f"{found['page_bytes'] / 1e6:.2f}",
        ]
        for steps, found in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 100_000, STEPS])
    options = parser.parse_args()
    results = {}
    for steps in options.steps:
        with tempfile.TemporaryDirectory() as folder:
            results[str(steps)] = measure(Path(folder), steps)
    headers = ["", "metrics.jsonl, MB", "s", "processor s", "memory, GB", "page, MB"]
    publish("scale_report", table(headers, rows_of(results)), results, [])


if __name__ == "__main__":
    main()
