"""Asynchronous reinforcement learning on one trainer and one engine: `python -m benchmarks.async_rl`.

A model of 0.6M parameters learns sums from rewards, as in `make demo`: first from solutions of which 70 % forget to
carry the one, then with GRPO without a reference, 32 prompts with 8 responses per step. Trainer and engine (`hf`) are
processes with one thread and a core each; the driver may use both cores. The variants are rollout.staleness 0, 1 and 4.
4 is tried with PPO's ratio to the policy that sampled, which is clipped, with algorithm.tis_cap=2, which needs the old
log-probabilities of each batch, and with rollout.partial.

Runs are fresh processes and take turns: all variants with one seed, then with the next. Seconds of a step are the
median over those after the warm-up, without saving and validation. The limit is the speed-up that staleness could give:
a step without staleness relative to the longer one of its two parts, generation and the rest. The goal of 1.6 times is
for parts that take equally long, for which --sequences is chosen: fewer sequences at a time make generation slower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import in_turns, median, median_ratio, publish, table

ROOT = Path(__file__).parent.parent
BASE = "staleness 0"
VARIANTS: dict[str, tuple[str, ...]] = {
    BASE: (),
    "staleness 1": ("rollout.staleness=1",),
    "staleness 4": ("rollout.staleness=4",),
    "staleness 4, cap": ("rollout.staleness=4", "algorithm.tis_cap=2"),
    "staleness 4, partial": ("rollout.staleness=4", "rollout.partial=true"),
    "staleness 4, partial, cap": ("rollout.staleness=4", "algorithm.tis_cap=2", "rollout.partial=true"),
}
METRICS = (
    *("timing_s/gen", "perf/engine_idle_s", "rollout/staleness/mean", "rollout/staleness/max", "actor/ppo_kl"),
    *("actor/pg_clipfrac", "training/rollout_log_ratio", "training/is_weight/capped", "training/is_weight/ess"),
)
WARM_UP = 6
TIMEOUT_S = 3600
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}


def start(module: str, *arguments: str, log: Path) -> None:
    """Run a module to its end, in a process of its own."""
    with log.open("a") as out:
        command = [sys.executable, "-m", module, *arguments]
        ended = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, stdout=out, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        )
    if ended.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{end}\nbenchmarks.async_rl: {module} ended with exit code {ended.returncode}")


def prepare(folder: Path, steps: int) -> None:
    """Write the data and a model that has learned from them, and makes mistakes."""
    from hpc_rl.data import arithmetic
    from tests.demo import make_model

    make_model(folder / "start")
    arithmetic.generate(folder / "data", 8000, 80, seed=1, careless=0.7)
    options = [f"model.path={folder / 'start'}", *data_options(folder), "data.max_length=32", "optim.lr=1e-3"]
    options += ["data.train_batch_size=256", f"trainer.total_training_steps={steps}", "trainer.test_freq=0"]
    start("hpc_rl.finetune.train", "--run-dir", str(folder / "sft"), *options, log=folder / "sft.log")


def data_options(folder: Path) -> list[str]:
    files = [
        f"data.{split}_files={folder / 'data' / name}.jsonl" for split, name in (("train", "train"), ("val", "val"))
    ]
    return [*files, "trainer.device=cpu", "trainer.logger=[]"]


def run_options(folder: Path, seed: int, arguments: argparse.Namespace) -> list[str]:
    """Return the options that all variants share."""
    return [
        *data_options(folder),
        f"model.path={folder / 'sft' / 'model'}",
        *(
            "algorithm=grpo",
            "algorithm.kl.where=none",
            "reward.function=exact",
            f"actor.optim.lr={arguments.lr}",
            "actor.optim.lr_scheduler=linear",
        ),
        *("data.max_prompt_length=24", "data.max_response_length=6", "data.train_batch_size=32", "rollout.n=8"),
        *(f"rollout.max_num_seqs={arguments.sequences}", "rollout.name=hf"),
        *("pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout", "trainer.n_gpus_per_node=2"),
        *("trainer.val_before_train=true", "trainer.test_freq=0", "trainer.save_minutes=0", "trainer.export=false"),
        *(f"trainer.total_training_steps={arguments.steps}", f"trainer.seed={seed}"),
    ]


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return what each run of each variant measured, one run per seed."""
    from hpc_rl.tracking.metrics import read_metrics

    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}

    def step_s(name: str) -> float:
        seed = len(found[name]) + 1
        run = folder / f"{name.replace(' ', '-')}-{seed}"
        options = [*run_options(folder, seed, arguments), *VARIANTS[name]]
        start("benchmarks.async_rl_run", "early", str(run), *options, log=folder / "runs.log")
        found[name].append(summary(read_metrics(run / "metrics.jsonl")))
        return found[name][-1]["step_s"]

    in_turns({name: partial(step_s, name) for name in VARIANTS}, arguments.seeds)
    return found


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the medians of a run over its steps after the warm-up, and its scores at the start and at the end."""
    steps = [record for record in records if "perf/time_per_step" in record][WARM_UP:]
    found = {name: median([record[name] for record in steps]) for name in METRICS if name in steps[0]}
    found |= {"rollout/staleness/max": max(record.get("rollout/staleness/max", 0.0) for record in steps)}
    first, last = (record["val/score"] for record in records if "val/score" in record)
    step_s = median([record["perf/time_per_step"] for record in steps])
    return {**found, "step_s": step_s, "first score": first, "val/score": last}


def limits(base: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the speed-up of a perfect overlap, of each run without staleness."""
    parts = [(run["timing_s/gen"], run["step_s"] - run["timing_s/gen"]) for run in base]
    return [sum(both) / max(both) for both in parts]


def rows_of(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[str]]:
    base = [run["step_s"] for run in found[BASE]]

    def of(runs: Sequence[Mapping[str, float]], name: str) -> list[float]:
        return [run.get(name, 0.0) for run in runs]

    return [
        [
            name,
            f"{median([1 / run['step_s'] for run in runs]):.2f}",
            f"{median_ratio(base, of(runs, 'step_s')):.2f}",
            f"{median(of(runs, 'timing_s/gen')):.2f}",
            f"{median(of(runs, 'perf/engine_idle_s')):.2f}",
            f"{median(of(runs, 'rollout/staleness/mean')):.1f}",
            f"{max(of(runs, 'rollout/staleness/max')):.0f}",
            f"{median(of(runs, 'actor/ppo_kl')):.3f}",
            f"{mean(of(runs, 'first score')):.3f}",
            f"{mean(of(runs, 'val/score')):.3f}",
            ", ".join(f"{score:.3f}" for score in of(runs, "val/score")),
        ]
        for name, runs in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--lr", type=float, default=1e-4, help="actor.optim.lr at the first step")
    parser.add_argument("--sft-steps", type=int, default=300, help="before the runs")
    parser.add_argument("--sequences", type=int, default=20, help="rollout.max_num_seqs")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP} steps are the warm-up; ask for more")
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), arguments.sft_steps)
        found = measure(Path(name), arguments)
    headers = ["", "steps/s", "speed-up", "trainer waits, s", "engine idle, s", "staleness", "max"]
    headers += ["KL", "score at the start", "at the end", "by seed"]
    generation = [run["timing_s/gen"] for run in found[BASE]]
    rest = [run["step_s"] - run["timing_s/gen"] for run in found[BASE]]
    text = table(headers, rows_of(found))
    text += f"\n\nwithout staleness: generation {median(generation):.2f} s, the rest {median(rest):.2f} s of a step"
    text += f"; limit of the speed-up: {median(limits(found[BASE])):.2f}"
    publish("async_rl", text, {**vars(arguments), "runs": found}, ["torch", "transformers", "ray"])


if __name__ == "__main__":
    main()
