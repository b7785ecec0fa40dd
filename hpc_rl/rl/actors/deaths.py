"""Why an actor died: what Ray, the kernel and the log of the actor contain, and what follows from it.

`death_cause` decides, and is a pure function. `evidence` asks; every question has a deadline, and may stay open.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hpc_rl.errors import RunError
from hpc_rl.system.deaths import KILLED, kill_cause, ran_out_of_memory
from hpc_rl.system.files import tail

Role = Literal["worker", "engine", "environment", "driver", "carrier"]

ASK_TIMEOUT_S = 20
"""Time for a question to the actor's node, which may have to start a process for it."""
LOG_LINES = 300
"""Lines at the end of a log that may contain the stacks of a crash."""
_REMEDIES: dict[Role, str] = {
    "worker": "lower trainer.micro_tokens, or request more --mem",
    "engine": "lower rollout.max_num_seqs, or request more --mem",
    "environment": "lower environment.workers, or request more --mem",
    "driver": "lower data.train_batch_size or reward.workers, or request more --mem",
    "carrier": "lower data.train_batch_size, or request more --mem",
}
_CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "SIGSEGV": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "SIGABRT": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "SIGBUS": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "SIGILL": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
    "SIGFPE": signal.SIGFPE,
}
"""Name of a crash, as Python's faulthandler or Ray writes it -> the signal."""
_CRASH = re.compile(r"^ *Fatal Python error: ([\w ]+)|^.*\*\*\* (SIG[A-Z]+) received", re.MULTILINE)


_REASON = "hpc-rl: process {pid} ends with exit code {code}: {text}"


@dataclass(frozen=True)
class ActorLabel:
    """An actor, as messages name it."""

    name: str
    """For example `rank 1 of pool train on node gpu03`."""
    role: Role
    log: Path | None = None
    """The file that it writes to, with * for what the driver does not know of its name."""
    may_leave: bool = False
    """Whether its node may leave at any time, so that the node is not asked, for whose answer the driver would wait."""

    def __str__(self) -> str:
        return f"{self.name} (log in {self.log.parent})" if self.log else self.name


@dataclass(frozen=True)
class Evidence:
    """What is known about a dead actor."""

    error: str
    """Ray's text."""
    lost_node: str | None = None
    """Why Ray gave up the actor's node; None if the node is in the cluster, or is not known."""
    out_of_memory: bool | None = None
    """Whether the kernel killed a process of the job on that node for lack of memory; None if it does not count."""
    log: str = ""
    """End of the actor's log."""


@dataclass(frozen=True)
class DeathCause:
    """How an actor ended: the end of the sentence `... died: TEXT`, and the exit code of the job."""

    text: str
    exit_code: int


class ActorDiedError(RunError):
    """A process of the run died."""


def died(actor: ActorLabel, error: RayActorError) -> RunError:
    """Return the error of a run whose actor died, or does not answer."""
    if isinstance(error, ActorUnavailableError):
        return RunError(f"{actor} does not answer: {_first_line(str(error))}")
    cause = death_cause(evidence(error, actor.log, asks_node=not actor.may_leave), actor.role)
    return ActorDiedError(f"{actor} died: {cause.text}", cause.exit_code)


def death_cause(known: Evidence, role: Role) -> DeathCause:
    """Return how an actor ended. What is certain comes before what is likely."""
    kind, detail = _worker_exit(known.error)
    remedy = _REMEDIES[role]
    if known.lost_node is not None:
        return DeathCause(f"its node is lost ({known.lost_node})", 1)
    if left := _left_reason(known):
        return left
    if kind == "NODE_OUT_OF_MEMORY" or "running low on memory" in known.error:
        return DeathCause(
            f"killed by Ray's memory monitor, because the node was running low on memory: {remedy}", KILLED
        )
    if "SIGTERM" in detail:
        return DeathCause("terminated (signal 15, SIGTERM)", 128 + signal.SIGTERM)
    if (crash := _CRASH.search(known.log)) and (number := _CRASHES.get(crash[1] or crash[2])):
        return DeathCause(f"crashed (signal {number}, {number.name}); its log has the stack", 128 + number)
    if code := re.search(r"[Ee]xit code:? (\d+)", detail):
        return DeathCause(f"it ended by itself with exit code {code[1]}; its log has the reason", 1)
    if kind == "SYSTEM_ERROR" and "connection error" in detail:  # all that Ray sees of a process that was killed
        return DeathCause(kill_cause(known.out_of_memory, remedy), KILLED)
    return DeathCause(f"Ray ended it ({detail or _first_line(known.error)})", 1)


def exit_cause(exit_code: int, role: Role) -> DeathCause:
    """Return how a process on this node ended.

    Args:
        exit_code: as a shell shows it.
    """
    number = exit_code - 128
    if exit_code == KILLED:
        return DeathCause(kill_cause(ran_out_of_memory(os.environ), _REMEDIES[role]), KILLED)
    if number in list(signal.Signals):
        return DeathCause(
            f"ended by signal {number} ({signal.Signals(number).name}); its log has the reason", exit_code
        )
    return DeathCause(f"it ended by itself with exit code {exit_code}; its log has the reason", 1)


def leave_reason(cause: DeathCause) -> None:
    """Write to this process's log why it is about to end: `death_cause` finds it there."""
    text = cause.text.replace("\n", "\n    ")
    print(_REASON.format(pid=os.getpid(), code=cause.exit_code, text=text), flush=True)


def evidence(error: RayActorError, log: Path | None, asks_node: bool = True) -> Evidence:
    """Ask Ray for the node of a dead actor, and that node for its kernel's counter."""
    text = str(error)
    found = re.search(r"^[ \t]*ip: (\S+)$", text, re.MULTILINE)
    try:
        nodes = [node for node in ray.nodes() if found and node["NodeManagerAddress"] == found[1]]
    except RayError:  # then the error alone explains it
        nodes = []
    alive = [node for node in nodes if node["Alive"]]
    return Evidence(
        text,
        lost_node=_reason(nodes[-1]) if nodes and not alive else None,
        out_of_memory=_counted_on(alive[0]["NodeID"]) if alive and asks_node else None,
        log="\n".join(tail(path, LOG_LINES) for path in log.parent.glob(log.name)) if log else "",
    )


def _left_reason(known: Evidence) -> DeathCause | None:
    """Return what the process itself wrote with `leave_reason`. The log may have the reasons of earlier processes."""
    pid = re.search(r"^[ \t]*pid: (\d+)$", known.error, re.MULTILINE)
    pattern = _REASON.format(pid=pid and pid[1], code=r"(\d+)", text=r"(.*(?:\n {8}.*)*)")
    found = re.search(f"^ *{pattern}", known.log, re.MULTILINE)
    return DeathCause(found[2].replace("\n        ", "\n"), int(found[1])) if found else None


def _counted_on(node_id: str) -> bool | None:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    asked = ray.remote(_ran_out_of_memory).options(num_cpus=0, max_retries=0, scheduling_strategy=here).remote()
    with contextlib.suppress(RayError, GetTimeoutError):
        answer: bool | None = ray.get(asked, timeout=ASK_TIMEOUT_S)
        return answer
    return None


def _ran_out_of_memory() -> bool | None:
    return ran_out_of_memory(os.environ)


def _worker_exit(error: str) -> tuple[str, str]:
    """Return Ray's type and detail of a worker's exit; empty if it has none."""
    found = re.search(r"Worker exit type: (\w+) Worker exit detail: (.*)", error)
    return (found[1], found[2].strip()) if found else ("", "")


def _reason(node: dict[str, Any]) -> str:
    return str(node.get("DeathReasonMessage") or node.get("DeathReason") or "Ray does not say why")


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
