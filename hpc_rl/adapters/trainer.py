"""transformers' Trainer, and the programs built on it. The adapter inside them does the rest (inside/trainer.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace
from hpc_rl.adapters.launchers import launched
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import newest_saved

_SAVES = "before the walltime ends or when it is asked, and resumes from its last checkpoint"


def _setting(program: Program, name: str) -> str | None:
    """Return a setting of the command line or of the settings file."""
    return program.options.get(name) or program.settings("config").get(name)


def _is_set(program: Program, name: str) -> bool:
    return (_setting(program, name) or "").lower() in ("true", "1")


def _output(program: Program) -> str | None:
    return _setting(program, "output_dir")


def _options(values: Mapping[str, str | None]) -> list[str]:
    """Return the options that have a value, as words."""
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", value)]


@dataclass(frozen=True)
class _Command:
    """A command of a package that runs trainings, among others."""

    names: tuple[str, ...]
    trains: tuple[str, ...]
    """Its first arguments with which it does; empty for all."""
    example: str
    started: Callable[[Program, str, list[str]], Sequence[str]]
    """Returns what its ranks run, by that argument and those after it."""

    def is_of(self, program: Program) -> bool:
        return Path(program.name).name in self.names

    def words(self, program: Program) -> Sequence[str]:
        """Return what the ranks run for a program."""
        first, *rest = program.arguments or ("",)
        is_training = self.is_of(program) and first and (not self.trains or first in self.trains)
        return self.started(program, first, rest) if is_training else program.words

    def refused(self, program: Program) -> list[str]:
        """Return why a program that still is this command cannot be a job."""
        used = f"{self.names[0]} {' '.join(program.arguments[:1])}"
        return [f"{used}: only {self.example} can be a job"] if self.is_of(program) else []


TRANSFORMERS = Adapter(
    name="transformers",
    title="transformers' Trainer",
    kinds=("torchrun",),
    packages=("transformers",),
    recognises=lambda program: program.uses(
        *("transformers.Trainer", "transformers.Seq2SeqTrainer", "transformers.trainer"),
        *("axolotl", "llamafactory", "llmtuner", "swift.trainers", "swift.llm"),
    ),
    saves=_SAVES,
    hook="trainer",
    saves_when_asked=True,
    ends_itself=True,
    has_heartbeats=True,
    output=_output,
    newest=lambda _, place: newest_saved(place.run),
)


def _trl_words(program: Program, name: str, words: list[str]) -> Sequence[str]:
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


_TRL = _Command(("trl",), (), "`trl sft` and others", _trl_words)
TRL = replace(
    TRANSFORMERS,
    name="trl",
    title="TRL (transformers' Trainer)",
    packages=("trl",),
    recognises=lambda program: _TRL.is_of(program) or program.uses("trl"),
    command=_TRL.words,
    conflicts=_trl_conflicts,
)


def _axolotl_words(_program: Program, _name: str, words: list[str]) -> Sequence[str]:
    """Return Axolotl's training without its launcher, and without what follows `--`, which is for the launcher."""
    words = words[: words.index("--")] if "--" in words else words
    if "--launcher" in words:
        del words[(at := words.index("--launcher")) : at + 2]
    return ["-m", "axolotl.cli.train", *(word for word in words if not word.startswith("--launcher="))]


def _axolotl_conflicts(program: Program, _place: ProgramPlace) -> Sequence[str]:
    found = [f"--{name}" for name in ("cloud", "sweep") if name in program.options]
    found += ["use_ray"] if _is_set(program, "use_ray") else []
    why = "Axolotl would start trainings or a cluster of its own: leave it out, and submit each training as a job"
    return _AXOLOTL.refused(program) or [f"{name}: {why}" for name in found]


_AXOLOTL = _Command(("axolotl",), ("train",), "`axolotl train CONFIG.yml`", _axolotl_words)
AXOLOTL = replace(
    TRANSFORMERS,
    name="axolotl",
    title="Axolotl (transformers' Trainer)",
    packages=("axolotl",),
    recognises=lambda program: _AXOLOTL.is_of(program) or program.runs("axolotl"),
    command=_AXOLOTL.words,
    # Parts of Axolotl read the checkpoint from the settings, such as ReLoRA.
    arguments=lambda _, place: _options({"resume-from-checkpoint": place.saved_path}),
    conflicts=_axolotl_conflicts,
)


def _llama_conflicts(program: Program, _place: ProgramPlace) -> Sequence[str]:
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
    return _LLAMA.refused(program) or found


def _llama_arguments(program: Program, place: ProgramPlace) -> Sequence[str]:
    """Return what a later attempt needs: otherwise LLaMA-Factory starts anew, or refuses the folder, or looks in it for
    the checkpoint with the highest number, complete or not."""
    if not place.is_later:
        return []
    path = place.saved_path
    values = {"overwrite_output_dir": "false" if path else "true", "resume_from_checkpoint": path}
    if program.positional:
        return [f"{name}={value}" for name, value in values.items() if value]
    return _options(values)


_LLAMA = _Command(
    ("llamafactory-cli", "lmf"),
    ("train",),
    "`llamafactory-cli train CONFIG.yaml`",
    lambda _program, _name, words: ["-m", "llamafactory.launcher", *words],
)
LLAMA_FACTORY = replace(
    TRANSFORMERS,
    name="llamafactory",
    title="LLaMA-Factory (transformers' Trainer)",
    packages=("llamafactory",),
    recognises=lambda program: _LLAMA.is_of(program) or program.runs("llamafactory", "llmtuner"),
    command=_LLAMA.words,
    arguments=_llama_arguments,
    # What llamafactory-cli sets (OPTIM_TORCH).
    environment=lambda _program, _place: {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    },
    conflicts=_llama_conflicts,
)


def _swift_conflicts(program: Program, _place: ProgramPlace) -> Sequence[str]:
    why = {"use_ray": "ms-swift would start a cluster of its own", "use_flash_ckpt": "it saves in the background"}
    return _SWIFT.refused(program) or [
        f"{name}: {text}: leave it out" for name, text in why.items() if _is_set(program, name)
    ]


def _swift_arguments(program: Program, place: ProgramPlace) -> Sequence[str]:
    """Return the options with which all attempts of a run write into one folder, instead of one of each start."""
    wanted = {"output_dir": str(place.run.checkpoints), "add_version": "false"}
    return _options({name: value for name, value in wanted.items() if not _setting(program, name)})


_SWIFT = _Command(
    ("swift",),
    ("pt", "sft", "rlhf"),
    "`swift pt`, `swift sft` or `swift rlhf`",
    lambda _program, name, words: launched("swift", [], ["-m", f"swift.cli.{name}", *words]),
)
MS_SWIFT = replace(
    TRANSFORMERS,
    name="ms-swift",
    title="ms-swift (transformers' Trainer)",
    packages=("swift",),
    recognises=lambda program: _SWIFT.is_of(program) or program.runs("swift"),
    command=_SWIFT.words,
    arguments=_swift_arguments,
    conflicts=_swift_conflicts,
)
