"""From the #SBATCH lines of a script to the options of a job of hpc-rl. Pure functions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.config.slurm import SlurmConfig, memory_mb, walltime_s
from hpc_rl.submission.adoption.shell import names, options
from hpc_rl.submission.script.directives import directive_words

_SHORT = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task", "D": "chdir",
    "d": "dependency", "e": "error", "G": "gpus", "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "q": "qos",
    "s": "oversubscribe", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_ALIASES = {"tasks-per-node": "ntasks-per-node", "cluster": "clusters", "out": "output", "err": "error"}
_SUPERFLUOUS = names(
    "output error open-mode verbose quiet v Q requeue signal gpu-bind mem-bind overcommit gres-flags parsable wait W "
    "test-only"
)
"""What hpc-rl does itself, or has options for."""
_LOST = names("array input export gpus-per-socket ntasks-per-core ntasks-per-gpu ntasks-per-socket tres-per-task")
"""What hpc-rl's jobs do not have."""
_OF_JOB = ("begin", "comment", "deadline", "dependency", "exclude", "nodelist", "reservation")
"""Options without a key that belong to a job and not to a cluster."""


@dataclass
class Adoption:
    """A script as a job of hpc-rl."""

    kind: str = "torchrun"
    nodes: int = 1
    tasks: int = 1
    """Of the script, on each node."""
    gpus: int | None = None
    """On each node; None if the script requests none."""
    flags: dict[str, str] = field(default_factory=dict)
    """Flag of `submit`, without dashes -> value."""
    sbatch: list[str] = field(default_factory=list)
    """Values of --sbatch."""
    folder: str = "."
    """In which the job is submitted."""
    profile: defaultdict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    program: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    superfluous: list[str] = field(default_factory=list)
    """Options and lines for what hpc-rl does itself."""

    def variables(self) -> dict[str, str]:
        """Return the variables that Slurm sets in the job, as far as the #SBATCH lines tell them."""
        cpus, name, slurm = self.flags.get("cpus-per-task"), self.flags.get("job-name"), self.profile["slurm"]
        return {
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(self.nodes)),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(self.nodes * self.tasks)),
            "SLURM_NTASKS_PER_NODE": str(self.tasks),
            **({"SLURM_CPUS_PER_TASK": str(int(cpus) // self.tasks)} if cpus else {}),
            **({"SLURM_JOB_NAME": name} if name else {}),
            **{f"SLURM_JOB_{key.upper()}": slurm[key] for key in ("account", "partition") if key in slurm},
            **({} if not self.gpus else dict.fromkeys(("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), str(self.gpus))),
        }


def sbatch_options(script: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, long name and value of each option in the #SBATCH lines above the first command."""
    for number, line in enumerate(script.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            return
        if line.startswith("#SBATCH"):
            for name, value in options(directive_words(line), _SHORT):
                yield number, _ALIASES.get(name, name) or repr(value), value if name else None


def adopt_options(found_options: Sequence[tuple[int, str, str | None]]) -> Adoption:
    """Return a job with what options of sbatch request. The last one of a name counts, as in sbatch."""
    found = {name: (line, value) for line, name, value in found_options}
    job = Adoption()

    def number(name: str) -> int:
        line, value = found.pop(name, (0, None))
        first = re.match(r"\d*", value or "")
        if first and first[0] != (value or ""):
            job.lost.append(f"line {line}, --{name}={value}: {first[0] + ' is used' if first[0] else 'not a number'}")
        return int(first[0]) if first and first[0] else 0

    nodes, tasks, per_node = number("nodes"), number("ntasks"), number("ntasks-per-node")
    job.nodes = nodes or (-(-tasks // per_node) if tasks and per_node else 1)
    job.tasks = per_node or max(1, tasks // job.nodes)
    _gpus(job, found)
    if cpus := number("cpus-per-task") * job.tasks:
        job.flags["cpus-per-task"] = str(cpus)
    if per_gpu := number("cpus-per-gpu"):
        job.profile["slurm"]["cpus_per_gpu"] = per_gpu
    for name, count in (("mem", 1), ("mem-per-cpu", cpus or job.tasks), ("mem-per-gpu", job.gpus or 1)):
        if (value := found.get(name, (0, None))[1]) and (megabytes := memory_mb(value)) is not None:
            del found[name]
            job.flags["mem"] = value if name == "mem" else f"{megabytes * count}M"
            if name != "mem":
                job.profile["slurm"]["mem_option"] = name
    for name, (line, value) in found.items():
        _other(job, name, value, f"line {line}, --{name}" + (f"={value}" if value is not None else ""))
    return job


def _gpus(job: Adoption, found: dict[str, tuple[int, str | None]]) -> None:
    for name in ("gpus-per-node", "gpus-per-task", "gpus", "gres"):
        value = found.get(name, (0, None))[1] or ""
        parts = value.split(",")
        own = next((part for part in parts if name != "gres" or part.split(":")[0] == "gpu"), "")
        match = re.fullmatch(r"(?:gpu:?)?(?:([A-Za-z][\w.-]*):?)?(\d*)(?:\(.*)?", own)
        if not own or match is None:
            continue
        del found[name]
        job.gpus = int(match[2] or 1) * (job.tasks if name == "gpus-per-task" else 1)
        if name == "gpus":
            job.gpus = -(-job.gpus // job.nodes)
            job.superfluous.append(f"--gpus={value}")
        if match[1]:
            job.profile["slurm"]["gpu_type"] = match[1]
        if name in ("gres", "gpus-per-task"):
            job.profile["slurm"]["gpu_option"] = name
        if others := ",".join(part for part in parts if part != own):
            job.profile["slurm"]["sbatch"] = {"gres": others}
        return


def _other(job: Adoption, name: str, value: str | None, place: str) -> None:
    slurm = job.profile["slurm"]
    if name == "signal" and (match := re.search(r"@(\d+)", value or "")) and int(match[1]) > SlurmConfig().warning_s:
        slurm["warning_s"] = int(match[1])
    if name in _SUPERFLUOUS:
        job.superfluous.append(place.partition(", ")[2])
    elif name in _LOST:
        why = "; submit one run for each value" if name == "array" else ""
        job.lost += [f"{place}: no option of hpc-rl's jobs{why}"] if (name, value) != ("export", "ALL") else []
    elif name in ("partition", "account", "qos", "constraint"):
        slurm[name] = value
    elif name == "time" and value and re.fullmatch(r"[\d:-]+", value):
        job.flags["time"] = value
        if (walltime_s(value) or 0) <= SlurmConfig().warning_s:
            slurm["warning_s"] = max(1, (walltime_s(value) or 0) // 2)
    elif name == "job-name":
        job.flags[name] = re.sub(r"^[.-]+|[^\w.-]", "_", value or "", flags=re.ASCII)
        if job.flags[name] != value:
            job.lost.append(f"{place}: a name has letters, digits, '.', '_' and '-'")
    elif name == "exclusive" and value is None:
        slurm["exclusive"] = True
    elif name == "no-requeue":
        slurm["requeue"] = False
    elif name == "chdir":
        job.folder = value or "."
    elif name in ("time", "mem", "mem-per-cpu", "mem-per-gpu") or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        job.lost.append(f"{place}: not of a form that sbatch reads")
    elif name in _OF_JOB:
        job.sbatch.append(f"{name}={value}")
    else:
        slurm.setdefault("sbatch", {})[name] = value
