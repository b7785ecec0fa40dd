"""What people type before a program that has ranks: `torchrun`, `accelerate launch`, `deepspeed`, `fabric run`.

A job starts its ranks itself, so the launcher is left out. What else it does for a program, such as the variables of
accelerate's FSDP, `inside/launched.py` does on the node, with the launcher's own code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_rl.adapters.program import LAUNCHED, Program
from hpc_rl.errors import UserError

LAUNCHERS: Mapping[tuple[str, ...], str] = {
    ("torchrun",): "",
    ("-m", "torch.distributed.run"): "",
    ("-m", "torch.distributed.launch"): "",
    ("fabric", "run"): "fabric",
    ("lightning", "run", "model"): "fabric",
    ("deepspeed",): "deepspeed",
    ("accelerate", "launch"): "accelerate",
    ("accelerate-launch",): "accelerate",
    ("-m", "accelerate.commands.launch"): "accelerate",
}
"""First words -> the function of `inside/launched.py` that does the rest; empty if there is nothing else to do."""
_OWN_CLUSTERS = ("--tpu", "--tpu_cluster", "--mpirun_hostfile", "--no_python", "--no-python")


def launched(launcher: str, options: Sequence[str], program: Sequence[str]) -> tuple[str, ...]:
    """Return what the ranks run for a program of a launcher with these options."""
    return ("-m", LAUNCHED, launcher, *options, "--", *program) if launcher else tuple(program)


def without_launcher(program: Program) -> Program:
    """Return a program as its ranks run it.

    Raises:
        UserError: the program does not show in the options of its launcher, or starts ranks that the job does not have.
    """
    words = program.command
    first = (Path(words[0]).name, *words[1:]) if words else ()
    name = next((name for name in LAUNCHERS if first[: len(name)] == name), None)
    if name is None:
        return Program(words, program.folder)
    options, rest = _split(" ".join(name), words[len(name) :])
    if refused := [option for option in options if option.split("=")[0] in _OWN_CLUSTERS]:
        raise UserError(f"{' '.join(name)} {refused[0]}: a job starts Python on GPUs itself; leave the option out")
    return Program(launched(LAUNCHERS[name], options, rest), program.folder)


def _split(launcher: str, words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the options of a launcher, and its program: what begins with a .py file, or with -m and a module."""
    for number, word in enumerate(words):
        if word in ("-m", "--module") and number + 1 < len(words):
            if words[number + 1].startswith("-"):
                raise UserError(f"{launcher} {word} {words[number + 1]}: write {word} right before the module")
            return words[:number], ["-m", *words[number + 1 :]]
        if word.endswith(".py"):
            return words[:number], words[number:]
    raise UserError(f"{launcher}: no program found among {' '.join(words)!r}: write -- train.py --lr 1e-4")
