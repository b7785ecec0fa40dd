"""Every kind of job, and the options for GPUs, once on a GPU and once on CPUs: `python -m benchmarks.gpu_jobs`.

A small model with random weights learns for some steps in each job, which `hpc-rl submit --local` starts. The losses on
the two devices have to be equal up to the rounding of bfloat16. In reinforcement learning the responses differ; there,
the probabilities of the engine and of the trainer are compared. `generate` only has to end well.

It needs the extras `rl`, `torchao`, `qlora` and `liger`, and no network. `--gpus` is the number of GPUs of each job;
its run on CPUs has one process. `--jobs` runs some of the jobs, and only prints. The exit code is 1 if a job failed,
differs, or is left out because its library is missing.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import publish, table
from hpc_rl.probes.tiny_model import chats, make_tiny_model, write_chats
from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import write_jsonl

STEPS = 6
ROWS = 256
TIMEOUT_S = 600
END_S = 60
"""Limit of a job's own clean-up."""
LOSS_TOLERANCE = 0.01
"""Largest difference of the losses of a step on two devices, relative to the first loss."""
PROBABILITY_TOLERANCE = 2e-5
"""Largest mean difference of the probabilities of engine and trainer. Those of the model are around 1 / 512."""
LOSS, AGREEMENT = "train/loss", "training/rollout_probs_diff_mean"
KEPT = (LOSS, AGREEMENT, "perf/max_memory_gb")
"""The metrics that are kept."""
LIBRARIES = ("torch", "transformers", "ray", "vllm", "torchao", "bitsandbytes", "liger-kernel")
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
GPU = ("cuda",)
GENERATE, PASSED = "generate", "passed"


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
        f"sft {CHATS} model.use_torch_compile=true model.enable_gradient_checkpointing=true", devices=GPU
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
    "sft-qlora": Job(f"sft {CHATS} model.lora.rank=8 model.lora.quantize=nf4", "bitsandbytes", GPU, like="sft-lora"),
    "sft-liger": Job(f"sft {CHATS} model.use_liger=true", "liger_kernel", GPU),
    "dpo": Job(f"dpo {PAIRS}"),
    "rm": Job(f"rm {PAIRS}"),
    "distill": Job(f"distill {CHATS} teacher.path=teacher"),
    "grpo-hf": Job(f"{RL} algorithm.advantage=grpo rollout.name=hf"),
    "grpo-vllm": Job(f"{RL} algorithm.advantage=grpo {VLLM}", "vllm", GPU),
    "grpo-vllm-adapters": Job(
        f"{RL} algorithm.advantage=grpo {VLLM} model.lora.rank=8 rollout.merge_lora=false", "vllm", GPU
    ),
    "ppo-vllm-offload": Job(f"{RL} {VLLM} algorithm.kl.where=reward trainer.offload=all", "vllm", GPU),
    "generate-vllm": Job(f"generate data.files=prompts.jsonl {PROMPTS} rollout.n=2 {VLLM}", "vllm", GPU),
}


@dataclass(frozen=True)
class Result:
    """How a job ended on one device."""

    code: int | None
    """Its exit code; None if it took longer than TIMEOUT_S."""
    metrics: list[dict[str, float]]
    """KEPT of each step."""
    last_line: str = ""

    def series(self, name: str) -> list[float]:
        """Return a metric of all steps that have it."""
        return [step[name] for step in self.metrics if name in step]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", choices=list(JOBS), nargs="+", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of each job (default: 1)")
    options = parser.parse_args()
    chosen = options.jobs
    jobs = chosen or list(JOBS)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for job in jobs:
            for device in JOBS[job].devices if has_library(job) else ():
                results[job, device] = run(folder, job, device, options.gpus if device == "cuda" else 1)
    rows = [[job, *row(job, results)] for job in jobs]
    text = table(["job", "last loss, GPU", "last loss, CPU", "difference", "engine and trainer", "result"], rows)
    if chosen:
        print(text)
    else:
        kept = {f"{job}, {device}": asdict(result) for (job, device), result in results.items()}
        name = "gpu_jobs" if options.gpus == 1 else f"gpu_jobs_{options.gpus}"
        publish(name, text, kept, [one for one in LIBRARIES if importlib.util.find_spec(one.replace("-", "_"))])
    return int(any(cells[-1] != PASSED for cells in rows))


def has_library(job: str) -> bool:
    package = JOBS[job].package
    return package is None or importlib.util.find_spec(package) is not None


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
    write_jsonl(folder / "pairs.jsonl", pairs)
    write_jsonl(folder / "prompts.jsonl", ({"prompt": pair["prompt"]} for pair in pairs))


def run(folder: Path, name: str, device: str, processes: int = 1) -> Result:
    """Run a job to its end and read its metrics. A job that takes too long is ended, with its processes."""
    kind, *options = JOBS[name].options.split()
    steps = [] if kind == GENERATE else [f"trainer.total_training_steps={STEPS}", "trainer.logger=[]"]
    path = folder / f"{name}-{device}"
    command = [sys.executable, "-m", "hpc_rl.cli", "submit", kind, "--local", "--nodes", "1"]
    command += ["--gpus-per-node", str(processes), "--run-dir", str(path)]
    command += ["model.path=model", f"trainer.device={device}", *options, *steps]
    print(f"# {name} on {device}", file=sys.stderr, flush=True)
    log = folder / f"{name}-{device}.log"
    with log.open("w") as stream, subprocess.Popen(command, cwd=folder, stdout=stream, stderr=stream) as job:
        try:
            code: int | None = job.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
            job.terminate()  # the command ends its nodes
            job.wait(END_S)
    metrics = RunDir(path).metrics
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    kept = [{key: line[key] for key in KEPT if key in line} for line in lines]
    return Result(code, kept, last_line(log.read_text(errors="replace")))


def last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")


def row(name: str, results: Mapping[tuple[str, str], Result]) -> list[str]:
    """Return the cells of a job: last losses, largest difference, agreement with the engine, and the result."""
    found = {device: result for (job, device), result in results.items() if job == name}
    losses = {device: result.series(LOSS) for device, result in found.items()}
    reference = results.get((name if "cpu" in JOBS[name].devices else JOBS[name].like, "cpu"))
    gap = difference(losses.get("cuda", []), reference.series(LOSS) if reference is not None else [])
    agreement = max((value for result in found.values() for value in result.series(AGREEMENT)), default=None)
    return [
        *(f"{losses[device][-1]:.4f}" if losses.get(device) else "" for device in ("cuda", "cpu")),
        "" if gap is None else f"{gap:.2%}",
        "" if agreement is None else f"{agreement:.1e}",
        verdict(name, found, gap, agreement),
    ]


def difference(found: Sequence[float], expected: Sequence[float]) -> float | None:
    """Return the largest difference of two series of losses, relative to the first loss; None without both. Series of
    different lengths differ without limit."""
    if not found or not expected:
        return None
    if len(found) != len(expected):
        return math.inf
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) / abs(expected[0])


def verdict(name: str, found: Mapping[str, Result], gap: float | None, agreement: float | None) -> str:
    """Return PASSED, or what is wrong."""
    if not found:
        return f"left out: no {JOBS[name].package}"
    for device, result in found.items():
        if result.code is None:
            return f"longer than {TIMEOUT_S} s on {device}"
        if result.code != 0:
            return f"exit code {result.code} on {device}: {result.last_line}"
    if gap is None and agreement is None and not JOBS[name].options.startswith(GENERATE):
        return "nothing to compare with"
    if gap is not None and not gap <= LOSS_TOLERANCE:
        return f"losses differ by more than {LOSS_TOLERANCE:.0%}"
    if agreement is not None and not agreement <= PROBABILITY_TOLERANCE:
        return f"probabilities differ by more than {PROBABILITY_TOLERANCE}"
    return PASSED


if __name__ == "__main__":
    sys.exit(main())
