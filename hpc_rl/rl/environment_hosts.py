"""Environments on all nodes of a job: an actor on each node has an EnvironmentPool, whose processes run there.

The driver has one object for all of them, with the interface of a pool. An actor whose process or node is lost takes
only its own conversations with it: they end with an error, and others start on the nodes that are left. An actor is
lost too if it does not answer, which it is asked while it has requests, or if it cannot replace one of its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
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
ALIVE_TIMEOUT_S = 120.0
"""An actor that has requests, and does not answer for so long whether it is alive, is lost."""
CHECK_S = 5.0
"""Time between two looks at the answers to that question."""
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
    """The actor of a node. Its calls run at the same time.

    Args:
        node: name of the node, for errors.
        logs: folder of the log.
    """

    def __init__(self, node: str, logs: Path) -> None:
        self._node = node
        process.begin(logs / f"node{os.environ.get('SLURM_NODEID', '0')}-environments.log")
        self._pool: EnvironmentPool | None = None
        self._talks: dict[int, Conversation] = {}

    async def open(self, wanted: Wanted, workers: int, timeout_s: float) -> Offered:
        """Start the processes; see EnvironmentPool."""
        try:
            self._pool = await asyncio.to_thread(EnvironmentPool, wanted, workers, timeout_s)
        except UserError as error:
            raise type(error)(f"on node {self._node}: {error}") from error
        return self._pool.offered

    async def alive(self) -> None:
        """Answer."""

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
        self._failures: queue.SimpleQueue[_Failure | None] = queue.SimpleQueue()
        self._hosts = [_Host(node, logs, self._failures.put) for node in nodes]
        self._places: dict[int, _Host] = {}
        """Where each conversation is."""
        self._next = 0
        self._thread = threading.Thread(target=self._watch, name="environment-hosts", daemon=True)
        self._thread.start()
        opened = Pending.of_calls([host.call("open", wanted, workers, timeout_s) for host in self._hosts])
        try:
            self.offered: Offered = opened.wait(3 * START_TIMEOUT_S)[0]
        except UserError:
            self.close()
            raise

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
        self._places[self._next] = min(left, key=lambda each: (each.is_doubted, each.load))
        return Conversation(self, self._next, self.submit(self._next, Start(prompt, row)))

    def submit(self, number: int, request: Request) -> Future[Any]:
        """See RequestTaker."""
        host = self._places.pop(number) if isinstance(request, Finish) else self._places[number]
        answer: Future[Any] = Future()
        host.submit(number, request, answer)
        return answer

    def close(self) -> None:
        """See Environments."""
        if self._closed:
            return
        self._closed = True
        closing = [host.call("close") for host in self._hosts if host.lost is None]
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for call in closing:
            with contextlib.suppress(RunError):
                Pending.of_calls([call]).wait(max(0.0, deadline - time.monotonic()))
        self._failures.put(None)
        self._thread.join()
        for host in self._hosts:
            host.end()
            for answer in host.answers():
                if host.take(answer):
                    answer.set_exception(RunError(CLOSED))

    def _watch(self) -> None:
        """Handle failures, and look for actors that do not answer. Threads of Ray's, which report failures, must not
        wait for calls of Ray's, and this one may."""
        while True:
            with contextlib.suppress(queue.Empty):
                failure = self._failures.get(timeout=CHECK_S)
                if failure is None:
                    return
                self._handle(*failure)
            for host in self._hosts:
                if reason := host.check():
                    self._lose(host, reason)

    def _handle(self, host: _Host, answer: Future[Any], error: BaseException) -> None:
        """Settle a request that raised."""
        cause = error.cause if isinstance(error, RayTaskError) else None
        if isinstance(cause, RunError) and not self._closed:  # it cannot replace a process
            self._lose(host, str(cause))
        elif isinstance(cause, UserError):
            if host.take(answer):
                answer.set_exception(type(cause)(f"on node {host.node}: {cause}"))
        elif isinstance(error, ActorUnavailableError):  # the network may have failed for a moment
            host.is_doubted = True
            self._drop(host, answer, f"{host.name} did not answer: {_first_line(error)}")
        elif isinstance(error, RayActorError):
            self._lose(host, _first_line(error))
            self._drop(host, answer, str(host.lost))
        elif entry := host.take(answer):
            reason = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
            answer.set_result(failed(entry[1], f"its answer cannot be passed on: {reason}"))

    def _lose(self, host: _Host, reason: str) -> None:
        """End an actor that is lost, with its requests."""
        if host.lost is None:
            host.lost = f"{host.name} are lost: {reason}"
            if not self._closed:
                print(f"warning: {host.lost}; their conversations have no score, and other nodes go on", flush=True)
            host.end()
        for answer in host.answers():
            self._drop(host, answer, host.lost)

    def _drop(self, host: _Host, answer: Future[Any], reason: str) -> None:
        """Let a conversation that has not started start on another node; end any other with this reason."""
        entry = host.take(answer)
        if entry is None:
            return
        number, request = entry
        others = [each for each in self._hosts if each is not host and each.lost is None and not each.is_doubted]
        if isinstance(request, Start) and others and not self._closed:
            host.load -= 1
            other = self._places[number] = min(others, key=lambda each: each.load)
            other.submit(number, request, answer)
        else:
            answer.set_result(failed(request, reason))


class _Host:
    """The actor of a node, as the driver sees it.

    Args:
        report: is called with requests that raise, in a thread of Ray's.
    """

    def __init__(self, node: Node, logs: Path, report: Callable[[_Failure], None]) -> None:
        here = NodeAffinitySchedulingStrategy(node.id, soft=False)
        options = {"num_cpus": 0, "max_concurrency": MOST_CALLS, "scheduling_strategy": here}
        self._actor = ray.remote(EnvironmentHost).options(**options).remote(node.name, logs)
        self._described = Actor(f"the environments on node {node.name}", "environment", logs / "node*-environments.log")
        self._report = report
        self.node, self.name = node.name, self._described.name
        self.load = 0
        """Conversations that are not finished."""
        self.lost: str | None = None
        """Why the actor does not answer any more."""
        self.is_doubted = False
        """Whether a request did not reach the actor, which has not answered since."""
        self._open: dict[Future[Any], tuple[int, Request]] = {}
        """Requests without an answer."""
        self._alive: Future[Any] | None = None
        """The answer to the question whether the actor is alive."""
        self._asked = 0.0
        """When this was asked first after the last answer."""

    def call(self, method: str, *arguments: Any) -> ActorCall:
        """Start a call."""
        return ActorCall(getattr(self._actor, method).remote(*arguments), self._described)

    def submit(self, number: int, request: Request, answer: Future[Any]) -> None:
        """Send a request about a conversation."""
        self.load += isinstance(request, Start)
        self.load -= isinstance(request, Finish)
        self._open[answer] = number, request
        try:
            sent = self._actor.answer.remote(number, request).future()
        except Exception as error:  # noqa: BLE001 - pickle raises whatever the user's class raises
            if self.take(answer):
                answer.set_result(failed(request, f"its row cannot be passed on: {type(error).__name__}: {error}"))
        else:
            sent.add_done_callback(partial(self._settle, answer))

    def take(self, answer: Future[Any]) -> tuple[int, Request] | None:
        """Return the conversation and the request of an answer, once: who gets them sets the answer."""
        return self._open.pop(answer, None)

    def answers(self) -> list[Future[Any]]:
        """Return the answers that are not set."""
        return list(self._open)

    def _settle(self, answer: Future[Any], done: Future[Any]) -> None:
        """Set the answer to a request, or report why there is none. This runs in a thread of Ray's."""
        if error := done.exception():
            self._report((self, answer, error))
        elif self.take(answer):
            answer.set_result(done.result())

    def check(self) -> str | None:
        """Ask the actor whether it is alive, if it has requests; return why it is lost, or None."""
        if self.lost is not None or not (self._open or self.is_doubted):
            self._alive, self._asked = None, 0.0
            return None
        if self._alive is not None and self._alive.done():
            error, self._alive = self._alive.exception(), None
            if error is None:
                self._asked, self.is_doubted = 0.0, False
            elif not isinstance(error, ActorUnavailableError):
                return _first_line(error)
        self._asked = self._asked or time.monotonic()
        if time.monotonic() - self._asked > ALIVE_TIMEOUT_S:
            return f"no answer within {ALIVE_TIMEOUT_S:g} s"
        if self._alive is None:
            self._alive = self._actor.alive.remote().future()
        return None

    def end(self) -> None:
        """End the actor, with its processes."""
        ray.kill(self._actor)


_Failure = tuple[_Host, Future[Any], BaseException]
"""A request that raised."""


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
