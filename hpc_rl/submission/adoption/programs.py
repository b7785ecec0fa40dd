"""The program that a command starts, behind srun, a container and other commands. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from hpc_rl.adapters.launchers import LAUNCHERS, launcher_of
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.table import AUTO, GENERIC, choose
from hpc_rl.submission.adoption.shell import ASSIGNMENT, KEYWORDS, MARK, Command, Scope, names, options, plain

LAUNCHER, STEP, PLAIN = 3, 2, 1
_IMAGES = names("apptainer singularity")
RUNTIMES = _IMAGES | names("apptainer_wrapper singularity_wrapper shifter podman-hpc docker podman")
_ENVIRONMENTS = names("conda mamba poetry pixi uv")
_PREFIXES = RUNTIMES | _ENVIRONMENTS | names("srun exec env nohup command numactl stdbuf timeout")
"""Commands that start the one after their options."""
_MOST_WORDS = {"env": 9, "ray": 3, **dict.fromkeys((*_ENVIRONMENTS, "timeout"), 1)}
"""Prefix -> how many words without an option it has, such as `run`."""
_SHELLS = names("bash sh eval")
_STARTS = _PREFIXES | _SHELLS | names("ray axolotl trl llamafactory-cli lmf swift") | {name[0] for name in LAUNCHERS}
_PLACING = names(
    "num-machines num-processes machine-rank main-process-ip main-process-port same-network multi-gpu max-restarts "
    "monitor-interval rdzv-backend rdzv-conf role tee log-dir deepspeed-hostfile deepspeed-multinode-launcher "
    "mpirun-hostfile gpu-ids hostfile num-nodes num-gpus include exclude master-addr master-port node-rank launcher "
    "launcher-args no-ssh no-ssh-check force-multi devices main-address main-port"
)
"""Options of launchers that place processes, which the job does."""
_OF_SRUN = names("container-image container-mounts export nodes N")
"""Options of srun for the program."""
_FLAGS = names("standalone multi-gpu use-deepspeed use-fsdp same-network no-python no-local-rank cpu")
"""Options of launchers without a value, for a program that is a variable: `--standalone $SCRIPT`."""
_NO_PROGRAMS = names("-c pip venv ensurepip")


@dataclass
class FoundProgram:
    words: list[str] = field(default_factory=list)
    """As torchrun of the job starts it."""
    typed: list[str] = field(default_factory=list)
    """As the script starts it."""
    rank: int = 0
    """How likely it is the job's program: LAUNCHER, STEP or PLAIN; 0 if it is none."""
    uses_ray: bool = False
    python: str = "python"
    processes: int = 0
    """On each node, as its launcher states; 0 if it does not."""
    env: dict[str, str] = field(default_factory=dict)
    options: list[tuple[str, str | None]] = field(default_factory=list)
    """Of its image's runtime, and those of srun for its image and variables."""
    has_environment: bool = False
    """Whether a command such as `uv run` chooses its Python."""
    before: list[Command] = field(default_factory=list)
    """Commands before it in the same statement or `bash -c`."""
    lost: list[str] = field(default_factory=list)


def name_of(word: str) -> str:
    """Return the name of a program without its folder."""
    return PurePosixPath(MARK.sub("", word)).name


def find_program(words: list[str], scope: Scope, found: FoundProgram | None = None) -> FoundProgram:
    """Return the program that a command starts; one of rank 0 if it starts none in Python or by a launcher.

    Args:
        found: what is known from the commands around this one.
    """
    found, rest = found or FoundProgram(), list(words)
    while rest:
        word, name = rest[0], name_of(rest[0])
        if ASSIGNMENT.match(word):
            key, _, found.env[key] = rest.pop(0).partition("=")
        elif word in KEYWORDS:
            rest = rest[1:]
        elif name in _SHELLS and (inner := _inline(rest)) is not None:
            return first_program(found, scope.run(inner), scope)
        elif name in _PREFIXES or MARK.fullmatch(word) or (name == "ray" and rest[1:3] == ["job", "submit"]):
            end = next((at for at in range(1, len(rest)) if _is_start(rest[at], rest[at - 1], name)), len(rest))
            others = [other for option, other in options(rest[1:end]) if not option and not MARK.search(other or "")]
            if len(others) > _MOST_WORDS.get(name, 0) and name not in RUNTIMES:
                break  # one of them is the program
            _note_prefix(found, name or plain(word), rest[1:end])
            rest = rest[end:]
        else:
            return _started(found, rest)
    found.rank = 0
    return found


def _is_start(word: str, before: str, prefix: str) -> bool:
    """Return whether a word after srun, a container or another prefix is the command that it starts."""
    if before in ("-n", "-p", "--name", "--prefix") or (word == "exec" and prefix in RUNTIMES):
        return False
    is_python = re.fullmatch(r"python[\d.]*|[^-].*\.py", name_of(word)) or (word == "-m" and prefix in _ENVIRONMENTS)
    return bool(is_python) or name_of(word) in _STARTS


def _note_prefix(found: FoundProgram, name: str, words: list[str]) -> None:
    """Note what a command such as srun, with these words, does for the program after them."""
    if name in _IMAGES:
        found.options += [*options(words[words[:1] in (["exec"], ["run"]) : -1]), ("image", "".join(words[-1:]))]
        return
    found.env |= dict(word.split("=", 1) for word in words if ASSIGNMENT.match(word))
    if name == "srun":
        found.rank, own = STEP, list(options(words))
        found.options += [one for one in own if one[0] in _OF_SRUN]
        unknown = [
            plain(value or "") if not option else "--multi-prog"
            for option, value in own
            if option in ("", "multi-prog")
        ]
        found.lost += [f"srun {' '.join(unknown)}: not carried over"] if unknown else []
    elif name in RUNTIMES:
        found.lost.append(f"`{name}`: build its image for Apptainer (hpc-rl image build), and add --image FILE")
    elif name in _ENVIRONMENTS:
        found.has_environment = True
        found.lost.append(f"`{name} run`: set slurm.python to the Python of its environment (.venv/bin/python)")
    elif name == "ray":
        found.uses_ray, found.rank = True, LAUNCHER
        known = ("address", "working-dir", "no-wait", "job-id", "submission-id", "")
        found.lost += [f"ray job submit --{key} {value}" for key, value in options(words) if key not in known]
    elif name.startswith("$"):
        found.rank = max(found.rank, PLAIN)
        found.lost.append(f"{name}: what it does for the program is not known")


def _inline(words: list[str]) -> str | None:
    """Return the text that `bash -c` or `eval` runs."""
    if words[0] == "eval":
        return " ".join(words[1:])
    place = next((index for index, word in enumerate(words) if re.fullmatch(r"-[a-z]*c[a-z]*", word)), len(words))
    return words[place + 1] if place + 1 < len(words) else None


def first_program(found: FoundProgram, commands: Iterable[Command], scope: Scope) -> FoundProgram:
    """Return the first program that some commands start, with the commands before it."""
    before: list[Command] = []
    for command in commands:
        if (inner := find_program(command.words, scope, deepcopy(found))).rank:
            inner.before = before + inner.before
            return inner
        before.append(command)
    found.rank = 0
    return found


def _started(found: FoundProgram, words: list[str]) -> FoundProgram:
    """Complete the program by the words from its launcher or its Python on."""
    found.typed = words = ["python", *words] if words[0] == "-m" or words[0].endswith(".py") else words
    program = Program((name_of(words[0]), *words[1:]))
    command, launcher = list(program.command), launcher_of(program.command)
    row = choose(AUTO, "torchrun", program)
    found.uses_ray |= row is GENERIC and choose(AUTO, "ray", program) is not GENERIC
    if is_python := command[:1] != [program.words[0]]:
        found.python = name_of(words[0]) if MARK.search(words[0]) else words[0]
        found.typed = [found.python, *words[1:]]
    if launcher:
        own, kept, command = _split(command[len(launcher) :])
        sizes = {name: int(value) for name, value in options(own) if value and value.isdecimal()}
        per_node = sizes.get("nproc-per-node") or sizes.get("num-gpus") or sizes.get("devices")
        found.processes = per_node or sizes.get("num-processes", 0) // (sizes.get("num-machines") or 1)
        if len(command) > 1 and MARK.fullmatch(command[0]) and any(word.endswith(".py") for word in command[1:]):
            found.lost.append(f"{' '.join(launcher)} {plain(command.pop(0))}: these options are not known")
        found.rank = LAUNCHER if command and re.search(r"^-m$|\.py$|/|\ue000", command[0]) else 0
        command = [*launcher, *kept, *command] if LAUNCHERS[launcher] else command
    elif is_python:
        found.rank = max(found.rank, PLAIN) if command and not _NO_PROGRAMS.intersection(command[:2]) else 0
    else:
        is_training = row is not GENERIC and row.command(program) != program.words and command[1:2] != ["vllm-serve"]
        found.rank = LAUNCHER if is_training else 0
        command = command[: command.index("--launcher")] if "--launcher" in command else command
    found.words = command
    return found


def _split(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the options of a launcher, those that do more than placing processes, and its program.

    The program begins with -m and a module, a .py file, or what is no value of an option.
    """
    kept, name, is_value = list[str](), "", False
    for number, word in enumerate(words):
        if word in ("-m", "--module"):
            return words[:number], kept, ["-m", *words[number + 1 :]]
        if word.endswith(".py") or not (word.startswith("-") or is_value):
            return words[:number], kept, words[number:]
        if is_value := word.startswith("-"):
            name, equals, _ = word.lstrip("-").replace("_", "-").partition("=")
            is_value = not equals and name not in _FLAGS
        kept += [] if name in _PLACING else [word]
    return words, kept, []
