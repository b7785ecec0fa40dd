"""Programs whose training loops are Lightning's, torchtitan's, or the user's own with accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpc_rl.adapters.adapter import Adapter, ProgramPlace
from hpc_rl.adapters.program import MOST_BYTES, Program
from hpc_rl.adapters.saved import newest_saved

LIGHTNING = Adapter(
    name="lightning",
    title="Lightning's Trainer",
    kinds=("torchrun",),
    packages=("lightning", "pytorch_lightning"),
    recognises=lambda program: program.uses("lightning", "pytorch_lightning") and not program.uses("lightning.fabric"),
    saves="before the walltime ends or when it is asked, into the run directory, and resumes from its last checkpoint",
    hook="lightning",
    saves_when_asked=True,
    ends_itself=True,
    has_heartbeats=True,
    newest=lambda _, place: newest_saved(place.run),
)
_RESUME = "--resume_from_checkpoint"
_FOLDER = "--checkpoint.folder"


def _accelerate_arguments(program: Program, place: ProgramPlace) -> Sequence[str]:
    """Return the option by which examples of accelerate and diffusers resume, if the script has it."""
    path = place.saved_path
    return [_RESUME, path] if path and _takes_resume(program) else []


def _takes_resume(program: Program) -> bool:
    try:
        with (program.folder / program.name).open("rb") as file:
            return _RESUME.encode() in file.read(MOST_BYTES)
    except OSError:
        return False


ACCELERATE = Adapter(
    name="accelerate",
    title="a loop with accelerate",
    kinds=("torchrun",),
    packages=("accelerate",),
    hook="accelerate",
    recognises=lambda program: program.uses("accelerate.Accelerator", "accelerate.accelerator"),
    saves=(
        "only when the script calls save_state, ends after the next call when it is asked to stop, and resumes only if "
        f"the script has the option {_RESUME}"
    ),
    arguments=_accelerate_arguments,
    newest=LIGHTNING.newest,
)


def _titan_arguments(program: Program, place: ProgramPlace) -> Sequence[str]:
    """Return the option without which torchtitan saves nothing, and a folder of the run: it resumes from what is there,
    which may be of another run in its own default."""
    enable = [] if "checkpoint.enable" in program.options else ["--checkpoint.enable"]
    return [*enable, *([] if "checkpoint.folder" in program.options else [_FOLDER, str(place.run.checkpoints)])]


def _titan_conflicts(program: Program, _place: ProgramPlace) -> Sequence[str]:
    found = [name for name in ("checkpoint.no_enable", "checkpoint.load_only") if name in program.options]
    if "job.config_file" not in program.options and not {"module", "config"} <= set(program.options):
        return ["torchtitan: write -- -m torchtitan.train --module llama3 --config NAME, as its run_train.sh does"]
    return [f"--{name.replace('no_', 'no-')}: torchtitan would save nothing, and could not resume" for name in found]


TORCHTITAN = replace(
    LIGHTNING,
    name="torchtitan",
    hook="torchtitan",
    title="torchtitan",
    packages=("torchtitan",),
    recognises=lambda program: program.runs("torchtitan"),
    saves="before the walltime ends or when it is asked, and resumes from its last checkpoint",
    arguments=_titan_arguments,
    conflicts=_titan_conflicts,
)
