"""The parts of a user's script: commands with their variables and programs, and what hpc-rl does instead of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hpc_rl.submission.adoption.programs import FoundProgram, find_program, name_of
from hpc_rl.submission.adoption.shell import KEYWORDS, Command, Scope, Statement, names, plain, statements

STARTS_RAY = re.compile(r"\bray\s+start\b")
MESSAGES = names(
    "echo printf date hostname pwd env printenv nvidia-smi rocm-smi set shopt sleep wait clear which type free "
    "lscpu df ls squeue sinfo scontrol sacct true : exit return cat head tail grep tee uname whoami id nproc jobs "
    "disown kill pkill break continue fi done esac"
)
"""Commands that print something, or that order processes."""
_SUPERFLUOUS = {
    "addresses, ports and ranks": r"\bscontrol\s+show\s+hostname|\bhostname\s+-|\bMASTER_(ADDR|PORT)=|\bRDZV_\w+="
    r"|\b(LOCAL_|GROUP_|NODE_)?(WORLD_SIZE|RANK)=|\bSLURM_(JOB_|STEP_)?NODELIST\b|[Hh]ost_?file",
    "Ray on every node": r"\bray\s+(start|stop|status|health-check|list)\b|\bRAY_ADDRESS=|/tmp/ray|\bray\.init\b",
    "the network interface (slurm.interface names another)": r"\b(NCCL|GLOO|TP|MCCL)_SOCKET_IFNAME="
    r"|\bRAY_NETWORK_INTERFACE=",
    "signals, saving and requeueing": r"^\s*trap\s|\bscontrol\s+requeue\b|\bsbatch\b.*(\$\{?0|BASH_SOURCE)"
    r"|SLURM_RESTART_COUNT",
    "threads, CPUs and GPUs of the processes": r"\bOMP_NUM_THREADS=\D|\bSRUN_CPUS_PER_TASK=|\bSLURM_CPU_BIND\w*="
    r"|\b(CUDA|ROCR|HIP)_VISIBLE_DEVICES=",
}
"""What hpc-rl does -> pattern of statements that do it by hand."""
HERE_DOCUMENT = re.compile(r"<<-?\s*['\"\\]?\w")
_DECLARING = ("export", "declare", "typeset", "readonly", "local")
_READING = ("read", "mapfile", "readarray", "getopts")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")


@dataclass
class ScriptPart:
    """A command, or a statement such as a loop."""

    number: int
    """Of its line."""
    text: str
    words: list[str] = field(default_factory=list)
    """Empty for loops, conditions and functions."""
    operator: str = ""
    defines: dict[str, str | list[str] | None] = field(default_factory=dict)
    """Variables that it sets (name -> value), and the function that it defines."""
    exports: bool = False
    only_sets: bool = False
    """Whether it is a loop or a condition that sets variables and prints messages only, or defines a function."""
    replaced_by: str = ""
    """What hpc-rl does instead of it, if so."""
    program: FoundProgram = field(default_factory=FoundProgram)

    @property
    def name(self) -> str:
        return name_of(self.words[0]) if self.words else ""

    @property
    def place(self) -> str:
        first, *others = plain(self.text).splitlines()
        first = first.rstrip("\\").strip()
        return f"line {self.number}, `{first[:80]}{' ...' if others or len(first) > 80 else ''}`"


def read_parts(script: str, scope: Scope) -> Iterator[ScriptPart]:
    """Yield the parts of a script in their order. The variables of the scope have their last values afterwards."""
    tainted: dict[str, str] = {}
    for statement in statements(script):
        commands = [] if statement.is_compound else _commands(statement, scope)
        parts = (simple(number, command, scope) for number, command in commands)
        for part in [_compound(statement, scope)] if statement.is_compound else parts:
            part.replaced_by = replaced_by(part, tainted)
            yield part


def _compound(statement: Statement, scope: Scope) -> ScriptPart:
    part, first = ScriptPart(statement.number, statement.text), statement.text.splitlines()[0]
    names = set(re.findall(r"\bfor\s+([A-Za-z_]\w*)\s", statement.text))
    for name in names:
        scope.forget(name, first)
    for command in scope.commands(statement.text):
        for name in _assigned(command):
            names.add(name)
            scope.doubt(name, first, statement.number)
    commands = list(scope.commands(statement.text))
    programs = [find_program(one.words, scope) for one in commands]
    part.program = max(programs, key=lambda one: one.rank, default=part.program)
    part.defines = dict.fromkeys({statement.defines} if statement.defines else names)
    has_labels = bool(re.search(r"\bcase\b", statement.text))
    part.only_sets = bool(statement.defines) or all(_does_nothing(one, has_labels) for one in commands)
    return part


def _does_nothing(command: Command, has_labels: bool) -> bool:
    """Return whether a command in a loop or condition only tests, prints, or sets a variable of the script.

    Args:
        has_labels: the statement has a `case`, whose labels look like commands.
    """
    words = [word for word in command.words if word not in KEYWORDS - {"[", "[[", "test", "case", "for", "select"}]
    is_label = has_labels and len(words) == 1 and command.operator in ("|", ")")
    is_test = words[:1] and (words[0].startswith("-") or words[-1] in ("]", "]]"))  # a part of one, after ||
    prints = is_test or not words or (words[0] in MESSAGES and not writes_file(command.text))
    return bool(prints) or is_label or words[0] in KEYWORDS or all(map(_ASSIGNMENT.match, words))


def writes_file(text: str) -> bool:
    """Return whether a command that prints something writes a file with it, which is no log."""
    return bool(HERE_DOCUMENT.search(text)) or any(
        not re.search(r"(?i)log|\.(out|err|txt)\b|/dev/", name) for name in re.findall(r">\s*([^\s&|;>(]+)", text)
    )


def _commands(statement: Statement, scope: Scope) -> Iterator[tuple[int, Command]]:
    """Yield line and command; commands that depend on each other are one, with the words of the first."""
    text, start, first = statement.text, 0, None
    if HERE_DOCUMENT.search(text):
        first_line = next(scope.commands(text.splitlines()[0]))
        yield statement.number, replace(first_line, text=text)
        return
    for command in scope.commands(text):
        begin = text.find(command.text, start)
        first = first or (begin, command.words)
        start = begin + len(command.text)
        if command.operator not in ("|", "|&", "||"):
            number = statement.number + text[: first[0]].count("\n")
            yield number, Command(first[1], text[first[0] : start].strip(), command.operator)
            first = None


def simple(number: int, command: Command, scope: Scope) -> ScriptPart:
    """Return the part that is one command, and set its variables."""
    part, words = ScriptPart(number, command.text, command.words, command.operator), command.words
    if words[0] in _DECLARING:
        part.exports = words[0] == "export" or "-x" in words
        words = [word for word in words[1:] if not word.startswith("-")]
    if words is not command.words or all(map(_ASSIGNMENT.match, words)):
        for word in words:
            name = scope.assign(word) if _ASSIGNMENT.match(word) else word
            part.defines[name] = scope.values.get(name)
        return part
    for name in _assigned(command):
        scope.forget(name, command.text)
        part.defines[name] = None
    part.program = find_program(words, scope)
    return part


def _assigned(command: Command) -> Iterator[str]:
    """Yield the variables that a command sets, other than for a program that it starts."""
    words = [word for word in command.words if word not in KEYWORDS]
    if any(word in _READING for word in words[:2]):
        yield from (word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word) and word not in _READING)
    elif words and (words[0] in _DECLARING or all(map(_ASSIGNMENT.match, words))):
        yield from (re.split(r"\+?=", word)[0] for word in words if _ASSIGNMENT.match(word))


def replaced_by(part: ScriptPart, tainted: dict[str, str]) -> str:
    """Return what hpc-rl does instead of a part; empty if nothing.

    Args:
        tainted: variable of which only such parts are made -> what hpc-rl does. Those of this part are added.
    """
    if part.program.rank:
        return ""
    found = replaced_text(part.text)
    for name, what in {} if found else tainted.items():
        if re.search(rf"\$\{{?{re.escape(name)}\b", part.text) or (part.exports and name in part.defines):
            found = what
    if found:
        tainted.update(dict.fromkeys((name for name in part.defines if len(name) > 1), found))
    return found


def replaced_text(text: str) -> str:
    """Return what hpc-rl does instead of a text of bash; empty if nothing."""
    return next((what for what, pattern in _SUPERFLUOUS.items() if re.search(pattern, text, re.M)), "")


def first_ray(parts: Sequence[ScriptPart]) -> int | None:
    """Return the index of the part that starts Ray first."""
    return next((index for index, part in enumerate(parts) if STARTS_RAY.search(part.text)), None)
