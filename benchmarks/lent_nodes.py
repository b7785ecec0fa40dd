"""Generation with lent nodes: `python -m benchmarks.lent_nodes`.

A run of GRPO on one node without engines of its own gets one lender after the other (`hpc-rl lend`), on the sandbox: a
real Slurm whose nodes are namespaces of this machine. It needs root, as the sandbox does. Each engine is pinned to a
core, and the engines share the cores in turn: a machine can show only as many of them as it has cores.

The speed is the tokens of a step's responses by the seconds of its generation, the median of the steps after the
engine's first tokens. The run trains meanwhile, but not while it generates.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.common import median, pin, publish, table
from hpc_rl.formats.offer import read_lent_nodes
from hpc_rl.tracking.metrics import read_metrics
from tests.e2e.test_ppo_on_slurm import make_ppo_workspace
from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

PROMPTS, RESPONSES = 48, 4
RUN = [
    *("model.path=large", "data.train_files=sums/train.jsonl", "data.val_files=null", "trainer.device=cpu"),
    *("data.max_prompt_length=64", "data.max_response_length=96", "reward.function=reward.py:score"),
    *(f"data.train_batch_size={PROMPTS}", f"rollout.n={RESPONSES}", "actor.mini_batch_size=192"),
    *("trainer.micro_tokens=4096", "algorithm=grpo", "actor.optim.lr=1e-6", "trainer.total_training_steps=100000"),
    *("rollout.engines=lent", "rollout.max_num_seqs=8", "slurm.mem=5G"),
]
NAME = "guest"


def engines() -> set[int]:
    """Return the processes of all engines on this machine."""
    names = ((path, path.read_bytes()) for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return {int(path.parent.name) for path, name in names if name.startswith(b"ray::EngineProcess")}


def has_tokens_of(attempt: Path, lenders: int) -> bool:
    """Return whether so many lent nodes have generated tokens."""
    return sum(one.tokens > 0 for one in read_lent_nodes(attempt)) >= lenders


def speeds(workspace: Workspace, since: int) -> list[float]:
    """Return the tokens per second of generation in each step from `since` on."""
    records = read_metrics(workspace.folder / f"runs/{NAME}/metrics.jsonl")
    found = [record for record in records if "timing_s/gen" in record][since:]
    return [one["response_length/mean"] * PROMPTS * RESPONSES / one["timing_s/gen"] for one in found]


def has_steps(workspace: Workspace, since: int, steps: int) -> bool:
    """Return whether there are so many steps from `since` on."""
    return len(speeds(workspace, since)) >= steps


def measure(workspace: Workspace, lenders: int, engine: str, steps: int) -> dict[str, list[float]]:
    """Return the speeds of each number of lenders."""
    workspace.ok("submit", "ppo", "--job-name", NAME, *RUN, f"rollout.name={engine}")
    attempt, found, known = workspace.folder / f"runs/{NAME}/attempt-1", dict[str, list[float]](), engines()
    for number in range(1, lenders + 1):
        workspace.ok("lend", NAME, "--mem", "5G")
        workspace.wait_until(partial(has_tokens_of, attempt, number), f"tokens of lender {number}")
        for process in engines() - known:
            pin(process, (number - 1) % (os.cpu_count() or 1))
        known = engines()
        begun = len(speeds(workspace, 0)) + 1  # the step that runs now has begun without it
        workspace.wait_until(partial(has_steps, workspace, begun, steps), f"{steps} steps")
        found[str(number)] = speeds(workspace, begun)[:steps]
        print(f"# {number} lenders: {median(found[str(number)]):.0f} tokens/s", flush=True)
    workspace.ok("cancel", NAME)
    return found


def rows_of(results: dict[str, list[float]]) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    one = median(results["1"])
    for number, found in results.items():
        speed = median(found)
        yield [number, f"{speed:.0f}", f"{speed / one:.2f}", f"{speed / one / int(number):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lenders", type=int, default=3)
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    with Cluster(options.lenders + 1, name="lent-nodes", cpus=2, memory_mb=6000, binds_cores=False) as cluster:
        workspace = make_ppo_workspace(cluster)
        make_tiny_model(workspace.folder / "large", hidden=256, layers=4)
        results = measure(workspace, options.lenders, options.engine, options.steps)
    text = table(["lenders", "tokens/s", "relative to one", "per engine"], list(rows_of(results)))
    publish(f"lent_nodes_{options.engine}", text, results, ["ray", "torch"])


if __name__ == "__main__":
    main()
