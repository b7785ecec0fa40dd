"""prime-rl: its SFT trainer under torchrun (`-m prime_rl.trainer.sft.train @ sft.toml`).

Written for the main branch of August 2026 (0.8.1.dev, with --resume). It has not run here: it needs GPUs.

`rl`, `sft` and the other commands of prime-rl start their processes, or a job of Slurm, by themselves, without Ray, so
they are refused with what works instead. The trainer has no means to save when it is asked: it ends after its next own
checkpoint, of which [ckpt] interval sets the distance.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace, ReportedStep
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint

TRAINER = "prime_rl.trainer.sft.train"
_COMMANDS = ("rl", "sft", "orchestrator", "trainer", "inference", "env-server")
_NAME = "run"
"""Of the folder in --output-dir: without --run.name, each start has a new one."""
_INTERVAL = 50
_STEP = re.compile(r"\bStep (\d+) \| +([\d.]+)(ms|s|m|h) \|(.*)")
_VALUES = {
    "train/loss": re.compile(r"Loss ([-+.\de]+|nan|inf)"),
    "train/grad_norm": re.compile(r"Grad\. Norm ([-+.\de]+|nan|inf)"),
    "train/lr": re.compile(r"LR ([-+.\de]+)"),
    "perf/tokens_per_s": re.compile(r"Throughput (\d+)"),
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _recognises(program: Program) -> bool:
    is_command = program.name in _COMMANDS and any(word.startswith("@") for word in program.arguments)
    return is_command or program.module.startswith("prime_rl.")


def _newest(program: Program, place: ProgramPlace) -> Checkpoint | None:
    """Return the highest step whose file of torch's distributed checkpoint, written last, is there."""
    own = program.options
    folder = (
        program.folder / own.get("output_dir", str(place.run.checkpoints)) / own.get("run.name", _NAME) / "checkpoints"
    )
    steps = {}
    for path in folder.glob("step_*/trainer/.metadata"):
        name = path.parent.parent.name.removeprefix("step_")
        with contextlib.suppress(FileNotFoundError):  # prime-rl removes old ones
            if name.isdecimal() and path.stat().st_mtime >= place.began:
                steps[int(name)] = path.parent.parent
    return Checkpoint(max(steps), str(steps[max(steps)])) if steps else None


def _arguments(program: Program, place: ProgramPlace) -> list[str]:
    own = program.options
    found = [] if "output_dir" in own else ["--output-dir", str(place.run.checkpoints)]
    found += [] if "run.name" in own else ["--run.name", _NAME]
    if not any(name == "ckpt" or name.startswith("ckpt.") for name in (*own, *program.settings())):
        found += ["--ckpt.interval", str(_INTERVAL)]
    newest = _newest(program, place)
    # A bare --resume takes the highest folder, also one that was not written to its end.
    return [*found, "--resume.step", str(newest.step)] if place.is_later and newest else found


def _conflicts(program: Program, _place: ProgramPlace) -> list[str]:
    if program.module == TRAINER:
        return []
    return [
        f"{program.module or program.name} of prime-rl starts its own processes, without Ray and torchrun of this job. "
        f"What works in a job: SFT by `submit torchrun ... -- -m {TRAINER} @ FILE`; reinforcement learning by "
        "prime-rl's own [slurm] settings, without hpc-rl; or slurm.adapter=none for a command that needs one node only"
    ]


def progress(line: str) -> ReportedStep | None:
    """Read `Step 12 |   3.20s | Loss 0.1234 | ... | Throughput 123 tokens/s | ...`."""
    if (step := _STEP.search(line)) is None:
        return None
    found = {name: float(match[1]) for name, pattern in _VALUES.items() if (match := pattern.search(step[4]))}
    return ReportedStep(int(step[1]), None, {**found, "timing_s/step": float(step[2]) * _SECONDS[step[3]]})


def _output(program: Program) -> str | None:
    own = program.options.get("output_dir")
    return str(Path(own)) if own else None


PRIME_RL = Adapter(
    name="prime-rl",
    title="prime-rl",
    kinds=("torchrun", "ray"),
    packages=("prime_rl",),
    recognises=_recognises,
    saves="at its own interval, ends after its next checkpoint when it is asked to stop, and resumes from that one",
    output=_output,
    arguments=_arguments,
    conflicts=_conflicts,
    newest=_newest,
    progress=progress,
)
