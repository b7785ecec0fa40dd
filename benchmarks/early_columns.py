"""Columns computed during generation and after it: `python -m benchmarks.early_columns`.

The task, the model and the two processes are those of benchmarks/async_rl.py, with rollout.staleness=0. The algorithm
is PPO: a critic, a reference, and log-probabilities before the updates, which the trainer computes for 8 mini-batches
of a step. It computes them for each mini-batch as soon as it is complete, or for all after generation. The numbers of
both runs are the same, which this program checks. Runs are fresh processes and take turns; seconds of a step are the
median over those after the warm-up.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.async_rl import WARM_UP, prepare, run_options, start
from benchmarks.common import in_turns, median, median_ratio, publish, table

PPO = (
    "algorithm.kl={where: loss, estimator: k3}",
    *("rollout.calculate_log_probs=true", "actor.mini_batch_size=32"),
)
VARIANTS = {"late": "after generation", "early": "during generation"}
METRICS = ("perf/time_per_step", "timing_s/gen")


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the medians of each run of each variant."""
    from hpc_rl.tracking.metrics import read_metrics

    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    losses: dict[str, list[float]] = {}

    def step_s(name: str) -> float:
        run = folder / f"{name}-{len(found[name])}"
        options = [option for option in run_options(folder, 1, arguments) if not option.startswith("algorithm")]
        start("benchmarks.async_rl_run", name, str(run), *options, *PPO, log=folder / "runs.log")
        steps = [record for record in read_metrics(run / "metrics.jsonl") if "perf/time_per_step" in record]
        losses[name] = [float(record["actor/pg_loss"]) for record in steps]
        found[name].append({key: median([record[key] for record in steps[WARM_UP:]]) for key in METRICS})
        return found[name][-1]["perf/time_per_step"]

    in_turns({name: partial(step_s, name) for name in VARIANTS}, arguments.repeats)
    if losses["early"] != losses["late"]:
        raise SystemExit("benchmarks.early_columns: the runs do not have the same losses")
    return found


def rows_of(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[str]]:
    """Return the rows of the table."""
    seconds = {name: [run["perf/time_per_step"] for run in runs] for name, runs in found.items()}
    return [
        [
            VARIANTS[name],
            f"{median(seconds[name]):.3f}",
            f"{median([run['timing_s/gen'] for run in runs]):.3f}",
            f"{median_ratio(seconds['late'], seconds[name]):.2f}",
        ]
        for name, runs in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--sft-steps", type=int, default=300, help="before the runs")
    parser.add_argument("--sequences", type=int, default=20, help="rollout.max_num_seqs")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP} steps are the warm-up; ask for more")
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), arguments.sft_steps)
        found = measure(Path(name), arguments)
    headers = ["columns are computed", "step, s", "generation, s", "speed-up"]
    text = table(headers, rows_of(found))
    publish("early_columns", text, {**vars(arguments), "runs": found}, ["torch", "transformers", "ray"])


if __name__ == "__main__":
    main()
