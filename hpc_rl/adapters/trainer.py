"""transformers' Trainer, and the programs built on it. The adapter inside them does the rest (inside/trainer.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpc_rl.adapters.adapter import Adapter
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import newest_saved

_SAVES = "before the walltime ends or when it is asked, and resumes from its last checkpoint there"


def _output(program: Program) -> str | None:
    return program.options.get("output_dir") or program.settings("config").get("output_dir")


def _uses(*modules: str) -> Callable[[Program], bool]:
    return lambda program: program.uses(*modules)


TRANSFORMERS = Adapter(
    name="transformers",
    title="transformers' Trainer",
    kinds=("torchrun",),
    package="transformers",
    recognises=_uses("transformers.Trainer", "transformers.Seq2SeqTrainer", "transformers.trainer"),
    saves=_SAVES,
    is_hooked=True,
    output=_output,
    newest=lambda _, place: newest_saved(place.run),
)
TRL = replace(TRANSFORMERS, name="trl", title="TRL (transformers' Trainer)", package="trl", recognises=_uses("trl"))
AXOLOTL = replace(
    TRANSFORMERS,
    name="axolotl",
    title="Axolotl (transformers' Trainer)",
    package="axolotl",
    recognises=_uses("axolotl"),
)
LLAMA_FACTORY = replace(
    TRANSFORMERS,
    name="llamafactory",
    title="LLaMA-Factory (transformers' Trainer)",
    package="llamafactory",
    recognises=_uses("llamafactory", "llmtuner"),
)
MS_SWIFT = replace(
    TRANSFORMERS,
    name="ms-swift",
    title="ms-swift (transformers' Trainer)",
    package="swift",
    recognises=_uses("swift"),
)
