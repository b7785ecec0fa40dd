"""Seconds per phase of GRPO and PPO with vLLM on one GPU, and of TRL's GRPO: `python -m benchmarks.ppo_gpu`.

A step samples 512 responses of 512 tokens (64 prompts 8 times for GRPO, 512 prompts once for PPO), scores them by a
function and learns from them in one update. The model has the shape of Qwen3-0.6B with random weights and no end of
sequence, so that every response has its full length; prompts have GSM8K's lengths. PPO has a critic of the same shape
and a reference, whose KL is in the reward. GRPO has neither, as is TRL's default.

hpc-rl is `run_ppo` with its defaults for one GPU: vLLM sleeps while the policy trains. TRL runs GRPO with vLLM in its
own process and sleep mode; it has no PPO with vLLM. It is left out if it is not installed or fails. TRL 1.16.0 names
vLLM up to 0.31 as its requirement: `--trl-python` names the interpreter of an environment with both (`pip install
'trl[vllm]==1.16.0'`). The first steps are not counted. The results file is written after each algorithm and has the
phases of every step, also those of a run that did not come to its end.

The command makes model and data itself and needs the `rl` extra and no network. `--tiny` runs a small model and only
prints; with `--device cpu` that tests the benchmark itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from transformers import PretrainedConfig, Qwen3Config

from benchmarks.common import median, publish, table
from benchmarks.ppo_workload import (
    CLIP_VALUE,
    DATA,
    KL_COEF,
    LR,
    POLICY,
    Algorithm,
    make_tokenizer,
    write_model,
    write_prompts,
)
from benchmarks.sft_gpu import SHAPES
from benchmarks.workload import GSM8K_LENGTHS, qwen2_config

OURS, TRL = "hpc-rl", "TRL"
ROOT = Path(__file__).parent.parent
WARM_UP = 3
RUN_TIMEOUT_S = 3600
SECONDS = "timing_s/"
RUN = "run"


@dataclass(frozen=True)
class Work:
    """The size of a step, and where it runs."""

    responses: int
    response_tokens: int
    samples: int
    """Responses to each prompt of GRPO; PPO has one."""
    device: str
    engine: str
    steps: int
    """Training steps. The first WARM_UP of them do not count."""
    lr: float = LR["grpo"]
    micro_tokens: int = 16_384

    def prompts(self, algorithm: Algorithm) -> int:
        """Return the number of prompts of a step."""
        return self.responses // self.samples if algorithm == "grpo" else self.responses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=get_args(Algorithm), nargs="+", default=list(get_args(Algorithm)))
    parser.add_argument("--steps", type=int, default=10, help="steps that count, after the warm-up")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm", help="rollout engine of hpc-rl")
    parser.add_argument("--trl-python", default=sys.executable, help="Python with TRL and its vLLM (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of 4M parameters and 8 responses of 16 tokens")
    arguments = parser.parse_args()
    if missing := missing_parts(arguments.device, arguments.engine):
        sys.exit(f"benchmarks.ppo_gpu: {missing}")
    size = (8, 16, 4) if arguments.tiny else (512, 512, 8)
    work = Work(*size, arguments.device, arguments.engine, WARM_UP + arguments.steps)
    pythons = {OURS: sys.executable, TRL: arguments.trl_python}
    results: dict[str, Any] = {"work": asdict(work)}
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for algorithm in arguments.algorithm:
            folder = Path(name) / algorithm
            folder.mkdir()
            write(folder, tiny_config() if arguments.tiny else gpu_config(), work, algorithm)
            steps = {}
            for who in candidates(algorithm, work):
                steps[who], failure = run(who, pythons[who], folder, algorithm, work)
                failures += [failure] if failure and who == OURS else []
            medians = {who: median_of(found) for who, found in steps.items() if len(found) > WARM_UP}
            results[algorithm] = {"medians": medians, "steps": steps}
            text = tables(algorithm, medians, work)
            if arguments.tiny:
                print(text)
            else:
                publish("ppo_gpu", text, results, ["torch", "transformers", "ray", "vllm"])
    if failures:
        sys.exit("benchmarks.ppo_gpu: " + "\n".join(failures))


def tables(algorithm: Algorithm, found: Mapping[str, Mapping[str, float]], work: Work) -> str:
    if OURS not in found:
        return f"{algorithm.upper()}: no step counts"
    return f"{algorithm.upper()}\n\n{totals(found, work)}\n\n{phases(found[OURS])}"


def median_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians over the steps that count."""
    counted = steps[WARM_UP:]
    return {name: median([step[name] for step in counted]) for name in counted[0]}


def missing_parts(device: str, engine: str) -> str | None:
    """Return what this machine lacks, if anything."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "torch does not find a CUDA device"
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        return "vllm is not installed: pip install '.[rl]'"
    return None


def candidates(algorithm: Algorithm, work: Work) -> list[str]:
    """Return who is measured. TRL takes part in GRPO on a GPU."""
    return [OURS, TRL] if algorithm == "grpo" and work.device == "cuda" else [OURS]


def gpu_config() -> PretrainedConfig:
    """Return the shape of Qwen3-0.6B."""
    return Qwen3Config(
        vocab_size=151_936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **SHAPES["0.6B"]
    )


def tiny_config() -> PretrainedConfig:
    return qwen2_config(512)


def write(folder: Path, config: PretrainedConfig, work: Work, algorithm: Algorithm) -> None:
    """Write the policy and the prompts of one step, which every step uses."""
    config.bos_token_id = config.eos_token_id = None  # every response has its full length
    write_model(folder / POLICY, config, make_tokenizer(config.vocab_size))
    known = np.array([prompt for prompt, _ in GSM8K_LENGTHS])
    count = work.prompts(algorithm)
    write_prompts(folder, np.quantile(known, (np.arange(count) + 0.5) / count, method="nearest").tolist())


def run(
    who: str, python: str, folder: Path, algorithm: Algorithm, work: Work
) -> tuple[list[dict[str, float]], str | None]:
    """Measure a candidate in a process of its own.

    Returns:
        the metrics of each of its steps, and the end of its output if it failed.
    """
    module = {OURS: "benchmarks.ppo_gpu", TRL: "benchmarks.ppo_gpu_trl"}[who]
    output, log = folder / f"{module}.json", folder / f"{module}.log"
    code = f"import sys, {module}; {module}.measure(*sys.argv[1:])"
    command = [python, "-c", code, str(folder), algorithm, json.dumps(asdict(work)), str(output)]
    print(f"# {algorithm}: {who}", file=sys.stderr, flush=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended, failure = "", None
    with log.open("w") as stream:
        try:
            subprocess.run(
                command, cwd=ROOT, env=env, stdout=stream, stderr=subprocess.STDOUT, timeout=RUN_TIMEOUT_S, check=True
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            ended = (
                f"exit code {error.returncode}"
                if isinstance(error, subprocess.CalledProcessError)
                else "it took too long"
            )
    if ended:
        failure = f"{who} failed: {ended}\n{log.read_text()[-6000:]}"
        print(f"# {failure}", file=sys.stderr, flush=True)
    if who == OURS:
        return recorded(folder), failure
    return ([] if failure else json.loads(output.read_text())), failure


def recorded(folder: Path) -> list[dict[str, float]]:
    """Return the seconds of each phase and the speed of each step that hpc-rl has made, in the order of the steps."""
    from hpc_rl.run_dir import RunDir
    from hpc_rl.tracking.metrics import read_metrics

    metrics = RunDir(folder / RUN).metrics
    lines = read_metrics(metrics) if metrics.exists() else []
    kept = (SECONDS, "perf/")
    steps = [{name: value for name, value in line.items() if name.startswith(kept)} for line in lines]
    common = set.intersection(*(set(step) for step in steps)) if steps else set()
    return [{name: step[name] for name in sorted(common)} for step in steps]


def measure(folder: str, algorithm: Algorithm, work: str, _output: str) -> None:
    """Train with hpc-rl."""
    from hpc_rl.rl.main_ppo import run_ppo
    from hpc_rl.run_dir import RunDir

    run = RunDir(Path(folder) / RUN)
    run.path.mkdir(mode=0o700)
    run_ppo(configuration(Path(folder), algorithm, Work(**json.loads(work))), run=run)


def configuration(folder: Path, algorithm: Algorithm, work: Work) -> Any:
    """Return the run's PpoConfig: defaults, except for the algorithm and the size of a step."""
    from hpc_rl.config.rl.ppo import PpoConfig

    optim = {"lr": work.lr, "lr_scheduler": "constant", "warmup_ratio": 0.0}
    of_algorithm = {
        "grpo": {"algorithm": {"advantage": "grpo"}},
        "ppo": {
            "algorithm": {"kl": {"where": "reward", "coef": KL_COEF}},
            "critic": {"optim": optim, "cliprange_value": CLIP_VALUE},
        },
    }
    return PpoConfig.model_validate(
        {
            "model": {"path": str(folder / POLICY)},
            "data": {
                "train_files": [str(folder / DATA)],
                "prompt_key": "prompt",
                "answer_key": None,
                "max_response_length": work.response_tokens,
                "train_batch_size": work.prompts(algorithm),
            },
            "actor": {"optim": optim},
            "rollout": {"name": work.engine, "n": work.responses // work.prompts(algorithm)},
            "reward": {"function": "benchmarks.ppo_workload:score"},
            "trainer": {
                "device": work.device,
                "micro_tokens": work.micro_tokens,
                "total_epochs": work.steps,
                "save_minutes": 0,
                "export": False,
                "logger": [],
            },
            **of_algorithm[algorithm],
        }
    )


def totals(found: Mapping[str, Mapping[str, float]], work: Work) -> str:
    """Return a table of whole steps."""
    generated = work.responses * work.response_tokens
    step = {who: metrics["perf/time_per_step"] for who, metrics in found.items()}
    rows = [
        [
            who,
            f"{step[who]:.3g}",
            f"{generated / step[who]:,.0f}",
            "" if who == OURS else f"{step[who] / step[OURS]:.2f}",
            f"{metrics['perf/max_memory_gb']:.1f}",
        ]
        for who, metrics in found.items()
    ]
    return table(["", "s per step", "generated tokens/s", f"seconds relative to {OURS}", "trainer's peak GB"], rows)


def phases(metrics: Mapping[str, float]) -> str:
    """Return a table of the phases of hpc-rl's step, in seconds for which its driver waited."""
    names = [name for name in metrics if name.startswith(SECONDS) and name != f"{SECONDS}step"]
    return table(["phase", "s"], [[name.removeprefix(SECONDS), f"{metrics[name]:.3g}"] for name in names])


if __name__ == "__main__":
    main()
