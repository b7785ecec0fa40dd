"""The parts of a user's script: statements with their variables and programs, and what hpc-rl does instead of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpc_rl.submission.adoption.programs import FoundProgram, find_program, first_program, name_of
from hpc_rl.submission.adoption.shell import ASSIGNMENT, KEYWORDS, MARK, Command, Scope, names, plain, statements

STARTS_RAY = re.compile(r"\bray\s+start\b")
_MESSAGES = names(
    "echo printf date hostname pwd env printenv nvidia-smi rocm-smi set shopt sleep wait clear which type free "
    "lscpu df ls squeue sinfo scontrol sacct true : exit return cat head tail grep tee uname whoami id nproc jobs "
    "disown kill pkill break continue fi done esac"
)
"""Commands that print something, or that order processes."""
_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"\\]?\w")
_SETS = names("declare typeset readonly local read mapfile readarray getopts")
_TESTS = names("[ [[ test case for select")
_SUPERFLUOUS = re.compile(
    r"\bscontrol\s+show\s+hostname|\bhostname\s+-|\bMASTER_(ADDR|PORT)=|\bRDZV_\w+=|\bSLURM_(JOB_|STEP_)?NODELIST\b"
    r"|\b(LOCAL_|GROUP_|NODE_)?(WORLD_SIZE|RANK)=|[Hh]ost_?file"
    r"|\bray\s+(start|stop|status|health-check|list)\b|\bRAY_ADDRESS=|/tmp/ray|\bray\.init\b"
    r"|\b(NCCL|GLOO|TP|MCCL)_SOCKET_IFNAME=|\bRAY_NETWORK_INTERFACE="
    r"|^[ \t]*trap\s|\bscontrol\s+requeue\b|\bsbatch\b[^\n]{0,40}?(\$\{?0|BASH_SOURCE)|SLURM_RESTART_COUNT"
    r"|\bOMP_NUM_THREADS=\D|\bSRUN_CPUS_PER_TASK=|\bSLURM_CPU_BIND\w*=|\b(CUDA|ROCR|HIP)_VISIBLE_DEVICES=",
    re.M,
)
"""Addresses, Ray on every node, network interfaces, signals and requeueing, and the CPUs and GPUs of processes."""


@dataclass
class ScriptPart:
    """A statement of a script, or a command in front of its program."""

    number: int
    """Of its first line."""
    text: str
    commands: list[Command] = field(default_factory=list)
    is_compound: bool = False
    """Whether it is a loop, a condition or a function."""
    function: str = ""
    """The function that it defines."""
    defines: dict[str, str | list[str] | None] = field(default_factory=dict)
    """Variables that it sets, and their values, and the function that it defines."""
    exports: bool = False
    """Whether it only exports variables."""
    is_superfluous: bool = False
    program: FoundProgram = field(default_factory=FoundProgram)

    @property
    def words(self) -> list[str]:
        """The words of the first command; empty if it is no command by itself."""
        return self.commands[0].words if self.commands and not self.is_compound else []

    @property
    def name(self) -> str:
        return name_of(self.words[0]) if self.words else ""

    @property
    def place(self) -> str:
        first, *others = plain(self.text).splitlines()
        first = first.rstrip("\\").strip()
        return f"line {self.number}, `{first[:80]}{' ...' if others or len(first) > 80 else ''}`"

    @property
    def is_beside(self) -> bool:
        return bool(self.commands) and self.commands[-1].operator == "&"

    @property
    def is_idle(self) -> bool:
        """Whether it only prints messages, tests, and sets what other parts may need."""
        labels = ("|", ")") if self.is_compound and "case" in self.text else ()
        return bool(self.function) or all(
            _is_idle(one) or (len(one.words) == 1 and one.operator in labels) for one in self.commands
        )


def read_parts(script: str, scope: Scope) -> Iterator[ScriptPart]:
    """Yield the parts of a script in their order. The variables of the scope have their last values afterwards."""
    superfluous: set[str] = set()  # variables of which only such parts are made
    for number, text in statements(script):
        part = read_part(number, text, scope)
        if not part.program.rank:
            used = rf"\$\{{?({'|'.join(map(re.escape, superfluous))})\b"
            part.is_superfluous = part.is_superfluous or bool(
                superfluous
                and not part.is_beside
                and (re.search(used, text) or (part.exports and superfluous & part.defines.keys()))
            )
            superfluous |= {name for name in part.defines if len(name) > 1 and part.is_superfluous}
        yield part


def read_part(number: int, text: str, scope: Scope) -> ScriptPart:
    """Return a part, and set its variables."""
    definition = re.match(r"\s*(?:function\s+([\w-]+)|([\w-]+)\s*\(\))", text)
    part, first = ScriptPart(number, text), text.splitlines()[0]
    part.function = (definition[1] or definition[2]) if definition else ""
    part.is_compound = bool(definition or re.match(r"(if|while|until|for|case|select|\[\[?|\{|test)\s|\(", text))
    if part.is_compound:
        part.defines = dict.fromkeys(re.findall(r"\bfor\s+([A-Za-z_]\w*)\s", text))
        part.defines |= {part.function: None} if definition else {}
        for name in part.defines:
            scope.forget(name, first)
        for command in scope.commands(text):
            part.defines |= dict.fromkeys(names := scope.assigned(command))
            for name in names:
                if (value := scope.values.get(name)) and not MARK.fullmatch(str(value)):
                    scope.doubt(name, value, f"line {number} may change it")
                else:
                    scope.forget(name, first)
        part.commands = list(scope.commands(text))
        programs = [find_program(one.words, scope) for one in part.commands]
        part.program = max(programs, key=lambda one: one.rank, default=part.program)
    else:
        for command in scope.run(text if "<<" not in text else first):
            part.defines |= {name: scope.values.get(name) for name in scope.assigned(command)}
            part.commands.append(command)
            if "<<" not in text:  # a comment may follow
                part.text = text[: text.rindex(command.text) + len(command.text)]
        part.exports = all(one.words[0] == "export" for one in part.commands)
        part.program = first_program(FoundProgram(), part.commands, scope)
    part.is_superfluous = not part.program.rank and is_superfluous(text)
    return part


def is_superfluous(text: str) -> bool:
    """Return whether a text of bash does what hpc-rl does."""
    return bool(_SUPERFLUOUS.search(text))


def _is_idle(command: Command) -> bool:
    """Return whether a command only tests, prints, or sets a variable of the script."""
    words = [word for word in command.words if word not in KEYWORDS]
    if not words or _TESTS.intersection(command.words) or words[0].startswith("-") or words[-1] == "]]":
        return True
    is_message = name_of(words[0]) in _MESSAGES and not _writes_file(command.text)
    prints = is_message or (name_of(words[0]) == "srun" and words[-1] in _MESSAGES)
    return prints or bool(_SETS.intersection(words[:2])) or all(map(ASSIGNMENT.match, words))


def _writes_file(text: str) -> bool:
    """Return whether a command that prints something writes a file with it, which is no log."""
    files = re.findall(r">\s*([^\s&|;>(]+)", text)
    return bool(_HERE_DOCUMENT.search(text)) or any(
        not re.search(r"(?i)log|\.(out|err|txt)\b|/dev/", name) for name in files
    )
