"""Every kind of job, and the options that are for GPUs, once on a GPU and once on this machine's CPUs.

    python -m tests.gpu_jobs
    python -m tests.gpu_jobs --jobs sft sft-lora --devices cuda

A small model with random weights learns for some steps in each job, which `hpc-rl submit --local` starts. The losses on
the two devices have to be equal up to the rounding of bfloat16. In reinforcement learning the responses differ; there,
the probabilities of the engine and of the trainer are compared. It needs the `rl` extra, and for some jobs torchao,
bitsandbytes and liger-kernel; a job whose library is missing is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import table
from hpc_rl.probes.tiny_model import chats, make_tiny_model, write_chats
from hpc_rl.run_dir import RunDir

STEPS = 6
ROWS = 256
TIMEOUT_S = 600
LOSS_TOLERANCE = 0.01
"""Largest difference of the losses of a step on two devices, relative to the first loss."""
PROBABILITY_TOLERANCE = 1e-4
"""Largest mean difference of the probabilities of engine and trainer. Those of the model are around 1 / 512."""
AGREEMENT = "training/rollout_probs_diff_mean"
LOSS = "train/loss"
DATA = "data.max_length=256 data.train_batch_size=16"
CHATS = f"data.train_files=chats.jsonl {DATA} optim.lr=1e-3"
PAIRS = f"data.train_files=pairs.jsonl {DATA} optim.lr=1e-4 trainer.micro_tokens=1024"
PROMPTS = (
    "data.prompt_key=prompt data.answer_key=null data.max_prompt_length=96 data.max_response_length=32 "
    "reward.function=hpc_rl.probes.acceptance.rewards:characters reward.workers=1"
)
RL = (
    f"ppo data.train_files=prompts.jsonl {PROMPTS} data.train_batch_size=8 rollout.n=4 actor.optim.lr=1e-3 "
    "rollout.calculate_log_probs=true ray.start_timeout_s=120"
)
VLLM = "rollout.name=vllm rollout.gpu_memory_utilization=0.2"


@dataclass(frozen=True)
class Job:
    """A job of the table."""

    options: str
    """Its kind and its options."""
    package: str | None = None
    """What it needs besides the `rl` extra."""
    devices: tuple[str, ...] = ("cuda", "cpu")
    like: str = "sft"
    """The job whose losses on a CPU are expected, if this one cannot run there."""


JOBS: Mapping[str, Job] = {
    "sft": Job(f"sft {CHATS} trainer.save_freq=3"),
    "sft-compile-recompute": Job(
        f"sft {CHATS} model.use_torch_compile=true model.enable_gradient_checkpointing=true", devices=("cuda",)
    ),
    "sft-offload": Job(
        f"sft {CHATS} model.enable_gradient_checkpointing=true model.enable_activation_offload=true "
        "trainer.offload=optimizer"
    ),
    "sft-bfloat16": Job(f"sft {CHATS} model.dtype=bfloat16"),
    "sft-unpacked": Job(f"sft {CHATS} trainer.packing=false"),
    "sft-8bit": Job(f"sft {CHATS} optim.moments=8bit", "torchao"),
    "sft-8bit-offload": Job(f"sft {CHATS} optim.moments=8bit trainer.offload=optimizer", "torchao"),
    "sft-lora": Job(f"sft {CHATS} model.lora.rank=8"),
    "sft-qlora": Job(
        f"sft {CHATS} model.lora.rank=8 model.lora.quantize=nf4", "bitsandbytes", devices=("cuda",), like="sft-lora"
    ),
    "sft-liger": Job(f"sft {CHATS} model.use_liger=true", "liger_kernel", devices=("cuda",)),
    "dpo": Job(f"dpo {PAIRS}"),
    "rm": Job(f"rm {PAIRS}"),
    "distill": Job(f"distill {CHATS} teacher.path=teacher"),
    "grpo-hf": Job(f"{RL} algorithm.advantage=grpo rollout.name=hf"),
    "grpo-vllm": Job(f"{RL} algorithm.advantage=grpo {VLLM}", "vllm"),
    "grpo-vllm-adapters": Job(
        f"{RL} algorithm.advantage=grpo {VLLM} model.lora.rank=8 rollout.merge_lora=false", "vllm"
    ),
    "ppo-vllm-offload": Job(f"{RL} {VLLM} algorithm.kl.where=reward trainer.offload=all", "vllm"),
    "generate-vllm": Job(f"generate data.files=prompts.jsonl {PROMPTS} rollout.n=2 {VLLM}", "vllm"),
}


@dataclass(frozen=True)
class Result:
    """How a job ended on one device."""

    code: int | None
    """Its exit code; None if it took longer than TIMEOUT_S."""
    metrics: list[dict[str, float]]
    output: str

    def series(self, name: str) -> list[float]:
        """Return a metric of all steps that have it."""
        return [step[name] for step in self.metrics if name in step]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs", choices=list(JOBS), nargs="+", default=list(JOBS), metavar="JOB", help=", ".join(JOBS)
    )
    parser.add_argument("--devices", choices=["cuda", "cpu"], nargs="+", default=["cuda", "cpu"])
    parser.add_argument("--at-once", type=int, default=1, help="jobs at the same time (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the metrics to this file")
    arguments = parser.parse_args()
    jobs = {name: JOBS[name] for name in arguments.jobs}
    missing = {name for name, job in jobs.items() if job.package and importlib.util.find_spec(job.package) is None}
    wanted = [
        (name, device)
        for name, job in jobs.items()
        for device in arguments.devices
        if name not in missing and device in job.devices
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        with ThreadPoolExecutor(arguments.at_once) as pool:
            ended = pool.map(lambda pair: run(folder, *pair), wanted)
            results = dict(zip(wanted, ended, strict=True))
    if arguments.json is not None:
        kept = {f"{job}, {device}": result.metrics for (job, device), result in results.items()}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    rows = [[name, *row(name, results)] for name in jobs if name not in missing]
    rows += [[name, *[""] * 4, f"left out: no {JOBS[name].package}"] for name in jobs if name in missing]
    print(table(["job", "last loss, GPU", "last loss, CPU", "difference", "engine and trainer", "result"], rows))
    return int(not all(cells[-1].startswith(("passed", "left out")) for cells in rows))


def prepare(folder: Path) -> None:
    """Write the models and the data."""
    make_tiny_model(folder / "model", kind="qwen3", vocab=512, hidden=256, num_attention_heads=4)
    make_tiny_model(folder / "teacher", kind="qwen3", vocab=512, hidden=512, num_attention_heads=8)
    write_chats(folder / "chats.jsonl", ROWS)
    rows = chats(ROWS)
    pairs = []
    for (*prompt, better), (*_, other) in zip(rows, [*rows[1:], rows[0]], strict=True):
        worse = {"role": "assistant", "content": other["content"] + " no"}
        pairs.append({"prompt": prompt, "chosen": [better], "rejected": [worse]})
    write_rows(folder / "pairs.jsonl", pairs)
    write_rows(folder / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in pairs])


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, name: str, device: str) -> Result:
    """Run a job to its end and read its metrics."""
    kind, *options = JOBS[name].options.split()
    steps = [] if kind == "generate" else [f"trainer.total_training_steps={STEPS}", "trainer.logger=[]"]
    path = folder / f"{name}-{device}"
    command = [sys.executable, "-m", "hpc_rl.cli", "submit", kind, "--local", "--nodes", "1", "--gpus-per-node", "1"]
    command += ["--run-dir", str(path), "model.path=model", f"trainer.device={device}", *options, *steps]
    print(f"# {name} on {device}", file=sys.stderr, flush=True)
    try:
        ended = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as expired:
        return Result(None, [], str(expired.output or ""))
    metrics = RunDir(path).metrics
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return Result(ended.returncode, [json.loads(line) for line in lines], ended.stdout)


def row(name: str, results: Mapping[tuple[str, str], Result]) -> list[str]:
    """Return the cells of a job: last losses, largest difference, agreement with the engine, and the result."""
    found = {device: results[job, device] for job, device in results if job == name}
    losses = {device: result.series(LOSS) for device, result in found.items()}
    other = results.get((JOBS[name].like, "cpu"))
    expected = losses.get("cpu") or (
        other.series(LOSS) if other is not None and "cpu" not in JOBS[name].devices else []
    )
    gap = difference(losses.get("cuda", []), expected)
    agreement = max((value for result in found.values() for value in result.series(AGREEMENT)), default=None)
    return [
        *(f"{losses[device][-1]:.4f}" if losses.get(device) else "" for device in ("cuda", "cpu")),
        "" if gap is None else f"{gap:.2%}",
        "" if agreement is None else f"{agreement:.1e}",
        verdict(found, gap, agreement),
    ]


def difference(found: Sequence[float], expected: Sequence[float]) -> float | None:
    """Return the largest difference of two series of losses, relative to the first loss; None without both. Series of
    different lengths differ without limit."""
    if not found or not expected:
        return None
    if len(found) != len(expected):
        return math.inf
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) / abs(expected[0])


def verdict(found: Mapping[str, Result], gap: float | None, agreement: float | None) -> str:
    """Return "passed", or what is wrong."""
    for device, result in found.items():
        if result.code is None:
            return f"longer than {TIMEOUT_S} s on {device}"
        if result.code != 0:
            last = ([line for line in result.output.splitlines() if line.strip()] or ["no output"])[-1]
            return f"exit code {result.code} on {device}: {last}"
    if gap is not None and not gap <= LOSS_TOLERANCE:
        return f"losses differ by more than {LOSS_TOLERANCE:.0%}"
    if agreement is not None and not agreement <= PROBABILITY_TOLERANCE:
        return f"probabilities differ by more than {PROBABILITY_TOLERANCE}"
    return "passed"


if __name__ == "__main__":
    sys.exit(main())
