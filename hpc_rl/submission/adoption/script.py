"""From a user's sbatch script to the job of hpc-rl that does the same. The script is read, never run.

Every part of it gets one of these ends: it is the program, a setting of the job, a line of the set-up, superfluous, or
listed as lost. Only messages, and variables that nothing needs, disappear without a line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.run_dir import ENV_RUN_DIR
from hpc_rl.software.secrets import names_secret
from hpc_rl.submission.adoption.directives import Adoption, adopt_options, sbatch_options
from hpc_rl.submission.adoption.parts import (
    MESSAGES,
    ScriptPart,
    first_ray,
    read_parts,
    replaced_by,
    replaced_text,
    simple,
    writes_file,
)
from hpc_rl.submission.adoption.programs import LAUNCHER, PLAIN, RUNTIMES, STEP, FoundProgram
from hpc_rl.submission.adoption.shell import MARK, OF_SHELL, Scope, mark, names, plain

_STEP = "a step before the program; a line of set-up runs on the first node only"
_OF_SRUN = names(
    "nodes ntasks ntasks-per-node nodelist jobid wait kill-on-bad-exit K cpu-bind label l unbuffered u output o "
    "error e c cpus-per-task gpus G gpus-per-node gpus-per-task gres gres-flags gpu-bind accel-bind mem mem-bind "
    "overlap exclusive exact mpi distribution m hint time t verbose v quiet Q partition p account A "
    "threads-per-core overcommit O job-name J no-container-mount-home container-writable container-name"
)
"""Options of srun that place processes, or that the job's own step has."""


def adopt(script: str, name: str) -> Adoption:
    """Return the job that a script describes.

    Args:
        name: of its file, for messages.

    Raises:
        UserError: it is no sbatch script, hpc-rl has rendered it, or it starts no program in Python.
    """
    if not re.match(r"#!.*sh\b|#SBATCH", script):
        raise UserError(f"{name} is no sbatch script: its first line is neither #!/bin/bash nor #SBATCH")
    if f"export {ENV_RUN_DIR}=" in script:
        raise UserError(
            f"{name} was rendered by hpc-rl: submit it with hpc-rl submit KIND --script {name}, or sbatch {name}"
        )
    script = re.sub("[\ue000\ue001]", "", script)  # the characters of MARK
    job = adopt_options(list(sbatch_options(script)))
    scope = Scope(job.variables())
    if job.folder == "." and not re.search(r"(?m)^[ \t]*cd\s", script):
        scope.values["SLURM_SUBMIT_DIR"] = "."
    parts = list(read_parts(script, scope))
    if re.match(r"#!.*\s-\w*l", script):
        job.profile["slurm"]["login_shell"] = True
    for number, line in enumerate(script.splitlines(), 1):
        if line.startswith("#SBATCH") and parts and number > parts[0].number:
            job.lost.append(f"line {number}, {line}: sbatch ignores it too, because it is below a command")
    _Walk(job, scope, parts, _choose(parts, name)).run()
    return job


def _choose(parts: list[ScriptPart], name: str) -> ScriptPart:
    """Return the part with the job's program: the first one with a launcher, or else with srun, or else with Python."""
    programs = [part for part in parts[first_ray(parts) or 0 :] if part.program.rank]
    if programs:
        return max(
            programs,
            key=lambda one: (one.operator != "&" or one.program.rank == LAUNCHER, one.program.rank, bool(one.words)),
        )
    steps = [part.place for part in parts if part.name in ("srun", "bash", "sh", "mpirun", "exec")]
    seen = f"; {steps[-1]} starts another program" if steps else ""
    raise UserError(
        f"{name} has no line that starts a program in Python (by torchrun, accelerate launch, deepspeed, python or "
        f"ray job submit){seen}"
    )


class _Walk:
    """Goes through the parts of a script and completes its job."""

    def __init__(self, job: Adoption, scope: Scope, parts: list[ScriptPart], main: ScriptPart) -> None:
        self.job, self.scope, self.parts, self.main = job, scope, parts, main
        self.program = main.program
        self.setup: list[ScriptPart] = []
        self.env: dict[str, str] = {}

    def run(self) -> None:
        job, program, at = self.job, self.program, self.parts.index(self.main)
        if first_ray(self.parts) is not None or program.uses_ray:
            job.kind = "ray"
        for part in self.parts[:at]:
            self._place(part, "before")
        if not self.main.words:
            job.checks.append(f"{self.main.place}: the program is one command here, without what is around it")
        in_image = bool(program.container) or any(name == "container-image" for name, _ in program.step)
        for command in program.before:
            part = simple(self.main.number, command, self.scope)
            part.replaced_by = replaced_by(part, {})
            self._place(part, "inside" if in_image else "before")
        for part in self.parts[at + 1 :]:
            self._place(part, "after")
        for key, value in program.env.items():
            if not replaced_text(f"{key}={value}"):
                self._export(self.main, key, value)
        self._srun(program)
        self._container(program)
        job.lost += [plain(f"line {self.main.number}, {what}") for what in program.lost]
        self._processes(program)
        self._finish(program)

    def _place(self, part: ScriptPart, where: str) -> None:
        """Give a part its end."""
        name, rank, lost = part.name, part.program.rank, ""
        if part.replaced_by:
            self.job.superfluous[part.replaced_by].append(part.number)
        elif (
            part.only_sets
            or (part.words and part.defines and (where == "after" or not part.exports))
            or (name in MESSAGES and not writes_file(part.text))
            or (name == "srun" and not rank and part.words[-1] in MESSAGES)
        ):
            return
        elif where == "inside":
            lost = "inside the image, which runs nothing but the program"
        elif where == "after":
            lost = (
                "another program; submit it too, with --after RUN"
                if rank
                else "below the program; slurm.epilogue runs lines at the end of each attempt"
            )
        elif part.operator == "&":
            lost = "it runs beside the program"
        elif rank == LAUNCHER:
            lost = "another program; submit it too, and this one with --after RUN"
        elif name == "srun" or rank == STEP:
            lost = _STEP
        elif name in ("sbatch", "scancel", "mpirun", *RUNTIMES):
            lost = "it cannot be a line of set-up"
        elif part.exports:
            for key, value in part.defines.items():
                self._export(part, key, value)
        elif name in ("module", "ml"):
            self._module(part)
        elif name == "cd" and len(part.words) > 1:
            self._cd(part)
        else:
            self._set_up(part)
        if lost:
            self.job.lost.append(f"{part.place}: {lost}")

    def _set_up(self, part: ScriptPart) -> None:
        if re.search(r"\$\{?([0-9@*#]|BASH_SOURCE)", part.text):
            self.job.lost.append(f"{part.place}: a line of set-up has no arguments of the script")
        elif part.words[1:2] == ["login"]:
            self.job.lost.append(
                f"line {part.number}, {part.name} login: log in on the login node; jobs find its files"
            )
        elif part not in self.setup:
            self.setup.append(part)
            if re.search(r"(^|[;&|\n]|then|do|else)[ \t]*(cd|pushd)\s", part.text):
                self.job.checks.append(f"{part.place}: the program starts in the folder of the submission all the same")

    def _module(self, part: ScriptPart) -> None:
        verb, *names = part.words[1:] or ["list"]
        if part.name == "ml" and verb not in ("load", "purge", "use", "unload", "swap"):
            verb, names = "load", [verb, *names]
        if verb in ("list", "avail", "spider", "show"):
            return
        key = {"load": "modules", "add": "modules", "use": "module_paths"}.get(verb)
        slurm = self.job.profile["slurm"]
        is_late = self.setup or (key == "module_paths" and "modules" in slurm)
        if key and not is_late and not any(name.startswith("-") or MARK.search(name) for name in names):
            slurm[key] = slurm.get(key, []) + names
        else:  # the order counts
            self._set_up(part)

    def _cd(self, part: ScriptPart) -> None:
        start, folder = self.job.folder, part.words[-1]
        if folder.startswith(mark("SLURM_SUBMIT_DIR")):
            start, folder = ".", folder.removeprefix(mark("SLURM_SUBMIT_DIR")).lstrip("/")
        if self._is_known(folder):
            self.job.folder = str(PurePosixPath(start) / folder)
        else:
            self.job.lost.append(f"{part.place}: submit in this folder")

    def _is_known(self, value: str) -> bool:
        return set(MARK.findall(value)) <= set(OF_SHELL)

    def _export(self, part: ScriptPart, key: str, value: str | list[str] | None) -> None:
        if value is None:
            return
        if not isinstance(value, str) or not self._is_known(value):
            self._set_up(part)
        elif names_secret(key):
            self.job.lost.append(f"line {part.number}, {key}: a secret; export it in your shell, which jobs inherit")
        elif key == "HF_HOME":
            self.job.profile["cache"]["hf_home"] = plain(value)
        elif " " not in value or f" {' '.join(self.program.words)} ".find(" ".join(value.split())) < 0:
            self.env[key] = plain(value)  # and no part of the command

    def _export_pairs(self, pairs: str) -> None:
        for pair in pairs.split(","):
            if "=" in pair:
                self._export(self.main, *pair.split("=", 1))

    def _srun(self, program: FoundProgram) -> None:
        container = self.job.profile["container"]
        for name, value in program.step:
            if name == "container-image":
                self.job.flags["image"], container["runtime"] = value or "", "pyxis"
            elif name == "container-mounts":
                container["binds"] = [plain(bind) for bind in (value or "").split(",")]
            elif name == "export":
                self._export_pairs(value or "")
            elif name not in _OF_SRUN:
                self.job.lost.append(f"line {self.main.number}, srun --{name}" + (f"={plain(value)}" if value else ""))
            elif (
                name == "nodes"
                and value
                and value.isdigit()
                and int(value) != self.job.nodes
                and self.job.kind != "ray"
            ):
                self.job.lost.append(
                    f"line {self.main.number}, srun --nodes={value}: the program runs on all {self.job.nodes} nodes"
                )

    def _container(self, program: FoundProgram) -> None:
        container = self.job.profile["container"]
        for name, value in program.container:
            text = plain(value or "")
            if name == "image":
                self.job.flags["image"] = value or ""
            elif name in ("bind", "B"):
                container["binds"] = container.get("binds", []) + text.split(",")
            elif name == "rocm":
                container["gpu"] = "rocm"
            elif name == "env":
                self._export_pairs(value or "")
            elif name not in ("nv", "e", "cleanenv"):
                option = f"-{name}" if len(name) == 1 else f"--{name}"
                container["options"] = [*container.get("options", []), option + (f"={text}" if value else "")]

    def _processes(self, program: FoundProgram) -> None:
        job, given, slurm = self.job, program.processes, self.job.profile["slurm"]
        started = {STEP: str(job.tasks), PLAIN: "1"}.get(program.rank, given) or ""
        count = int(started) if started.isdigit() and job.kind == "torchrun" else job.gpus or 1
        if job.gpus == 0:
            job.profile["trainer"]["device"] = "cpu"
        elif job.gpus is None:
            slurm["leave_out"] = ["gpus-per-node"]
            job.checks.append("the script requests no GPUs: --gpus-per-node is the number of processes on a node")
        elif count != job.gpus:
            kind, option = slurm.pop("gpu_type", ""), slurm.pop("gpu_option", "")
            number, own = f"{kind}:{job.gpus}" if kind else str(job.gpus), slurm.setdefault("sbatch", {})
            if option == "gres":
                own["gres"] = ",".join([f"gpu:{number}", *filter(None, [own.get("gres")])])
            else:
                own["gpus-per-node"] = number
            job.checks.append(
                f"the script starts {counted(count, 'process')} on a node with {counted(job.gpus, 'GPU')}, and so does "
                f"the job. For one on each GPU, write --gpus-per-node {job.gpus} and remove the GPUs from slurm.sbatch"
            )
        job.flags |= {"nodes": str(job.nodes), "gpus-per-node": str(count)}
        if program.rank == PLAIN and job.nodes > 1 and job.kind == "torchrun":
            job.checks.append(f"the script starts its program on one node, and the job on all {job.nodes}")
        if program.rank == STEP and job.tasks > 1 and job.kind == "torchrun":
            job.checks.append(
                "srun started the ranks, and now torchrun does: the program has to read RANK, LOCAL_RANK and "
                "WORLD_SIZE, and not SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS"
            )

    def _finish(self, program: FoundProgram) -> None:
        job, slurm = self.job, self.job.profile["slurm"]
        job.program = program.words if job.kind == "torchrun" else [program.python, *program.words]
        if setup := self._setup_lines():
            slurm["setup"] = setup
            job.checks.append("a line of `setup` that fails ends the job: end it with `|| true` if it may fail")
        if self.env:
            slurm["env"] = self.env
        if "image" in job.flags:
            job.checks.append("hpc-rl has to be installed in the image (hpc-rl image build)")
        elif (setup or "modules" in slurm) and not program.has_environment:
            slurm["python"] = program.python
            job.checks.append(
                f"hpc-rl has to be installed in the environment of the program: {program.python} -m pip install hpc-rl"
            )
        elif not program.has_environment:
            job.checks.append("the job uses the Python of this hpc-rl; slurm.python names another one that has hpc-rl")
        job.profile["slurm"] = {key: slurm[key] for key in SlurmConfig.model_fields if key in slurm}
        words = [*job.program, *job.flags.values(), job.folder, *map(str, job.profile["container"].get("binds", []))]
        line = " ".join(words)
        job.checks += [why for value, why in self.scope.doubts.values() if value in line]
        self._name_unknown(words)

    def _setup_lines(self) -> list[str]:
        """Return the lines of the set-up, with those that define what they use."""
        kept, needed, is_above = list(self.setup), "\n".join(part.text for part in self.setup), False
        for part in reversed(self.parts):
            is_above = is_above or part in self.setup
            names = [name for name in part.defines if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w=-])", needed)]
            names = [name for name in names if not names_secret(name)]
            if is_above and names and part not in kept and not part.replaced_by and not part.program.rank:
                kept.append(part)
                needed += "\n" + part.text
                self.env = {key: value for key, value in self.env.items() if key not in names}
        order = [*self.parts, *self.setup]
        texts = [part.text for part in sorted(kept, key=order.index)]
        return [text if "<<" in text else _without_spaces_at_ends(text.expandtabs(4)) for text in texts]

    def _name_unknown(self, words: Sequence[str]) -> None:
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(name for word in words for name in MARK.findall(word)):
            source = self.scope.sources.get(name)
            if name == "@" or name[0].isdigit():
                why = "arguments of the script are arguments of these lines, too: bash FILE ARGUMENTS"
            elif name.startswith("SLURM_"):
                why = "{}: known in the job only; replace it below"
            elif name in (*OF_SHELL, "**"):
                continue
            elif name.endswith(":-"):
                why = "{}: empty if your shell does not set it"
            else:
                what = f"not known (`{plain(source)}`)" if source else "not set in the script"
                why = f"{{}}: {what}; set it in your shell, or replace it below"
            found.setdefault(why, []).append(name.removesuffix(":-"))
        self.job.checks += [why.replace("{}", ", ".join(names), 1) for why, names in found.items()]


def _without_spaces_at_ends(text: str) -> str:
    return "\n".join(line.rstrip(" ") for line in text.split("\n"))
