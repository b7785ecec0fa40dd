"""transformers' Trainer, and the programs built on it. The adapter inside them does the rest (inside/trainer.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace
from hpc_rl.adapters.launchers import launched
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import newest_saved

_SAVES = "before the walltime ends or when it is asked, and resumes from its last checkpoint"


def _setting(program: Program, name: str) -> str | None:
    """Return a setting of the command line or of the settings file."""
    return program.options.get(name) or program.settings("config").get(name)


def _output(program: Program) -> str | None:
    return _setting(program, "output_dir")


def _uses(*modules: str, entries: Sequence[str] = ()) -> Callable[[Program], bool]:
    """Return whether a program is one of these modules, imports one of these names, or is an entry point."""
    return lambda program: _entry(program, *entries) or program.uses(*modules)


def _runs(*modules: str, entries: Sequence[str]) -> Callable[[Program], bool]:
    """Return whether a program is a command of a package. A script that imports it has options of its own."""
    return lambda program: _entry(program, *entries) or program.runs(*modules)


def _entry(program: Program, *names: str) -> bool:
    return Path(program.name).name in names


TRANSFORMERS = Adapter(
    name="transformers",
    title="transformers' Trainer",
    kinds=("torchrun",),
    package="transformers",
    recognises=_uses(
        *("transformers.Trainer", "transformers.Seq2SeqTrainer", "transformers.trainer"),
        *("axolotl", "llamafactory", "llmtuner", "swift.trainers", "swift.llm"),
    ),
    saves=_SAVES,
    is_hooked=True,
    output=_output,
    newest=lambda _, place: newest_saved(place.run),
)


def _trl_command(program: Program) -> Sequence[str]:
    if not _entry(program, "trl") or not program.arguments:
        return program.words
    name, *words = program.arguments
    config = program.settings("config").get("accelerate_config")
    given = "--accelerate_config"
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{given}=") else [word])]
    if given in words[:-1]:
        at = words.index(given)
        config = words.pop(at + 1)
        words.pop(at)
    return launched("trl", [config] if config else [], ["-m", f"trl.scripts.{name.replace('-', '_')}", *words])


def _trl_conflicts(program: Program, _place: ProgramPlace) -> Sequence[str]:
    if program.module in ("trl.scripts.vllm_serve", "trl.scripts.env"):
        return [f"trl {program.module.rpartition('.')[2]} is no training: it has no ranks"]
    return []


TRL = replace(
    TRANSFORMERS,
    name="trl",
    title="TRL (transformers' Trainer)",
    package="trl",
    recognises=_uses("trl", entries=("trl",)),
    command=_trl_command,
    conflicts=_trl_conflicts,
)


def _axolotl_command(program: Program) -> Sequence[str]:
    """Return Axolotl's training without its launcher, and without what follows `--`, which is for the launcher."""
    if not _entry(program, "axolotl") or program.arguments[:1] != ("train",):
        return program.words
    words = list(program.arguments[1:])
    words = words[: words.index("--")] if "--" in words else words
    if "--launcher" in words:
        del words[(at := words.index("--launcher")) : at + 2]
    return ["-m", "axolotl.cli.train", *(word for word in words if not word.startswith("--launcher="))]


def _axolotl_conflicts(program: Program, _place: ProgramPlace) -> Sequence[str]:
    if _entry(program, "axolotl"):
        return [f"axolotl {' '.join(program.arguments[:1])}: a job runs `axolotl train CONFIG.yml`"]
    found = [f"--{name}" for name in ("cloud", "sweep") if name in program.options]
    if (_setting(program, "use_ray") or "").lower() in ("true", "1"):
        found.append("use_ray")
    why = "Axolotl would start trainings or a cluster of its own: leave it out, and submit each training as a job"
    return [f"{name}: {why}" for name in found]


def _saved_path(place: ProgramPlace) -> str | None:
    """Return the last checkpoint of earlier attempts."""
    found = newest_saved(place.run) if place.is_later else None
    return found.path if found else None


def _axolotl_arguments(_program: Program, place: ProgramPlace) -> Sequence[str]:
    """Return the checkpoint: parts of Axolotl read it from the settings, such as ReLoRA."""
    path = _saved_path(place)
    return ["--resume-from-checkpoint", path] if path else []


AXOLOTL = replace(
    TRANSFORMERS,
    name="axolotl",
    title="Axolotl (transformers' Trainer)",
    package="axolotl",
    recognises=_runs("axolotl", entries=("axolotl",)),
    command=_axolotl_command,
    arguments=_axolotl_arguments,
    conflicts=_axolotl_conflicts,
)


_LLAMA = ("llamafactory-cli", "lmf")


def _llama_command(program: Program) -> Sequence[str]:
    if not _entry(program, *_LLAMA) or program.arguments[:1] != ("train",):
        return program.words
    return ["-m", "llamafactory.launcher", *program.arguments[1:]]


def _llama_conflicts(program: Program, _place: ProgramPlace) -> Sequence[str]:
    if _entry(program, *_LLAMA):
        return [f"llamafactory-cli {' '.join(program.arguments[:1])}: a job runs `llamafactory-cli train CONFIG.yaml`"]
    found = [
        f"{name}=1 is set, with which LLaMA-Factory uses another trainer or a cluster of its own: unset it"
        for name in ("USE_RAY", "USE_MCA", "USE_V1", "USE_KT")
        if os.environ.get(name, "").lower() in ("1", "true", "y")
    ]
    if (stage := _setting(program, "stage")) in ("rm", "ppo"):
        found.append(
            f"stage {stage}: LLaMA-Factory cannot resume it, because the value head is saved apart from the model: "
            "submit with slurm.adapter=none and a walltime that suffices"
        )
    return found


def _llama_arguments(program: Program, place: ProgramPlace) -> Sequence[str]:
    """Return what a later attempt needs: otherwise LLaMA-Factory starts anew, or refuses the folder, or looks in it for
    the checkpoint with the highest number, complete or not."""
    if not place.is_later:
        return []
    path = _saved_path(place)
    pairs = {"overwrite_output_dir": "false" if path else "true", **({"resume_from_checkpoint": path} if path else {})}
    if program.positional:
        return [f"{name}={value}" for name, value in pairs.items()]
    return [word for name, value in pairs.items() for word in (f"--{name}", value)]


def _llama_variables(_program: Program, _place: ProgramPlace) -> Mapping[str, str]:
    """Return what llamafactory-cli sets (OPTIM_TORCH)."""
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


LLAMA_FACTORY = replace(
    TRANSFORMERS,
    name="llamafactory",
    title="LLaMA-Factory (transformers' Trainer)",
    package="llamafactory",
    recognises=_runs("llamafactory", "llmtuner", entries=_LLAMA),
    command=_llama_command,
    arguments=_llama_arguments,
    environment=_llama_variables,
    conflicts=_llama_conflicts,
)


def _swift_command(program: Program) -> Sequence[str]:
    if not _entry(program, "swift") or program.arguments[:1] not in (("pt",), ("sft",), ("rlhf",)):
        return program.words
    name, *words = program.arguments
    return launched("swift", [], ["-m", f"swift.cli.{name}", *words])


def _swift_conflicts(program: Program, _place: ProgramPlace) -> Sequence[str]:
    if _entry(program, "swift"):
        return [f"swift {' '.join(program.arguments[:1])}: a job runs `swift pt`, `swift sft` or `swift rlhf`"]
    found = [name for name in ("use_ray", "use_flash_ckpt") if _setting(program, name) in ("true", "True", "1")]
    return [
        f"{name}: a job neither starts ms-swift's cluster nor saves in its background: leave it out" for name in found
    ]


def _swift_arguments(program: Program, place: ProgramPlace) -> Sequence[str]:
    """Return the options with which all attempts of a run write into one folder, instead of one of each start."""
    folder = [] if _output(program) else ["--output_dir", str(place.run.checkpoints)]
    return folder if _setting(program, "add_version") else [*folder, "--add_version", "false"]


MS_SWIFT = replace(
    TRANSFORMERS,
    name="ms-swift",
    title="ms-swift (transformers' Trainer)",
    package="swift",
    recognises=_runs("swift", entries=("swift",)),
    command=_swift_command,
    arguments=_swift_arguments,
    conflicts=_swift_conflicts,
)
