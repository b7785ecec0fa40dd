"""From the #SBATCH lines of a script to the options of a job of hpc-rl. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.config.slurm import SlurmConfig, memory_mb, walltime_s
from hpc_rl.submission.adoption.shell import take_options
from hpc_rl.submission.script.directives import directive_words

_SHORT = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task", "D": "chdir",
    "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "J": "job-name", "k": "no-kill",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit",
    "o": "output", "p": "partition", "Q": "quiet", "q": "qos", "s": "oversubscribe", "S": "core-spec", "t": "time",
    "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_WITHOUT_VALUE = frozenset(
    "contiguous exclusive get-user-env hold ignore-pbs no-kill no-requeue nice overcommit oversubscribe parsable "
    "propagate quiet reboot requeue spread-job test-only use-min-nodes verbose wait".split()
)
"""Options without a value, or whose value follows after `=` only."""
_OTHERS = (
    "acctg-freq bb bbf cluster-constraint comment container cores-per-socket cpu-freq deadline delay-boot exclude "
    "export extra-node-info gpu-bind gpu-freq gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input "
    "mail-type mail-user mem mem-bind mem-per-cpu mem-per-gpu mincpus network ntasks-per-core ntasks-per-gpu "
    "ntasks-per-node ntasks-per-socket open-mode prefer priority profile reservation signal sockets-per-node switches "
    "tasks-per-node thread-spec threads-per-core tmp tres-per-task wait-all-nodes wckey cpus-per-gpu gpus nodelist"
).split()
_KNOWN = {*_SHORT.values(), *_WITHOUT_VALUE, *_OTHERS}
_OWN = {
    **dict.fromkeys(("output", "error", "open-mode", "verbose", "quiet"), "logs are in the run directory"),
    **dict.fromkeys(("requeue", "signal"), "a run is told to save, and is queued again"),
    **dict.fromkeys(("gpu-bind", "mem-bind", "overcommit", "gres-flags"), "one task on each node has all its GPUs"),
    **dict.fromkeys(("parsable", "wait", "test-only", "ignore-pbs"), "`submit` has options for it"),
}
"""Options that hpc-rl replaces -> by what."""
_NOT_CARRIED = {
    "array": "submit one run for each value; `hpc-rl sweep` is for hpc-rl's own trainers",
    "input": "programs have no standard input",
    "export": "jobs get the variables of your shell",
    **dict.fromkeys(
        ("gpus-per-socket", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "tres-per-task"),
        "one task runs on each node; --gpus-per-node is the number of its processes",
    ),
}
_OF_JOB = ("begin", "comment", "deadline", "dependency", "exclude", "nodefile", "nodelist", "reservation")
"""Other options that belong to a job and not to a cluster."""


@dataclass
class Request:
    """What a script requests from Slurm."""

    nodes: int = 1
    tasks: int = 1
    """On each node."""
    gpus: int | None = None
    """On each node; None if it requests none."""
    flags: dict[str, str] = field(default_factory=dict)
    """Flag of `submit` without dashes -> value."""
    slurm: dict[str, Any] = field(default_factory=dict)
    """Keys of slurm in a profile."""
    sbatch: list[str] = field(default_factory=list)
    """Values of --sbatch."""
    folder: str = ""
    superfluous: list[tuple[str, str]] = field(default_factory=list)
    """Option, and what replaces it."""
    lost: list[str] = field(default_factory=list)

    def variables(self) -> dict[str, str]:
        """Return the variables that Slurm sets in the job, as far as the request tells them."""
        gpus = {} if self.gpus is None else dict.fromkeys(("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), str(self.gpus))
        cpus = self.flags.get("cpus-per-task")
        return {
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(self.nodes)),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(self.nodes * self.tasks)),
            "SLURM_NTASKS_PER_NODE": str(self.tasks),
            **({"SLURM_CPUS_PER_TASK": str(int(cpus) // self.tasks)} if cpus else {}),
            **({"SLURM_JOB_NAME": name} if (name := self.flags.get("job-name")) else {}),
            **{f"SLURM_JOB_{key.upper()}": self.slurm[key] for key in ("account", "partition") if key in self.slurm},
            **gpus,
        }


def sbatch_options(script: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, long name and value of each option in the #SBATCH lines above the first command."""
    for number, line in enumerate(script.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            return
        if line.startswith("#SBATCH"):
            options, rest = take_options(directive_words(line), _WITHOUT_VALUE, _SHORT)
            for name, value in options:
                longer = [known for known in _KNOWN if known.startswith(name)]
                yield number, name if name in _KNOWN or len(longer) != 1 else longer[0], value
            for word in rest:
                yield number, repr(word), ""


def request_of(options: Sequence[tuple[int, str, str | None]]) -> Request:
    """Return the request that options of sbatch make. The last one of a name counts, as in sbatch."""
    found = {"ntasks-per-node" if name == "tasks-per-node" else name: (line, value) for line, name, value in options}
    request = Request()

    def number(name: str, default: int = 0) -> int:
        line, value = found.pop(name, (0, None))
        if value is None or (value and value.isdigit()):
            return int(value or default)
        if match := re.match(r"\d+(?=-\d+$)", value):
            request.lost.append(f"line {line}, --{name}={value}: {match[0]} is used")
            return int(match[0])
        request.lost.append(f"line {line}, --{name}={value}: not a number")
        return default

    nodes, tasks, per_node = number("nodes"), number("ntasks"), number("ntasks-per-node")
    request.nodes = nodes or (-(-tasks // per_node) if tasks and per_node else 1)
    request.tasks = per_node or max(1, tasks // request.nodes)
    _gpus(request, found)
    cpus = number("cpus-per-task") * request.tasks
    if cpus:
        request.flags["cpus-per-task"] = str(cpus)
    if per_gpu := number("cpus-per-gpu"):
        request.slurm["cpus_per_gpu"] = per_gpu
    _memory(request, found, cpus or request.tasks)
    for name, (line, value) in found.items():
        _other(request, name, value, line)
    return request


def _gpus(request: Request, found: dict[str, tuple[int, str | None]]) -> None:
    for name in ("gpus-per-node", "gpus-per-task", "gpus", "gres"):
        value = found.get(name, (0, None))[1] or ""
        parts = value.split(",")
        own = next((part for part in parts if name != "gres" or part.split(":")[0] == "gpu"), "")
        match = re.fullmatch(r"(?:gpu:?)?(?:([A-Za-z][\w.-]*):?)?(\d*)(?:\(.*)?", own)
        if not own or match is None:
            continue
        del found[name]
        count = int(match[2] or 1)
        request.gpus = count * request.tasks if name == "gpus-per-task" else count
        if name == "gpus":
            request.gpus = -(-count // request.nodes)
            request.superfluous.append((f"--gpus={value}", "--gpus-per-node requests them"))
        if match[1]:
            request.slurm["gpu_type"] = match[1]
        if name in ("gres", "gpus-per-task"):
            request.slurm["gpu_option"] = name
        if others := ",".join(part for part in parts if part != own):
            request.slurm.setdefault("sbatch", {})["gres"] = others
        return


def _memory(request: Request, found: dict[str, tuple[int, str | None]], cpus: int) -> None:
    for name, count in (("mem", 1), ("mem-per-cpu", cpus), ("mem-per-gpu", request.gpus or 1)):
        line, value = found.pop(name, (0, None))
        if value is None:
            continue
        if (megabytes := memory_mb(value)) is None:
            request.lost.append(f"line {line}, --{name}={value}: not a size")
        elif name == "mem":
            request.flags["mem"] = value
        else:
            request.flags["mem"] = f"{megabytes * count}M"
            request.slurm["mem_option"] = name


def _other(request: Request, name: str, value: str | None, line: int) -> None:
    written = f"--{name}" + (f"={value}" if value is not None else "")
    if name == "signal" and (match := re.search(r"@(\d+)", value or "")) and int(match[1]) > SlurmConfig().warning_s:
        request.slurm["warning_s"] = int(match[1])
    if name in _OWN:
        request.superfluous.append((written, _OWN[name]))
    elif name in _NOT_CARRIED and not (name == "export" and value == "ALL"):
        request.lost.append(f"line {line}, {written}: {_NOT_CARRIED[name]}")
    elif name in ("partition", "account", "qos", "constraint"):
        request.slurm[name] = value
    elif name == "time":
        try:
            seconds = walltime_s(SlurmConfig(time=value, warning_s=1).time or "")
        except ValueError:
            request.lost.append(f"line {line}, {written}: not a walltime")
            return
        request.flags["time"] = value or ""
        if seconds is not None and seconds <= SlurmConfig().warning_s:
            request.slurm["warning_s"] = max(1, seconds // 2)
    elif name == "job-name":
        request.flags[name] = re.sub(r"^[.-]+|[^\w.-]", "_", value or "", flags=re.ASCII)
        if request.flags[name] != value:
            request.lost.append(f"line {line}, {written}: a name has letters, digits, '.', '_' and '-'")
    elif name == "exclusive" and value is None:
        request.slurm["exclusive"] = True
    elif name == "no-requeue":
        request.slurm["requeue"] = False
    elif name == "chdir":
        request.folder = value or ""
    elif not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        request.lost.append(f"line {line}, {name}: no option of sbatch")
    elif name in _OF_JOB:
        request.sbatch.append(name + (f"={value}" if value is not None else ""))
    elif name != "export":
        request.slurm.setdefault("sbatch", {})["clusters" if name == "cluster" else name] = value
