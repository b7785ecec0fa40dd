"""From a user's sbatch script to the job of hpc-rl that does the same. The script is read, never run.

Every part of it gets one of these ends: it is the program, a setting of the job, a line of the set-up, superfluous, or
listed as lost. Only messages, and variables that nothing needs, disappear without a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.run_dir import ENV_RUN_DIR
from hpc_rl.software.secrets import names_secret
from hpc_rl.submission.adoption.directives import Adoption, adopt_options, sbatch_options
from hpc_rl.submission.adoption.parts import STARTS_RAY, ScriptPart, is_superfluous, read_part, read_parts
from hpc_rl.submission.adoption.programs import LAUNCHER, PLAIN, RUNTIMES, STEP, name_of
from hpc_rl.submission.adoption.shell import MARK, OF_SHELL, Scope, mark, plain

_INTERFACE = re.compile(r"_(?:SOCKET_IFNAME|NETWORK_INTERFACE)=[\"']?=?([\w.-]+)[\"']?\s*$", re.M)
_NO_SETUP = RUNTIMES | {"srun", "sbatch", "scancel", "mpirun"}


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
    ray = next((index for index, part in enumerate(parts) if STARTS_RAY.search(part.text)), None)
    programs = [part for part in parts[ray or 0 :] if part.program.rank]
    if not programs:
        steps = [part.place for part in parts if part.name in ("srun", "bash", "sh", "mpirun", "exec")]
        raise UserError(
            f"{name} has no line that starts a program in Python, such as torchrun, accelerate launch or python"
            f"{f'; {steps[-1]} starts another program' if steps else ''}: type its command after "
            "`hpc-rl submit torchrun --`"
        )
    main = max(programs, key=_likelihood)
    if ray is not None or main.program.uses_ray:
        job.kind = "ray"
    _Walk(job, scope, main).run(parts)
    return job


def _likelihood(part: ScriptPart) -> tuple[object, ...]:
    """Return how likely a part starts the job's program: by a launcher, or else srun, or else Python."""
    rank, is_first = part.program.rank, not part.is_beside
    return is_first or rank == LAUNCHER, rank, is_first, not part.is_compound


class _Walk:
    """Goes through the parts of a script and completes its job."""

    def __init__(self, job: Adoption, scope: Scope, main: ScriptPart) -> None:
        self.job, self.scope, self.main, self.program = job, scope, main, main.program
        self.slurm, self.container = job.profile["slurm"], job.profile["container"]
        self.setup: list[ScriptPart] = []
        self.superfluous: list[str] = []
        self.env: dict[str, str] = {}

    def run(self, parts: list[ScriptPart]) -> None:
        job, program, at = self.job, self.program, parts.index(self.main)
        job.program = program.words if job.kind == "torchrun" else program.typed
        self._use_options()
        before = [read_part(self.main.number, command.text, self.scope) for command in program.before]
        above = [*parts[:at], *before]
        for part in above:
            is_inside = "image" in job.flags and part in before
            self._place(part, "inside the image, which runs nothing but the program" if is_inside else "")
        if self.main.is_compound:
            job.checks.append(f"{self.main.place}: the program is one command here, without what is around it")
        for part in parts[at + 1 :]:
            self._place(part, "below the program; slurm.epilogue runs lines at the end of each attempt")
        self._export(self.main, {key: value for key, value in program.env.items() if not is_superfluous(f"{key}=x")})
        job.lost += [plain(f"line {self.main.number}, {what}") for what in program.lost]
        job.superfluous += [f"lines {', '.join(self.superfluous)}"] if self.superfluous else []
        self._set_sizes()
        self._finish(above)

    def _use_options(self) -> None:
        """Use the options of srun and of the image's runtime."""
        container = self.container
        for name, value in self.program.options:
            text = plain(value or "")
            if name in ("image", "container-image"):
                self.job.flags["image"] = value or ""
                container |= {"runtime": "pyxis"} if name == "container-image" else {}
            elif name in ("bind", "B", "container-mounts"):
                container["binds"] = container.get("binds", []) + text.split(",")
            elif name in ("env", "export"):
                pairs = (pair.split("=", 1) for pair in (value or "").split(",") if "=" in pair)
                self._export(self.main, dict(pairs))
            elif name in ("nodes", "N"):
                lost = f"line {self.main.number}, srun --nodes={text}: the program runs on all {self.job.nodes} nodes"
                is_part = self.job.kind == "torchrun" and text.isdigit() and int(text) < self.job.nodes
                self.job.lost += [lost] if is_part else []
            elif name == "rocm":
                container["gpu"] = "rocm"
            elif name not in ("nv", "e", "cleanenv", ""):
                option = f"-{name}" if len(name) == 1 else f"--{name}"
                container["options"] = [*container.get("options", []), option + (f"={text}" if value else "")]

    def _place(self, part: ScriptPart, lost: str) -> None:
        """Give a part its end.

        Args:
            lost: why it cannot be carried over; empty if it can.
        """
        job = self.job
        if part.program.rank in (LAUNCHER, STEP) or (part.program.rank and lost):
            lost = "another program; submit it too, with --after RUN if one needs the other"
        elif any(name_of(command.words[0]) in _NO_SETUP for command in part.commands):
            lost = "it cannot be a line of set-up; run it before, or submit it too"
        elif part.is_beside:
            lost = "it runs beside the program"
        elif re.search(r"\$\{?([0-9@*#]|BASH_SOURCE)", part.text) and not part.exports:
            lost = "a line of set-up has no arguments of the script"
        if part.is_superfluous:
            self.superfluous.append(str(part.number))
            if chosen := _INTERFACE.search(part.text):
                own = f"slurm.interface={chosen[1]}"
                job.checks.append(f"{part.place}: hpc-rl finds the network interface; to keep yours, add {own}")
        elif part.is_idle or (part.exports and lost):
            return
        elif part.words[1:2] == ["login"]:
            job.lost.append(f"line {part.number}, {part.name} login: log in on the login node; jobs find its files")
        elif lost:
            job.lost.append(f"{part.place}: {lost}")
        elif part.exports:
            self._export(part, part.defines)
        elif part.words[:2] == ["module", "load"] and not self.setup and not MARK.search("".join(part.words)):
            self.slurm["modules"] = self.slurm.get("modules", []) + part.words[2:]
        elif part.name == "cd" and len(part.commands) == 1:
            self._cd(part)
        elif part.text not in [one.text for one in self.setup]:
            self.setup.append(part)
            if re.search(r"(^|[;&|\n]|then|do|else)[ \t]*(cd|pushd)\s", part.text):
                job.checks.append(f"{part.place}: the program starts in the folder of the submission all the same")

    def _cd(self, part: ScriptPart) -> None:
        start, folder = self.job.folder, part.words[-1]
        if folder.startswith(mark("SLURM_SUBMIT_DIR")):
            start, folder = ".", folder.removeprefix(mark("SLURM_SUBMIT_DIR")).lstrip("/")
        if _is_known(folder) and len(part.words) == 2 and not folder.startswith("-"):
            self.job.folder = str(PurePosixPath(start) / folder)
        else:
            self.job.lost.append(f"{part.place}: submit in this folder")

    def _export(self, part: ScriptPart, variables: Mapping[str, str | list[str] | None]) -> None:
        for key, value in variables.items():
            if not isinstance(value, str) or not _is_known(value):
                self.setup += [part] if value is not None and part not in [*self.setup, self.main] else []
            elif names_secret(key):
                self.job.lost.append(
                    f"line {part.number}, {key}: a secret; export it in your shell, which jobs inherit"
                )
            elif key == "HF_HOME":
                self.job.profile["cache"]["hf_home"] = plain(value)
            elif " " not in value or " ".join(value.split()) not in " ".join(self.program.typed):
                self.env[key] = plain(value)  # and no part of the command

    def _set_sizes(self) -> None:
        """Set nodes and GPUs, and compare them with the processes that the script starts."""
        job, rank, started = self.job, self.program.rank, self.program.processes * self.job.nodes
        started = {STEP: job.nodes * job.tasks, PLAIN: 1}.get(rank, started) if job.kind == "torchrun" else 0
        gpus = job.gpus or max(1, started // job.nodes)
        job.flags |= {"nodes": str(job.nodes), "gpus-per-node": str(gpus)}
        if job.gpus == 0:
            job.profile["trainer"]["device"] = "cpu"
        elif job.gpus is None:
            self.slurm["leave_out"] = ["gpus-per-node"]
            job.checks.append("the script requests no GPUs: --gpus-per-node is the number of processes on a node")
        if started not in (0, job.nodes * gpus):
            number = counted(started, "process")
            job.checks.append(f"the script starts {number}, and the job {job.nodes * gpus}, one for each GPU")
        if started > 1 and rank == STEP:
            job.checks.append("the program has to read torchrun's RANK, LOCAL_RANK and WORLD_SIZE, not SLURM_PROCID")

    def _finish(self, above: Sequence[ScriptPart]) -> None:
        job, slurm, program = self.job, self.slurm, self.program
        slurm |= {"setup": setup} if (setup := self._setup_lines(above)) else {}
        slurm |= {"env": self.env} if self.env else {}
        if "image" in job.flags:
            job.checks.append("hpc-rl has to be installed in the image (hpc-rl image build)")
        elif not program.has_environment and (setup or "modules" in slurm or "/" in program.python):
            slurm["python"] = program.python
            job.checks.append(
                f"hpc-rl has to be in the program's environment: {program.python} -m pip install FOLDER_OF_HPC_RL"
            )
        elif not program.has_environment:
            job.checks.append("the job uses the Python of this hpc-rl; slurm.python names another one that has hpc-rl")
        job.profile["slurm"] = {key: slurm[key] for key in SlurmConfig.model_fields if key in slurm}
        line = " ".join([*job.program, *job.flags.values(), job.folder, *self.container.get("binds", [])])
        for value, why in self.scope.doubts.values():
            is_used = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", " ".join(job.program))
            job.checks += [why] if is_used else []
        for name in dict.fromkeys(MARK.findall(line)):
            source = self.scope.sources.get(name)
            if name == "@" or name[0].isdigit():
                job.checks.append("arguments of the script are arguments of these lines, too: bash FILE ARGUMENTS")
            elif name not in (*OF_SHELL, "**") and not name.endswith(":-"):
                what = f"comes from `{plain(source)}` in the script" if source else "is not set in the script"
                what = "is known in the job only" if name.startswith("SLURM_") else what
                job.checks.append(f"{name} {what}: set it in your shell, or replace it below")

    def _setup_lines(self, above: Sequence[ScriptPart]) -> list[str]:
        """Return the lines of the set-up, with those that define what they use."""
        texts: list[str] = []
        for part in reversed(above):
            needed = "\n".join(texts)
            used = {name for name in part.defines if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w=-])", needed)}
            is_needed = used and not part.is_superfluous and not part.program.rank and not any(map(names_secret, used))
            if part in self.setup or is_needed:
                texts.insert(0, part.text)
                self.env = {key: value for key, value in self.env.items() if key not in used}
        return [line for text in texts for line in text.splitlines()]


def _is_known(value: str) -> bool:
    return set(MARK.findall(value)) <= set(OF_SHELL)
