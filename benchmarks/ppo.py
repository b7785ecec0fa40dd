"""PPO and GRPO compared with TRL, and with the unavoidable parts of a step: `python -m benchmarks.ppo`.

Seconds per 1,000 generated tokens: whole training steps, one thread, float32. A step samples 32 responses of 64 tokens
to prompts of GSM8K's lengths (4 prompts 8 times for GRPO, 32 prompts once for PPO), scores them and learns from them.
The model is that of benchmarks/sft.py with a vocabulary of 4,096; PPO's critic and reward model have its shape, with
random weights. All variants do one epoch of one mini-batch with AdamW: PPO with a reference, whose KL is in the reward;
GRPO, as is TRL's default, with neither reference nor old log-probabilities.

hpc-rl is `run_ppo`, including Ray, the driver's process, one worker, the transfer of weights and the writing of
metrics. TRL is 1.16.0 for GRPO and, because later versions have no PPO, 1.12.0 for PPO; pip installs the latter into a
folder of its own. The limit is benchmarks/ppo_limit.py. Each variant runs in its own process, and they take turns. Wall
time counts on an idle machine; the processor time of all processes together remains meaningful on a busy one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import median, median_ratio, publish, table
from benchmarks.ppo_turns import Contestant, Turn, contestants
from benchmarks.ppo_workload import TOKENS, Algorithm, write

OURS, TRL, LIMIT = "hpc-rl", "TRL", "parts alone"
TRL_PPO = "1.12.0"
REQUIREMENTS = Path(__file__).parent / "requirements-trl-ppo.txt"
ROOT = Path(__file__).parent.parent
REST = "between phases"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=get_args(Algorithm), nargs="+", default=list(get_args(Algorithm)))
    parser.add_argument("--epochs", type=int, default=1, help="passes over a step's responses, for all variants")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="training steps in each turn")
    parser.add_argument("--trl-ppo", type=Path, default=_cache() / f"trl-{TRL_PPO}", help="folder of TRL " + TRL_PPO)
    arguments = parser.parse_args()
    install_trl_ppo(arguments.trl_ppo)
    results: dict[str, Any] = {"epochs": arguments.epochs, "trl of ppo": TRL_PPO}
    texts = []
    for algorithm in arguments.algorithm:
        turns = measure(algorithm, arguments)
        results[algorithm] = {name: [vars(turn) for turn in own] for name, own in turns.items()}
        texts += [f"{algorithm.upper()}\n\n{totals(turns)}\n\n{phases(turns)}"]
    publish("ppo", "\n\n".join(texts), results, ["torch", "transformers", "ray", "trl", "accelerate"])


def install_trl_ppo(folder: Path) -> None:
    if (folder / "trl").is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, "--requirement", str(REQUIREMENTS)], check=True, timeout=300)


def measure(algorithm: Algorithm, arguments: argparse.Namespace) -> dict[str, list[Turn]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, algorithm)
        trl_path = str(arguments.trl_ppo) if algorithm == "ppo" else None
        common = [name, algorithm, str(arguments.epochs)]
        started = {
            OURS: start("benchmarks.ppo_ours", common, folder),
            TRL: start("benchmarks.ppo_trl", common, folder, trl_path),
            LIMIT: start("benchmarks.ppo_limit", common, folder),
        }
        turns: dict[str, list[Turn]] = {name: [] for name in started}
        with contestants(list(started.values())):
            for repeat in range(arguments.repeats):
                for name, contestant in started.items():
                    turn = contestant.turn(arguments.steps)
                    turns[name].append(turn)
                    seconds = f"{per_1000(turn.wall_s):.3f} s per 1,000, processor {per_1000(turn.processor_s):.3f} s"
                    note = f"# {algorithm} {repeat + 1}/{arguments.repeats} {name}: {seconds}"
                    print(note, file=sys.stderr, flush=True)
        return turns


def start(module: str, arguments: Sequence[str], folder: Path, first_on_path: str | None = None) -> Contestant:
    env = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [first_on_path, str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    return Contestant(module, arguments, env, folder / f"{module.rpartition('.')[2]}.log")


def totals(turns: Mapping[str, Sequence[Turn]]) -> str:
    wall = {name: [per_1000(turn.wall_s) for turn in own] for name, own in turns.items()}
    processor = {name: [per_1000(turn.processor_s) for turn in own] for name, own in turns.items()}
    rows = [
        [
            name,
            f"{median(wall[name]):.3f}",
            "" if name == OURS else f"{median_ratio(wall[name], wall[OURS]):.2f}",
            f"{median(processor[name]):.3f}",
            "" if name == OURS else f"{median_ratio(processor[name], processor[OURS]):.2f}",
        ]
        for name in turns
    ]
    against = f"against {OURS}"
    return table(["s per 1,000 generated tokens", "wall", against, "processor", against], rows)


def phases(turns: Mapping[str, Sequence[Turn]]) -> str:
    """Return the time of each part of a step of hpc-rl, next to that of the same work alone, as medians."""
    ours = {name: per_phase(turns[OURS], name) for name in turns[OURS][0].phases if name != "step"}
    alone = {name: per_phase(turns[LIMIT], name) for name in turns[LIMIT][0].phases}
    # The distribution of responses, metrics, and waits that have no phase of their own.
    ours[REST] = median([turn.wall_s - sum(turn.phases[name] for name in ours) for turn in turns[OURS]])
    rows = [
        [name, f"{seconds:.3f}", f"{alone[name]:.3f}" if name in alone else ""]
        for name, seconds in ours.items()
        if seconds >= 0.0005 or name in alone
    ]
    rows.append(["step", f"{sum(ours.values()):.3f}", f"{sum(alone.values()):.3f}"])
    return table(["wall s of a step", OURS, "alone"], rows)


def per_phase(turns: Sequence[Turn], name: str) -> float:
    return median([turn.phases[name] for turn in turns])


def per_1000(step_s: float) -> float:
    return step_s / TOKENS * 1000


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hpc-rl"


if __name__ == "__main__":
    main()
