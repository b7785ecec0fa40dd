"""Run directories as runs leave them, made in a moment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rl.formats.usage import Gpu, UsageSample, append_line, sample_line, usage_file
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.page.charts import plots_of_run
from hpc_rl.tracking.recorded import read_run

BEGAN = 1_700_000_000.0
HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script></title></style>{{ 1 + 1 }} \u202e\x00\ud800'
PPO = {
    "critic/score/mean": 0.2,
    "val/score": 0.3,
    "actor/entropy": 1.1,
    "actor/ppo_kl": 0.01,
    "actor/kl_loss": 0.02,
    "response_length/mean": 100.0,
    "actor/grad_norm": 0.5,
    "critic/vf_explained_var": 0.4,
    "perf/tokens_per_s": 9e4,
    "perf/max_memory_gb": 61.0,
    "timing_s/step": 5.0,
    "timing_s/gen": 3.0,
    "timing_s/update_actor": 1.5,
}
SFT = {
    "train/loss": 1.2,
    "val/loss": 1.3,
    "train/grad_norm": 0.5,
    "train/lr": 0.0,
    "perf/tokens_per_s": 9e4,
    "perf/throughput": 4.5e4,
    "perf/mfu": 0.2,
    "perf/time_per_step": 2.0,
    "perf/max_memory_gb": 40.0,
    "timing_s/step": 2.0,
    "timing_s/forward_backward": 1.9,
}

SPANS = {
    "gen": [[0.0, 8.0], [14.0, 20.0]],
    "reward": [[2.0, 9.0]],
    "old_log_prob": [[4.0, 5.0], [8.0, 10.0]],
    "values": [[10.0, 11.5]],
    "adv": [[11.5, 11.51]],
    "update_critic": [[11.6, 13.0]],
    "update_actor": [[13.0, 18.0]],
    "update_weights": [[18.0, 20.0]],
}
"""A step of 20 seconds. Engines already generate the next one when the policy is updated."""


def make_run(
    folder: Path,
    name: str = "ppo-1",
    steps: int = 20,
    total: int = 20,
    metrics: Mapping[str, float] = PPO,
    attempts: int = 1,
    nodes: int = 2,
    exit_code: int | None = 0,
    config: str = "trainer:\n  nnodes: 2\nactor:\n  optim: {lr: 1.0e-06}\n",
    text: str = "4",
) -> RunDir:
    """A run of `attempts` hours, each of which stopped but for the last, which ended with `exit_code`."""
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    run.config.write_text(config)
    with run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            at = {"step": step, "total_steps": total, "time": BEGAN + 4000 * attempts * step / total}
            wave = 1 + 0.1 * math.sin(step) + step / total
            file.write(json.dumps(at | {key: value * wave for key, value in metrics.items()}) + "\n")
    with run.samples.open("w") as file:
        for step in (0, total // 2, total):
            for prompt in ("2 + 2?", text):
                row = {"step": step, "prompt": prompt, "response": f"{text} at {step}", "answer": "4", "score": 0.5}
                file.write(json.dumps(row) + "\n")
    if steps and "timing_s/gen" in metrics:
        run.timeline.write_text(json.dumps({"step": steps, "seconds": 20.0, "phases": SPANS}) + "\n")
    for number in range(1, attempts + 1):
        attempt = run.path / f"attempt-{number}"
        attempt.mkdir()
        began = BEGAN + 4000 * (number - 1)
        for rank in range(nodes):
            last = number == attempts
            write_usage(attempt, rank, began, exit_code if last else 75)
    return run


def write_usage(attempt: Path, rank: int, began: float, exit_code: int | None, **first: Any) -> None:
    path = usage_file(attempt, rank)
    who = {"time": began, "node": f"gpu0{rank}", "job_id": "7", "cpus": 32, "memory_gb": 256.0}
    append_line(path, who | first)
    for minute in range(1, 61):
        gpus = tuple(Gpu(0.9, 60.0 + gpu, 85.9) for gpu in range(2))
        append_line(path, sample_line(UsageSample(began + 60 * minute, 12.0 + rank, 100.0 + minute, gpus)))
    if exit_code is not None:
        append_line(path, {"time": began + 3600, "exit_code": exit_code})


def plot_titles(folder: Path) -> set[str]:
    """Return the titles of the plots in the report of a run."""
    return {figure.title for group in plots_of_run(read_run(RunDir(folder))) for figure in group.figures}
