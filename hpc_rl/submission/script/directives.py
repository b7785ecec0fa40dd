"""The options of a job script, and the variables SBATCH_* of the submitting shell. Pure functions.

sbatch gives these variables precedence over the script (sbatch(1), INPUT ENVIRONMENT VARIABLES). Here the script takes
precedence: it states what the job requests, and a variable applies only if the script leaves its option open.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping

from hpc_rl.slurm.place import CLUSTERS

LOGIN_SHELL = "#!/bin/bash -l\n"
"""First line of a script that runs in a login shell."""
_PREFIX = "SBATCH_"
_IRREGULAR = {
    "ARRAY_INX": "array",
    "CPU_FREQ_REQ": "cpu-freq",
    "DEBUG": "verbose",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "TIMELIMIT": "time",
    "WAIT4SWITCH": "switches",
}
"""Variables that are not named after their option: name without SBATCH_ -> option."""
_REGULAR = (
    "ACCOUNT", "ACCTG_FREQ", "BATCH", "BURST_BUFFER", "CLUSTERS", "CLUSTER_CONSTRAINT", "CONSTRAINT", "CONTAINER",
    "CORE_SPEC", "CPUS_PER_GPU", "DELAY_BOOT", "DISTRIBUTION", "ERROR", "EXCLUSIVE", "EXPORT", "GET_USER_ENV",
    "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GPU_BIND", "GPU_FREQ", "GRES", "GRES_FLAGS",
    "HINT", "IGNORE_PBS", "INPUT", "JOB_NAME", "MEM_BIND", "MEM_PER_CPU", "MEM_PER_GPU", "NETWORK", "NO_KILL",
    "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "OVERCOMMIT", "PARTITION", "POWER", "PROFILE", "QOS", "REQUEUE",
    "RESERVATION", "SEGMENT_SIZE", "SIGNAL", "SPREAD_JOB", "THREADS_PER_CORE", "THREAD_SPEC", "TRES_BIND",
    "TRES_PER_TASK", "USE_MIN_NODES", "WAIT", "WAIT_ALL_NODES", "WCKEY",
)  # fmt: skip
"""Other variables, which are named after their option, without SBATCH_."""
_SHORT = {
    "A": "account", "a": "array", "C": "constraint", "c": "cpus-per-task", "e": "error", "G": "gpus", "J": "job-name",
    "M": "clusters", "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time",
}  # fmt: skip
_RIVALS = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"},
    {"requeue", "no-requeue"},
    {"cpus-per-gpu", "cpus-per-task"},
)
"""Options of which a job can have only one."""
_NEVER = {
    "array": "hpc-rl sweep makes arrays",
    "error": "the log of the job has its errors too",
    "wait": "hpc-rl submit --wait waits",
}
"""Options that the job script never has and that must not come from elsewhere -> the reason."""


def directives(script: str) -> list[str]:
    """Return the #SBATCH lines that sbatch reads: those above the first command."""
    head = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), script.splitlines())
    return [line for line in head if line.startswith("#SBATCH")]


def option_of(directive: str) -> str:
    """Return the long name of the option in a #SBATCH line; the line itself if it has none."""
    match = re.match(r"#SBATCH\s+(?:--([\w-]+)|-(\w))", directive)
    if not match:
        return directive
    return match[1] or _SHORT.get(match[2], match[2])


def clusters_of(script: str) -> str:
    """Return the value of --clusters in the #SBATCH lines; empty without one."""
    found = ""
    for line in directives(script):
        words = iter(directive_words(line))
        for word in words:
            option, equals, value = word.partition("=")
            if option == "--clusters" or word == "-M":
                found = value if equals else next(words, "")
            elif re.match(r"-M[^-]", word):
                found = word[2:]
    return found


def overruled(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the variables that must not reach sbatch -> why."""
    asked = {option_of(line): line for line in directives(script)}
    found = {}
    for name, option in _variables(environ).items():
        rivals = {option}
        if option != "gres" or "gpu" in environ[name]:  # --gres=nvme:1 goes with --gpus-per-node
            rivals = rivals.union(*(group for group in _RIVALS if option in group))
        if option in _NEVER and option not in asked:
            found[name] = _NEVER[option]
        elif rival := next((one for one in asked if one in rivals), None):
            found[name] = f"the job has {_written(asked[rival])}"
    return found


def environment_notes(environ: Mapping[str, str], script: str) -> list[str]:
    """Describe what a job takes from variables of sbatch, and which variables it ignores, one per line."""
    asked = {option_of(line): _written(line) for line in directives(script)}
    variables, ignored = _variables(environ), overruled(environ, script)
    taken = [
        f"--{option}={environ[name]} ({name})"
        for name, option in variables.items()
        if name not in ignored or asked.get(option) == f"--{option}={environ[name]}"
    ]
    notes = [f"from the environment: {', '.join(taken)}"] if taken else []
    for name, reason in ignored.items():
        if asked.get(variables[name]) != f"--{variables[name]}={environ[name]}":
            notes.append(f"{name}={environ[name]} is ignored: {reason}")
    return notes


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of sbatch in an environment -> the option that each of them sets."""
    options = _IRREGULAR | {word: word.lower().replace("_", "-") for word in _REGULAR}
    rest = {name: name.removeprefix(_PREFIX) for name in sorted(environ) if name.startswith(_PREFIX)}
    found = {name: options[word] for name, word in rest.items() if word in options}
    chosen = next((name for name in CLUSTERS if environ.get(name)), None)
    return found | ({chosen: "clusters"} if chosen else {})


def _written(directive: str) -> str:
    """Return the option and the value of a #SBATCH line, without quotes."""
    return " ".join(directive_words(directive))


def directive_words(directive: str) -> list[str]:
    """Return the words of a #SBATCH line, without quotes and comments."""
    try:
        return shlex.split(directive.removeprefix("#SBATCH"), comments=True)
    except ValueError:  # a quote that is not closed, in an edited script
        return directive.removeprefix("#SBATCH").split()
