"""Environments on all nodes of a job: an actor on each node has an EnvironmentPool, whose processes run there.

The driver has one object for all of them, with the interface of a pool. An actor whose process or node is lost takes
only its own conversations with it: they end with an error, and others start on the nodes that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hpc_rl.environments.pool import CLOSED, START_TIMEOUT_S, Conversation, EnvironmentPool, Environments
from hpc_rl.environments.protocol import Message, Outcome, Reply
from hpc_rl.environments.requests import Answer, Finish, Offered, Request, Start, Wanted, failed
from hpc_rl.errors import RunError, UserError
from hpc_rl.rl import process
from hpc_rl.rl.calls import ActorCall, Pending
from hpc_rl.rl.fates import Actor
from hpc_rl.rl.pools import Node, cluster_nodes

if TYPE_CHECKING:
    from hpc_rl.rl.cluster import DriverConfig

MOST_CALLS = 10_000
"""Requests that an actor accepts at a time. Its processes take one after the other."""
_CLOSE_TIMEOUT_S = 30.0


def open_environments(config: DriverConfig, logs: Path) -> Environments:
    """Start the processes of a run's environments, on all nodes of the job.

    Args:
        logs: folder of the logs of other processes.

    Raises:
        UserError: the environment or a tool cannot be loaded.
        RunError: a process ended, or took too long, while it loaded them.
    """
    own = config.environment
    wanted = Wanted(own.name, own.kwargs, own.tools, own.max_output_chars, own.sandbox)
    if config.trainer.nnodes == 1:
        return EnvironmentPool(wanted, own.workers, own.timeout_s)
    return EnvironmentFleet(wanted, own.workers, own.timeout_s, nodes_of_job(config.trainer.nnodes), logs)


def nodes_of_job(count: int) -> list[Node]:
    """Return the driver's node and others of its cluster, at most as many as the job has."""
    own = ray.get_runtime_context().get_node_id()
    return sorted(cluster_nodes(), key=lambda node: node.id != own)[:count]


class EnvironmentHost:
    """The actor of a node. Its calls run at the same time."""

    def __init__(self, logs: Path) -> None:
        process.log_to(logs / f"node{os.environ.get('SLURM_NODEID', '0')}-environments.log")
        self._pool: EnvironmentPool | None = None
        self._talks: dict[int, Conversation] = {}

    async def open(self, wanted: Wanted, workers: int, timeout_s: float) -> Offered:
        """Start the processes; see EnvironmentPool."""
        self._pool = await asyncio.to_thread(EnvironmentPool, wanted, workers, timeout_s)
        return self._pool.offered

    async def answer(self, number: int, request: Request) -> Reply | Outcome:
        """Return the answer to a request about a conversation."""
        assert self._pool is not None
        if isinstance(request, Start):
            talk = self._talks[number] = self._pool.start(request.prompt, request.row)
            return await asyncio.wrap_future(talk.first)
        if isinstance(request, Answer):
            return await asyncio.wrap_future(self._talks[number].answer(request.text, request.calls))
        return await asyncio.wrap_future(self._talks.pop(number).finish())

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)


class EnvironmentFleet:
    """The processes on several nodes; see Environments.

    Args:
        wanted: what each process loads.
        workers: number of processes on each node.
        timeout_s: time limit for each reset, step, tool call or reward.
        logs: folder of the actors' logs.

    Raises:
        UserError: the environment or a tool cannot be loaded on one of the nodes.
        RunError: an actor died, or a process ended or took too long, while it loaded them.
    """

    def __init__(self, wanted: Wanted, workers: int, timeout_s: float, nodes: Sequence[Node], logs: Path) -> None:
        self.workers = workers * len(nodes)
        self._closed = False
        self._hosts = [_Host(node, logs) for node in nodes]
        opened = Pending.of_calls([host.call("open", wanted, workers, timeout_s) for host in self._hosts])
        try:
            self.offered: Offered = opened.wait(3 * START_TIMEOUT_S)[0]
        except UserError:
            self.close()
            raise
        self._next = 0

    def start(self, prompt: list[Message], row: dict[str, Any]) -> Conversation:
        """See Environments. The conversation is on the node with the fewest. Each request about it has to wait for the
        answer to the one before, because calls of the actors have no order.

        Raises:
            RunError: all nodes are lost, or this is closed.
        """
        if self._closed:
            raise RunError(CLOSED)
        left = [host for host in self._hosts if host.lost is None]
        if not left:
            raise RunError(f"no process for environments is left: {self._hosts[0].lost}")
        self._next += 1
        host = min(left, key=lambda each: each.load)
        return Conversation(host, self._next, host.submit(self._next, Start(prompt, row)))

    def close(self) -> None:
        """See Environments."""
        if self._closed:
            return
        self._closed = True
        closing = [host.call("close") for host in self._hosts if host.lost is None]
        for call in closing:
            with contextlib.suppress(RunError):
                Pending.of_calls([call]).wait(_CLOSE_TIMEOUT_S)
        for host in self._hosts:
            host.end()


class _Host:
    """The actor of a node, as the driver sees it."""

    def __init__(self, node: Node, logs: Path) -> None:
        here = NodeAffinitySchedulingStrategy(node.id, soft=False)
        options = {"num_cpus": 0, "max_concurrency": MOST_CALLS, "scheduling_strategy": here}
        self._actor = ray.remote(EnvironmentHost).options(**options).remote(logs)
        self._name = Actor(f"the environments on node {node.name}", "environment", logs / "node*-environments.log")
        self.load = 0
        """Conversations that are not finished."""
        self.lost: str | None = None
        """Why the actor does not answer any more."""

    def call(self, method: str, *arguments: Any) -> ActorCall:
        """Start a call."""
        return ActorCall(getattr(self._actor, method).remote(*arguments), self._name)

    def submit(self, number: int, request: Request) -> Future[Any]:
        """Send a request about a conversation."""
        self.load += isinstance(request, Start)
        self.load -= isinstance(request, Finish)
        answer: Future[Any] = Future()
        try:
            sent = self._actor.answer.remote(number, request).future()
        except Exception as error:  # noqa: BLE001 - pickle raises whatever the user's class raises
            answer.set_result(failed(request, f"its row cannot be passed on: {type(error).__name__}: {error}"))
        else:
            sent.add_done_callback(lambda done: self._settle(request, done, answer))
        return answer

    def _settle(self, request: Request, done: Future[Any], answer: Future[Any]) -> None:
        """Set the answer to a request. This runs in a thread of Ray's."""
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
            answer.set_exception(error.cause)
        elif isinstance(error, RayActorError):
            answer.set_result(failed(request, self._lose(error)))
        else:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
            answer.set_result(failed(request, f"its answer cannot be passed on: {reason}"))

    def _lose(self, error: RayActorError) -> str:
        """Record that the actor is lost; return why."""
        if self.lost is None:
            self.lost = f"{self._name.name} are lost: {next(iter(str(error).splitlines()), '')}"
            print(f"warning: {self.lost}; their conversations have no score, and other nodes go on", flush=True)
        return self.lost

    def end(self) -> None:
        """End the actor, with its processes."""
        ray.kill(self._actor)
