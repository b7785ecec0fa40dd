"""Two ranks compared with one, each with one thread: `python -m benchmarks.scaling`.

The same global batches of 64 samples of GSM8K's lengths, the same 4M-parameter model, processes on one machine that
exchange gradients over gloo. One and two ranks are measured in turns, five times, for each kind of sharding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.common import in_turns, median, median_ratio, publish, table

SHARDINGS = ("full", "gradients", "none")
BATCH, STEPS = 64, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank-of", choices=SHARDINGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments.rank_of)
        return
    variants = {"1 rank": partial(launch, 1, "none")}
    variants |= {f"2 ranks, sharding {sharding}": partial(launch, 2, sharding) for sharding in SHARDINGS}
    rates = in_turns(variants, arguments.repeats)
    rows = [
        [name, f"{median(values):,.0f}", f"{median_ratio(values, rates['1 rank']):.2f}"]
        for name, values in rates.items()
    ]
    publish("scaling", table(["", "tokens/s", "against 1 rank"], rows), rates, ["torch", "transformers"])


def launch(ranks: int, sharding: str) -> float:
    """Return the tokens per second of a group of new processes, in its fastest step.

    The fastest step counts because other load on two cores slows two ranks, which wait for each other, more than one.
    """
    command = [sys.executable, "-m", "benchmarks.scaling", "--rank-of", sharding]
    with tempfile.TemporaryDirectory() as group:
        common = {"WORLD_SIZE": str(ranks), "HPC_RL_GROUP_DIR": group, "OMP_NUM_THREADS": "1"}
        environs = [{**os.environ, **common, "RANK": str(rank)} for rank in range(ranks)]
        processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for env in environs]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("benchmarks.scaling: a rank failed")
    return float(json.loads(outputs[0].splitlines()[-1]))


def run_rank(sharding: str) -> None:
    import torch

    from benchmarks.workload import qwen2_config, samples, sft_config, trainer_state
    from hpc_rl.config.training.finetune import FinetuneTrainerConfig
    from hpc_rl.finetune.trainer import TrainerState, step
    from hpc_rl.training.parallel import distributed
    from hpc_rl.training.perf import Clock

    def step_rate(state: TrainerState) -> float:
        world.barrier()
        start, before = time.perf_counter(), state.total_tokens
        step(state, Clock())
        world.barrier()
        return (state.total_tokens - before) / (time.perf_counter() - start)

    torch.set_num_threads(1)
    world = distributed.start("cpu", 60)
    with tempfile.TemporaryDirectory() as folder:
        data = samples(BATCH * (STEPS + 1), 4096, all_targets=True)
        trainer = {"device": "cpu", "sharding": sharding, "micro_tokens": 4096}
        settings = sft_config(BATCH, FinetuneTrainerConfig.model_validate(trainer))
        state = trainer_state(qwen2_config(4096), data, settings, world, Path(folder))
        step(state, Clock())
        rate = max(step_rate(state) for _ in range(STEPS))
    distributed.finish()
    print(json.dumps(rate), flush=True)


if __name__ == "__main__":
    main()
