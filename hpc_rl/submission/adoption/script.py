"""From a user's sbatch script to the job of hpc-rl that does the same. The script is read, never run.

Every statement gets one of these ends: it is the program, a setting of the job, a line of the set-up, superfluous, or listed as
lost. Only messages, and variables that nothing needs, disappear without a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.run_dir import ENV_RUN_DIR
from hpc_rl.software.secrets import names_secret
from hpc_rl.submission.adoption.directives import Request, request_of, sbatch_options
from hpc_rl.submission.adoption.programs import LAUNCHER, RUNTIMES, STEP, Program, find_program, name_of
from hpc_rl.submission.adoption.shell import KEYWORDS, MARK, OF_SHELL, Array, Command, Scope, plain, statements

_RANKS = "addresses, ports and ranks"
_SUPERFLUOUS = {
    _RANKS: r"\bscontrol\s+show\s+hostname|\bhostname\s+-|MASTER_(ADDR|PORT)=|\b(WORLD_SIZE|(NODE_|LOCAL_|GROUP_)?RANK)="
    r"|LOCAL_WORLD_SIZE=|RDZV_\w+=|\bSLURM_(JOB_|STEP_)?NODELIST\b|[Hh]ost_?file",
    "Ray on every node": r"\bray\s+(start|stop|status|health-check|list)\b|\bRAY_ADDRESS=|/tmp/ray|\bray\.init\b",
    "the network interface (slurm.interface names another)": r"\b(NCCL|GLOO|TP|MCCL)_SOCKET_IFNAME=|\bRAY_NETWORK_INTERFACE=",
    "signals, saving and requeueing": r"^\s*trap\s|\bscontrol\s+requeue\b|\bsbatch\b.*(\$\{?0|BASH_SOURCE)|SLURM_RESTART_COUNT",
    "threads, CPUs and GPUs of the processes": r"\bOMP_NUM_THREADS=\D|\bSRUN_CPUS_PER_TASK=|\bSLURM_CPU_BIND\w*="
    r"|\b(CUDA|ROCR|HIP)_VISIBLE_DEVICES=",
}
"""What hpc-rl does -> pattern of statements that do it by hand."""
_MESSAGES = frozenset(
    "echo printf date hostname pwd env printenv nvidia-smi rocm-smi set shopt sleep wait clear which type free lscpu df ls squeue "
    "sinfo scontrol sacct true : exit return cat head tail grep tee lsb_release uname whoami id nproc jobs disown kill pkill".split()
)
"""Commands that print something, or that order processes."""
_DECLARING = frozenset("export declare typeset readonly local".split())
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_LOOP = re.compile(r"\bfor\s+([A-Za-z_]\w*)\s")
_READING = ("read", "mapfile", "readarray", "getopts")
_OWN_ARGUMENTS = re.compile(r"\$(?:\{?[0-9@*#]|\{?BASH_SOURCE)")
_OF_SRUN = frozenset(
    "nodes ntasks ntasks-per-node nodelist jobid job-id wait kill-on-bad-exit K cpu-bind label l unbuffered u output o error e c "
    "cpus-per-task gpus G gpus-per-node gpus-per-task gres gres-flags gpu-bind accel-bind mem mem-bind overlap exclusive exact mpi "
    "distribution m hint time t verbose v quiet Q partition p account A threads-per-core overcommit O job-name J export".split()
)
"""Options of srun that place processes, or that the job's own step has."""


@dataclass
class _Part:
    """A command, or a statement such as a loop."""

    number: int
    text: str
    words: list[str] = field(default_factory=list)
    """Empty for loops, conditions and functions."""
    operator: str = ""
    defines: dict[str, Any] = field(default_factory=dict)
    """Variables that it sets (name -> value), and the function that it defines."""
    exports: bool = False
    only_prints: bool = False
    uses: set[str] = field(default_factory=set)
    """Variables of which its words are made."""
    why_superfluous: str = ""
    program: Program = field(default_factory=Program)

    @property
    def place(self) -> str:
        first, *others = plain(self.text).splitlines()
        return (
            f"line {self.number}, `{first.rstrip(chr(92)).strip()[:80]}{' ...' if others or len(first) > 80 else ''}`"
        )


@dataclass
class Adoption:
    """A script as a job of hpc-rl."""

    kind: str
    request: Request
    program: list[str]
    folder: str = ""
    """In which the job is submitted; empty for the present one."""
    profile: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    superfluous: dict[str, list[str | int]] = field(default_factory=dict)
    """What hpc-rl does -> options, and lines of the script."""


def adopt(script: str, name: str) -> Adoption:
    """Return the job that a script describes.

    Args:
        name: of its file, for messages.

    Raises:
        UserError: it is no sbatch script, hpc-rl has rendered it, or it starts no program in Python.
    """
    if not re.match(r"#!.*sh\b", script) and not script.startswith("#SBATCH"):
        raise UserError(f"{name} is no sbatch script: its first line is not #!/bin/bash")
    if f"export {ENV_RUN_DIR}=" in script:
        raise UserError(
            f"{name} was rendered by hpc-rl: submit it with hpc-rl submit KIND --script {name}, or sbatch {name}"
        )
    request = request_of(list(sbatch_options(script)))
    scope = Scope(request.variables())
    if not re.search(r"(?m)^\s*cd\s", script) and not request.folder:
        scope.values["SLURM_SUBMIT_DIR"] = "."
    parts = list(_parts(script, scope))
    main = _choose(parts, name)
    return _Walk(script, request, scope, parts).job(main)


def _parts(script: str, scope: Scope) -> Iterator[_Part]:
    tainted: dict[str, str] = {}
    for statement in statements(script):
        scope.looked_up = set()
        if statement.is_compound:
            part = _Part(statement.number, statement.text)
            names = set(_LOOP.findall(statement.text))
            for name in names:
                scope.forget(name, statement.text.splitlines()[0])
            for command in scope.commands(statement.text):
                for name in _assigned(command):
                    names.add(name)
                    scope.doubt(name, statement.text.splitlines()[0], statement.number)
            commands = scope.commands(statement.text)
            part.program = max(
                (find_program(one.words, scope) for one in commands), key=lambda one: one.rank, default=Program()
            )
            part.uses = scope.used()
            part.defines = dict.fromkeys({statement.defines} - {""} or names)
            part.only_prints = all(_is_message(command.words) for command in commands)
            part.why_superfluous = _why_superfluous(part, tainted)
            yield part
            continue
        for command in _grouped(scope.commands(statement.text), statement.text):
            number = statement.number + statement.text[: statement.text.find(command.text)].count("\n")
            part = _part(number, command, scope)
            part.why_superfluous = _why_superfluous(part, tainted)
            yield part


def _grouped(commands: Sequence[Command], text: str) -> Iterator[Command]:
    """Yield the commands of a statement; those that depend on each other are one, with the words of the first."""
    start, words = 0, None
    for command in commands:
        words = words or command.words
        end = text.find(command.text, start) + len(command.text)
        if command.operator in ("|", "|&", "||"):
            continue
        yield Command(
            words,
            text[text.find(command.text, start) if words is command.words else start : end].strip(),
            command.operator,
        )
        start, words = end + len(command.operator), None


def _part(number: int, command: Command, scope: Scope) -> _Part:
    part = _Part(number, command.text, command.words, command.operator)
    words = command.words
    if words[0] in _DECLARING:
        part.exports = words[0] == "export" or "-x" in words
        words = [word for word in words[1:] if not word.startswith("-")]
    if all(_ASSIGNMENT.match(word) or words is not command.words for word in words):
        for word in words:
            key = scope.assign(word) if _ASSIGNMENT.match(word) else word
            part.defines[key] = scope.values.get(key)
        part.exports = part.exports and bool(words)
        return part
    for name in _assigned(command):
        scope.forget(name, command.text)
        part.defines[name] = None
    part.program = find_program(words, scope)
    part.uses = scope.used()
    return part


def _assigned(command: Command) -> Iterator[str]:
    """Yield the variables that a command sets, other than for a program that it starts."""
    words = [word for word in command.words if word not in KEYWORDS]
    if words[:1] and words[0] in _READING or (words[1:2] and words[1] in _READING and words[0].startswith("IFS=")):
        yield from (word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word) and word not in _READING)
    elif words and (words[0] in _DECLARING or all(map(_ASSIGNMENT.match, words))):
        yield from (re.split(r"\+?=", word)[0] for word in words if _ASSIGNMENT.match(word))


def _why_superfluous(part: _Part, tainted: dict[str, str]) -> str:
    """Return what hpc-rl does instead of a part, and remember the variables that it sets.

    Args:
        tainted: variable of which superfluous parts are made -> the same.
    """
    if part.program.rank:
        return ""
    found = next((what for what, pattern in _SUPERFLUOUS.items() if re.search(pattern, part.text, re.M)), "")
    for name, what in {} if found else tainted.items():
        if re.search(rf"\$\{{?{name}\b", part.text) or (name in part.defines and part.exports):
            found = what
    if found:
        tainted.update(dict.fromkeys((name for name in part.defines if len(name) > 1), found))
    return found


def _is_message(words: list[str]) -> bool:
    """Return whether a command of a loop or condition is none, a test, or prints something."""
    first = next((word for word in words if word not in KEYWORDS - {"[[", "[", "test"}), "")
    return first in ("", "[[", "[", "test", "fi", "done", "break", "continue", *_MESSAGES)


def _choose(parts: list[_Part], name: str) -> _Part:
    """Return the part with the job's program: the first one with a launcher, or else with srun, or else with Python."""
    first_ray = next((index for index, part in enumerate(parts) if re.search(r"\bray\s+start\b", part.text)), 0)
    programs = [part for part in parts[first_ray:] if part.program.rank]
    if not programs:
        steps = [
            part.place for part in parts if part.words and part.words[0] in ("srun", "bash", "sh", "mpirun", "exec")
        ]
        raise UserError(
            f"{name} has no line that starts a program in Python by torchrun, accelerate launch, deepspeed, python or ray job submit"
            + (f"; {steps[-1]} starts none that can be seen" if steps else "")
        )
    return max(
        programs,
        key=lambda part: (part.operator != "&" or part.program.rank == LAUNCHER, part.program.rank, bool(part.words)),
    )


class _Walk:
    """From the parts of a script to a job."""

    def __init__(self, script: str, request: Request, scope: Scope, parts: list[_Part]) -> None:
        self.request, self.scope, self.parts = request, scope, parts
        uses_ray = any(re.search(r"\bray\s+start\b", part.text) for part in parts)
        self.result = Adoption(
            "ray" if uses_ray else "torchrun", request, [], str(PurePosixPath(request.folder)), lost=list(request.lost)
        )
        self.slurm: dict[str, Any] = {**request.slurm}
        self.cache: dict[str, Any] = {}
        self.env: dict[str, str] = {}
        self.setup: list[_Part] = []
        self.modules: list[str] = []
        self.module_paths: list[str] = []
        if re.match(r"#!.*\s-\w*l", script):
            self.slurm["login_shell"] = True
        for option, what in request.superfluous:
            self.result.superfluous.setdefault(what, []).append(option)
        for number, line in enumerate(script.splitlines(), 1):
            if line.startswith("#SBATCH") and number > parts[0].number:
                self.result.lost.append(f"line {number}, {line}: sbatch ignores it too, because it is below a command")

    def job(self, main: _Part) -> Adoption:
        result, program, self.main = self.result, main.program, main
        result.kind = "ray" if program.uses_ray else result.kind
        at = next(index for index, part in enumerate(self.parts) if part is main)
        for part in self.parts[:at]:
            self._before(part)
        if not main.words:
            result.checks.append(
                f"{main.place}: the program is one command here, without the loop, condition or function around it"
            )
        inner = [_part(main.number, command, self.scope) for command in program.before]
        for part in inner:
            part.why_superfluous = _why_superfluous(part, {})
            if program.container or any(name == "container-image" for name, _ in program.step):
                self._inside(part)
            else:
                self._before(part)
        for part in self.parts[at + 1 :]:
            self._after(part)
        for key, value in program.env.items():
            if not re.search("|".join(_SUPERFLUOUS.values()), f"{key}={value}"):
                self._export(main, key, value)
        self._containers(program)
        result.lost += [f"line {main.number}, {what}" for what in program.lost]
        self._processes(program)
        self._write(program)
        return result

    def _before(self, part: _Part) -> None:
        words = part.words
        name = name_of(words[0]) if words else ""
        if part.why_superfluous:
            self._note_superfluous(part)
        elif part.program.rank == STEP or (part.operator == "&" and name not in _MESSAGES):
            what = (
                "a step before the program; lines of set-up run on the first node"
                if part.operator != "&"
                else "it runs beside the program"
            )
            self.result.lost.append(f"{part.place}: {what}")
        elif part.program.rank and name in RUNTIMES:
            self.result.lost.append(f"{part.place}: before the program, in an image")
        elif part.program.rank == LAUNCHER:
            self.result.lost.append(f"{part.place}: another program; submit it too, and this one with --after RUN")
        elif name in ("module", "ml"):
            self._module(part)
        elif name == "cd" and len(words) > 1:
            self._cd(part)
        elif part.exports:
            for key, value in part.defines.items():
                self._export(part, key, value)
        elif (
            name in _MESSAGES
            or part.only_prints
            or part.defines
            or (name == "srun" and not part.program.rank and words[-1] in _MESSAGES)
        ):
            return
        elif name in ("sbatch", "scancel", "srun", "mpirun", "docker", "podman"):
            what = (
                "a step before the program; lines of set-up run on the first node"
                if name == "srun"
                else "not a set-up line"
            )
            self.result.lost.append(f"{part.place}: {what}")
        else:
            self._set_up(part)

    def _after(self, part: _Part) -> None:
        name = name_of(part.words[0]) if part.words else ""
        if part.why_superfluous:
            self._note_superfluous(part)
        elif part.program.rank:
            self.result.lost.append(f"{part.place}: another program; submit it too, with --after RUN")
        elif name not in _MESSAGES and not part.defines:
            self.result.lost.append(
                f"{part.place}: below the program; slurm.epilogue has lines for the end of each attempt"
            )

    def _inside(self, part: _Part) -> None:
        name = part.words[0] if part.words else ""
        if part.why_superfluous:
            self._note_superfluous(part)
        elif part.exports or (name not in _MESSAGES and not part.defines):
            self.result.lost.append(f"{part.place}: inside the image, which runs nothing but the program")

    def _note_superfluous(self, part: _Part) -> None:
        self.result.superfluous.setdefault(part.why_superfluous, []).append(part.number)

    def _set_up(self, part: _Part) -> None:
        if _OWN_ARGUMENTS.search(part.text) and not any(name in part.text.split("(")[0] for name in part.defines):
            self.result.lost.append(f"{part.place}: a set-up line has no arguments of the script")
        else:
            self.setup.append(part)

    def _module(self, part: _Part) -> None:
        verb, names = (part.words[1], part.words[2:]) if part.words[0] == "module" else ("load", part.words[1:])
        if part.words[0] == "ml" and names and names[0] in ("load", "purge", "use", "list", "unload", "swap"):
            verb, names = names[0], names[1:]
        if verb in ("list", "avail", "spider", "show"):
            return
        plain = not self.setup and not any(MARK.search(name) or name.startswith("-") for name in names)
        if verb in ("load", "add") and plain:
            self.modules += names
        elif verb == "use" and plain and not self.modules:
            self.module_paths += names
        else:
            self._set_up(part)

    def _cd(self, part: _Part) -> None:
        folder = part.words[-1]
        if folder.startswith(mark_of := "\ue000SLURM_SUBMIT_DIR\ue001"):
            folder, self.result.folder = folder.removeprefix(mark_of).lstrip("/"), self.request.folder
        if any(name not in OF_SHELL for name in MARK.findall(folder)):
            self.result.lost.append(f"{part.place}: submit in this folder")
        else:
            self.result.folder = str(PurePosixPath(self.result.folder) / folder)

    def _export(self, part: _Part, key: str, value: Any) -> None:
        if isinstance(value, str) and names_secret(key) and not MARK.search(value):
            self.result.lost.append(f"line {part.number}, {key}: a secret; export it in your shell, which jobs inherit")
        elif key == "HF_HOME" and isinstance(value, str) and set(MARK.findall(value)) <= set(OF_SHELL):
            self.cache["hf_home"] = plain(value or "")
        elif isinstance(value, str) and not isinstance(value, Array) and set(MARK.findall(value)) <= set(OF_SHELL):
            if key not in self.main.uses or " " not in value:  # else a part of the command
                self.env[key] = plain(value)
        elif value is not None and part not in self.setup:
            self._set_up(part)

    def _containers(self, program: Program) -> None:
        found: dict[str, Any] = {}
        for name, value in program.step:
            if name == "container-image":
                self.request.flags["image"], found["runtime"] = value or "", "pyxis"
            elif name == "container-mounts":
                found["binds"] = [plain(bind) for bind in (value or "").split(",")]
            elif name == "export" and value and "=" in value:
                self.env |= dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair)
            elif name not in _OF_SRUN and name not in ("no-container-mount-home", "container-writable"):
                self.result.lost.append(f"srun --{name}" + (f"={plain(value or '')}" if value else ""))
            elif (
                name == "nodes"
                and value
                and value.isdigit()
                and int(value) != self.request.nodes
                and self.result.kind != "ray"
            ):
                self.result.lost.append(
                    f"srun --nodes={value}: the job's program runs on all {self.request.nodes} nodes"
                )
        for name, value in program.container:
            if name == "image":
                self.request.flags["image"] = value or ""
            elif name in ("bind", "B"):
                found.setdefault("binds", []).extend(plain(bind) for bind in (value or "").split(","))
            elif name == "rocm":
                found["gpu"] = "rocm"
            elif name == "env" and value and "=" in value:
                self.env |= dict(pair.split("=", 1) for pair in value.split(","))
            elif name not in ("nv", "e", "cleanenv"):
                option = f"{'-' if len(name) == 1 else '--'}{name}"
                found.setdefault("options", []).extend(
                    [option] if value is None else [f"{option}={plain(value or '')}"]
                )
        if found:
            self.result.profile["container"] = found

    def _processes(self, program: Program) -> None:
        request, given = self.request, program.processes
        stated = int(given) if given and given.isdigit() else request.tasks if request.tasks > 1 else None
        if request.gpus == 0:
            self.result.profile["trainer"] = {"device": "cpu"}
        elif request.gpus is None:
            self.slurm["leave_out"] = ["gpus-per-node"]
            self.result.checks.append(
                "the script requests no GPUs: --gpus-per-node is the number of processes on a node"
            )
        elif stated not in (None, request.gpus) and self.result.kind == "torchrun":
            self.result.checks.append(
                f"the script starts {stated} processes on a node, and hpc-rl one for each of {request.gpus} GPUs"
            )
        self.request.flags |= {"nodes": str(request.nodes), "gpus-per-node": str(request.gpus or stated or 1)}
        if self.result.kind == "torchrun" and program.rank == STEP and request.tasks > 1:
            self.result.checks.append(
                "srun started the ranks, and now torchrun does: the program has to read RANK, LOCAL_RANK and WORLD_SIZE, and not "
                "SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS"
            )

    def _write(self, program: Program) -> None:
        result, slurm, has_image = self.result, self.slurm, "image" in self.request.flags
        result.program = program.words if result.kind == "torchrun" else [program.python, *program.words]
        if setup := self._setup_lines():
            slurm["setup"] = setup
        slurm |= {
            key: value
            for key, value in (("module_paths", self.module_paths), ("modules", self.modules), ("env", self.env))
            if value
        }
        if has_image:
            result.checks.append("hpc-rl has to be installed in the image (hpc-rl image build)")
        elif (setup or self.modules) and not program.has_environment:
            slurm["python"] = program.python
            result.checks.append(
                f"hpc-rl has to be installed in the environment of the program: {program.python} -m pip install hpc-rl"
            )
        elif not program.has_environment:
            result.checks.append(
                "the job uses the Python of this hpc-rl; slurm.python names another one that has hpc-rl"
            )
        if setup:
            result.checks.append("a line of `setup` that fails ends the job: end it with `|| true` if it may fail")
        result.profile = {
            name: found for name, found in (("slurm", slurm), ("cache", self.cache)) if found
        } | result.profile
        words = [*result.program, *self.request.flags.values(), result.folder]
        result.checks += [doubt for key, doubt in self.scope.doubts.items() if key in self.main.uses]
        self._name_unknown(words)

    def _setup_lines(self) -> list[str]:
        """Return the lines of the set-up, with those that define what they use."""
        kept, needed = {id(part) for part in self.setup}, "\n".join(part.text for part in self.setup)
        for part in reversed(self.parts):
            names = [name for name in part.defines if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w=-])", needed)]
            if id(part) not in kept and names and not part.why_superfluous and not part.program.rank and self.setup:
                if self.parts.index(part) < max(self.parts.index(one) for one in self.setup if one in self.parts):
                    kept.add(id(part))
                    needed += "\n" + part.text
                    self.env = {key: value for key, value in self.env.items() if key not in names}
        inner = [part for part in self.setup if part not in self.parts]
        return [_tidy(part.text) for part in [*self.parts, *inner] if id(part) in kept]

    def _name_unknown(self, words: Sequence[str]) -> None:
        names = dict.fromkeys(name for word in words for name in MARK.findall(word))
        for name in names:
            source = self.scope.sources.get(name)
            if name == "@" or name[0].isdigit():
                line = "arguments of the script are arguments of these lines, too: bash FILE ARGUMENTS"
            elif name.startswith("SLURM_"):
                line = f"{name} is known in the job only: replace it below"
            elif source:
                line = (
                    f"{name}, `{plain(source)}` in the script, is not known: set it in your shell, or replace it below"
                )
            elif name not in (*OF_SHELL, "**"):
                line = f"{name} is not set in the script: set it in your shell, or replace it below"
            else:
                continue
            if line not in self.result.checks:
                self.result.checks.append(line)


def _tidy(text: str) -> str:
    """Return lines of the set-up in a form that YAML shows as they are."""
    return text if "<<" in text else re.sub(r"[ \t]+$", "", text.expandtabs(4), flags=re.M)
