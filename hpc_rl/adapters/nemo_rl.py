"""NeMo-RL (`examples/run_grpo.py` and the scripts beside it, on Ray).

Written for the main branch of August 2026 (0.6). It has not run here: it needs GPUs. Its timer and the hook into it are
tested as they are in its repository. The script runs in the job's Python, of which Ray is started too: `uv run` is left
out, and NEMO_RL_PY_EXECUTABLES_SYSTEM=1 in slurm.env has its workers use this Python as well, if it has their packages.

It saves and ends by itself before `checkpointing.checkpoint_must_save_by`. Inside, it looks at the stop file too.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace
from hpc_rl.adapters.hydra import appended, size_conflicts
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.step_line import read_step_line

_SCRIPT = re.compile(r"run_(grpo\w*|ppo|sft|dpo|rm|distillation|vlm_grpo|vlm_sft|xtoken_off_policy_distillation)\.py")
_FOLDER, _LIMIT = "checkpointing.checkpoint_dir", "checkpointing.checkpoint_must_save_by"
_NODES, _GPUS = "cluster.num_nodes", "cluster.gpus_per_node"
NAMES = {
    "train/reward": "critic/score/mean",
    "train/mean_gen_tokens_per_sample": "response_length/mean",
    "timing/train/total_step_time": "timing_s/step",
    "validation/accuracy": "val/score",
}
GROUPS = {"timing/train/": "timing_s/", "validation/": "val/"}


def _recognises(program: Program) -> bool:
    return _SCRIPT.fullmatch(Path(program.name).name) is not None and program.uses("nemo_rl")


def _newest(program: Program, place: ProgramPlace) -> Checkpoint | None:
    """Return the highest step_N: it is renamed from tmp_step_N when it is complete."""
    folder = program.folder / program.options.get(_FOLDER, str(place.run.checkpoints))
    steps = [int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdecimal()]
    path = folder / f"step_{max(steps, default=0)}"
    try:
        return Checkpoint(max(steps), str(path)) if steps and path.stat().st_mtime >= place.began else None
    except FileNotFoundError:
        return None  # a newer one has replaced it


def duration(seconds: float) -> str:
    """Return a time as NeMo-RL reads it: days, hours, minutes and seconds."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24:02}:{hours % 24:02}:{minutes:02}:{rest:02}"


def _arguments(program: Program, place: ProgramPlace) -> list[str]:
    limit = {} if place.seconds is None else {_LIMIT: duration(place.seconds)}
    # The files have values for all options, mostly those of the examples. Their folder is one that all runs share, and
    # NeMo-RL always resumes from what is there.
    wanted = {_NODES: place.nodes, _GPUS: place.processes, _FOLDER: place.run.checkpoints, **limit}
    return appended(program.options, {**wanted, "checkpointing.enabled": "true"})


NEMO_RL = Adapter(
    name="nemo-rl",
    title="NeMo-RL",
    kinds=("ray",),
    packages=("nemo_rl",),
    recognises=_recognises,
    saves="at the end of a step, before the walltime ends or when it is asked, and resumes from its last checkpoint",
    hook="nemo_rl",
    saves_when_asked=True,
    ends_itself=True,
    output=lambda program: program.options.get(_FOLDER),
    arguments=_arguments,
    conflicts=lambda program, place: size_conflicts(program.options, place, _NODES, _GPUS),
    newest=_newest,
    progress=lambda line: read_step_line(line, NAMES, GROUPS),
    stops=lambda line: "Timeout has been reached, stopping training early" in line,
)
