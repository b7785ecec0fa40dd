"""The program that a command starts, behind srun, a container and a launcher. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from hpc_rl.submission.adoption.shell import KEYWORDS, MARK, Command, Scope, names, plain, take_options

LAUNCHER, STEP, PLAIN = 3, 2, 1
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python[\d.]*")
RUNTIMES = (
    "apptainer",
    "singularity",
    "apptainer_wrapper",
    "singularity_wrapper",
    "shifter",
    "podman-hpc",
    "docker",
    "podman",
)
_WRAPPERS: Mapping[str, tuple[str, frozenset[str]]] = {
    **{name: ("", names("c l i 0 v p")) for name in ("exec", "env", "nohup", "time", "command")},
    **{name: ("", names("localalloc l foreground preserve-status v")) for name in ("numactl", "stdbuf", "timeout")},
    **{name: ("run", names("no-capture-output live-stream v")) for name in ("conda", "mamba", "poetry", "pixi")},
    "uv": (
        "run",
        names("frozen locked no-sync active isolated all-extras all-groups offline quiet q no-project no-dev"),
    ),
}
"""Command before a program -> its first word after it, if it has one, and its options without a value."""
_SRUN_WITHOUT_VALUE = names(
    "l label u unbuffered v verbose Q quiet K kill-on-bad-exit overlap exact exclusive pty O overcommit s "
    "oversubscribe E preserve-env k no-kill X disable-status interactive contiguous multi-prog container-writable "
    "container-readonly container-mount-home no-container-mount-home container-remap-root no-container-remap-root "
    "container-entrypoint no-container-entrypoint"
)
_SRUN_SHORT = {"N": "nodes", "n": "ntasks", "w": "nodelist"}
_CONTAINER_WITHOUT_VALUE = names(
    "nv rocm e cleanenv c contain C containall no-home writable writable-tmpfs f fakeroot u userns i ipc p pid "
    "no-init compat nvccli no-privs keep-privs no-mpi gpu mpi nccl no-eval rm it d t interactive tty privileged"
)
_LAUNCHERS: Mapping[str, frozenset[str]] = {
    "torchrun": names("standalone m module no-python run-path virtual-local-rank"),
    "accelerate": names(
        "q quiet cpu multi-gpu tpu enable-cpu-affinity dynamo-use-fullgraph dynamo-use-dynamic use-deepspeed use-fsdp "
        "dynamo-use-regional-compilation use-parallelism-config use-megatron-lm same-network m module no-python "
        "tpu-cluster tpu-use-sudo debug use-xpu mps"
    ),
    "deepspeed": names(
        "module no-python no-local-rank no-ssh no-ssh-check force-multi bind-cores-to-core save-pid elastic-training"
    ),
}
"""Launcher -> its options without a value."""
_PLACING = names(
    "nnodes nnode nproc-per-node nproc rdzv-id rdzv-backend rdzv-endpoint rdzv-conf node-rank master-addr "
    "master-port local-addr standalone max-restarts monitor-interval m module log-dir redirects tee role "
    "start-method use-env local-ranks-filter numa-binding num-machines num-processes machine-rank main-process-ip "
    "main-process-port multi-gpu same-network hostfile num-nodes num-gpus include exclude launcher launcher-args "
    "no-ssh no-ssh-check no-local-rank force-multi bind-cores-to-core bind-core-list save-pid gpu-ids q quiet "
    "debug enable-cpu-affinity"
)
"""Options of launchers that place processes, which hpc-rl does."""
_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
_MODULES |= {"accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed"}
_COMMANDS: dict[tuple[str, ...], list[str]] = {("axolotl", "train"): ["axolotl.cli.train"]}
_COMMANDS |= {("trl", name): [f"trl.scripts.{name}"] for name in ("sft", "dpo", "grpo", "kto", "reward", "rloo")}
_COMMANDS |= {("litgpt", name): ["litgpt", name] for name in ("pretrain", "finetune", "finetune_full", "finetune_lora")}
"""Command that starts processes itself, and its first argument -> the module that runs in each process, and its own."""
_ON_RAY = re.compile(r"-m (verl|recipe|openrlhf\.cli\.train_ppo_ray|skyrl\w*|nemo_rl|rllm)\b")
"""Modules that start Ray themselves, if it does not run."""


@dataclass
class FoundProgram:
    words: list[str] = field(default_factory=list)
    """Without its launcher."""
    rank: int = 0
    """How likely it is the job's program: LAUNCHER, STEP or PLAIN; 0 if it is none."""
    uses_ray: bool = False
    python: str = "python"
    processes: str | None = None
    """On each node, as its launcher states."""
    env: dict[str, str] = field(default_factory=dict)
    step: list[tuple[str, str | None]] = field(default_factory=list)
    """Options of srun."""
    container: list[tuple[str, str | None]] = field(default_factory=list)
    """Options of its runtime, of which one is `image`."""
    has_environment: bool = False
    """Whether a command such as `uv run` chooses its Python."""
    before: list[Command] = field(default_factory=list)
    """Commands before it in the same `bash -c`."""
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
        if _ASSIGNMENT.match(word):
            key, _, found.env[key] = rest.pop(0).partition("=")
        elif word in KEYWORDS and word != "time":
            rest = rest[1:]
        elif name == "srun":
            found.rank, rest = STEP, _after_srun(found, rest[1:])
        elif name in RUNTIMES:
            rest = _in_container(found, name, rest[1:])
        elif name in _WRAPPERS and _WRAPPERS[name][0] in ("", *rest[1:2]):
            rest = _wrapped(found, name, rest)
        elif MARK.fullmatch(word) and len(rest) > 1 and rest[1].endswith(".py"):
            found.lost.append(f"{plain(word)}: the launcher is not known")
            found.rank, found.words = max(found.rank, PLAIN), rest[1:]
            return found
        elif name in ("bash", "sh", "eval") and (inner := _inline(rest)) is not None:
            return _first(found, scope.commands(inner), scope)
        elif name == "ray" and rest[1:3] == ["job", "submit"]:
            found.uses_ray, found.rank = True, LAUNCHER
            options, rest = take_options(rest[3:], names("no-wait verbose v"))
            rest = rest[1:] if rest[:1] == ["--"] else rest
            known = ("address", "working-dir", "no-wait", "job-id", "submission-id")
            found.lost += [f"ray job submit --{key} {value}" for key, value in options if key not in known]
        else:
            return _launched(found, name, rest)
    found.rank = 0
    return found


def _after_srun(found: FoundProgram, words: list[str]) -> list[str]:
    found.step, rest = take_options(words, _SRUN_WITHOUT_VALUE, _SRUN_SHORT)
    while rest and MARK.fullmatch(rest[0]):
        found.lost.append(f"srun {plain(rest[0])}: these options are not known")
        more, rest = take_options(rest[1:], _SRUN_WITHOUT_VALUE, _SRUN_SHORT)
        found.step += more
    return rest


def _in_container(found: FoundProgram, name: str, words: list[str]) -> list[str]:
    words = words[1:] if words[:1] in (["exec"], ["run"]) else words
    options, words = take_options(words, _CONTAINER_WITHOUT_VALUE)
    if name in ("apptainer", "singularity"):
        found.container = [*options, ("image", words[0] if words else "")]
        return words[1:]
    found.lost.append(f"`{name}`: put its image into a file for Apptainer (hpc-rl image build), and add --image FILE")
    found.env |= dict(value.split("=", 1) for key, value in options if key in ("env", "e") and value and "=" in value)
    return words[1:] if name in ("docker", "podman") else words


def _wrapped(found: FoundProgram, name: str, words: list[str]) -> list[str]:
    """Return the words after a command such as `uv run` with its options."""
    first, without_value = _WRAPPERS[name]
    options, rest = take_options(words[2 if first else 1 :], without_value)
    rest = rest[1:] if rest[:1] == ["--"] or name == "timeout" else rest
    if first:
        found.has_environment = True
        found.lost.append(f"`{name} {first}`: set slurm.python to the Python of its environment (.venv/bin/python)")
    module = dict(options).get("m") or dict(options).get("module")
    return [found.python, "-m", module, *rest] if first and module else rest


def _inline(words: list[str]) -> str | None:
    """Return the text that `bash -c` or `eval` runs."""
    if words[0] == "eval":
        return " ".join(words[1:])
    place = next((index for index, word in enumerate(words) if re.fullmatch(r"-[a-z]*c[a-z]*", word)), len(words))
    return words[place + 1] if place + 1 < len(words) else None


def _first(found: FoundProgram, commands: Iterable[Command], scope: Scope) -> FoundProgram:
    """Return the first program of a `bash -c`, with the commands before it."""
    before: list[Command] = []
    for command in commands:
        if all(map(_ASSIGNMENT.match, command.words)):
            for word in command.words:
                scope.assign(word)
        if (inner := find_program(command.words, scope, deepcopy(found))).rank:
            inner.before = before + inner.before
            return inner
        before.append(command)
    found.rank = 0
    return found


def _launched(found: FoundProgram, name: str, rest: list[str]) -> FoundProgram:
    """Complete the program by the words from its launcher or its Python on."""
    if module := _COMMANDS.get((name, *rest[1:2])):
        end = rest.index("--launcher") if "--launcher" in rest else len(rest)
        name, rest = "torchrun", ["torchrun", "--nproc-per-node=gpu", "-m", *module, *rest[2:end]]
    elif _PYTHON.fullmatch(name):
        found.python, rest = name, rest[1:]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
            rest = rest[2:] if rest[0] in ("-W", "-X") else rest[1:]
        name = _MODULES.get(rest[1], "") if rest[:1] == ["-m"] and len(rest) > 1 else ""
        if not name:
            found.uses_ray = found.uses_ray or bool(_ON_RAY.match(" ".join(rest)))
            found.rank, found.words = max(found.rank, PLAIN), rest
            found.rank *= bool(rest) and rest[0] not in ("-c", "-")
            return found
        rest = rest[1:]
    elif name == "accelerate" and rest[1:2] == ["launch"]:
        rest = rest[1:]
    elif name not in ("torchrun", "deepspeed"):
        found.rank = 0
        return found
    options, words = take_options(rest[1:], _LAUNCHERS[name])
    given = {key: value or "" for key, value in options}
    found.processes = given.get("nproc-per-node") or given.get("num-gpus") or ("1" if name == "torchrun" else None)
    total, machines = given.get("num-processes", ""), given.get("num-machines", "1")
    if total.isdigit() and machines.isdigit():
        found.processes = str(int(total) // int(machines))
    _note_options(found, name, [f"--{key} {value}".strip() for key, value in given.items() if key not in _PLACING])
    if words and MARK.fullmatch(words[0]) and any(word.endswith(".py") for word in words[1:]):
        found.lost.append(f"{name} {plain(words[0])}: these options are not known")
        words = words[1:]
    found.words = ["-m", *words] if {"m", "module"} & given.keys() else words
    found.rank = LAUNCHER if words and (found.words[0] == "-m" or re.search(r"\.py$|/|\ue000", words[0])) else 0
    return found


def _note_options(found: FoundProgram, name: str, kept: list[str]) -> None:
    how = (
        ": precision, FSDP and DeepSpeed (also those in its file) become arguments of the program, or variables "
        "ACCELERATE_* and FSDP_* in slurm.env"
    )
    if kept:
        launcher = "accelerate launch" if name == "accelerate" else name
        found.lost.append(f"{launcher} {' '.join(kept)}" + (how if name == "accelerate" else ""))
