"""What people type before a program that has ranks: `torchrun`, `accelerate launch`, `deepspeed`, `fabric run`.

A job starts its ranks itself, so the launcher is left out. What else it does for a program, such as the variables of
accelerate's FSDP, `inside/launched.py` does on the node, with the launcher's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from hpc_rl.adapters.adapter import ProgramPlace
from hpc_rl.adapters.program import LAUNCHED, Program
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted

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
_SIZES: Mapping[str, tuple[str, str, Callable[[ProgramPlace], int]]] = {
    **dict.fromkeys(("nnodes", "num_machines", "num_nodes"), ("node", "--nodes", lambda place: place.nodes)),
    **dict.fromkeys(
        ("nproc_per_node", "num_gpus", "devices"), ("GPU", "--gpus-per-node", lambda place: place.processes)
    ),
    "num_processes": ("process", "", lambda place: place.nodes * place.processes),
}
"""Option of a launcher -> what it counts, the flag of `submit` for it, and the job's number."""
_OWN_CLUSTERS = ("--tpu", "--tpu_cluster", "--mpirun_hostfile", "--no_python", "--no-python")


def launched(launcher: str, options: Sequence[str], program: Sequence[str]) -> tuple[str, ...]:
    """Return what the ranks run for a program of a launcher with these options."""
    return ("-m", LAUNCHED, launcher, *options, "--", *program) if launcher else tuple(program)


def without_launcher(program: Program) -> Program:
    """Return a program as its ranks run it.

    Raises:
        UserError: the program does not show in the options of its launcher, or starts ranks that the job does not have.
    """
    name = launcher_of(program.command)
    if not name:
        return Program(program.command, program.folder)
    options, rest = _split(" ".join(name), program.command[len(name) :])
    if refused := [option for option in options if option.split("=")[0] in _OWN_CLUSTERS]:
        raise UserError(f"{' '.join(name)} {refused[0]}: a job starts Python on GPUs itself; leave the option out")
    return Program(launched(LAUNCHERS[name], options, rest), program.folder)


def launcher_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the first words of a command if they are a launcher's, without its folder; nothing otherwise."""
    first = (Path(words[0]).name, *words[1:]) if words else ()
    return next((name for name in LAUNCHERS if first[: len(name)] == name), ())


def launcher_conflicts(program: Program, place: ProgramPlace) -> Iterator[str]:
    """Yield sentences about options of a program's launcher, as typed, that request other ranks than the job has."""
    words = program.command
    if name := launcher_of(words):
        options, _ = _split(" ".join(name), words[len(name) :])
    else:
        is_axolotl = Path(program.name).name == "axolotl" and "--" in words  # axolotl train c.yml -- OPTIONS
        options = words[words.index("--") + 1 :] if is_axolotl else ()
    for word, following in pairwise([*options, ""]):
        option, equals, value = word.partition("=")
        value = value if equals else following
        what, flag, number = _SIZES.get(option.lstrip("-").replace("-", "_"), ("", "", None))
        if number is None or not option.startswith("--") or not value.isdecimal() or int(value) == number(place):
            continue
        found = counted(number(place), what) + (" per node" if what == "GPU" else "")
        found, instead = (found, f", or submit with {flag} {value}") if flag else (f"{found}, one for each GPU", "")
        yield f"{option} {value}, but the job has {found}: leave the option out{instead}"


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
