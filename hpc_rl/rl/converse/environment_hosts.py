"""Environments on all nodes of a job: an actor on each node has an EnvironmentPool, whose processes run there.
Nodes that other jobs lend to the run for its environments get such actors too, and may come and leave at any time.

The driver has one object for all of them, with the interface of a pool. An actor whose process or node is lost takes
only its own conversations with it: they end with an error, and others start on the nodes that are left. An actor is
lost too if it does not answer, which it is asked while it has requests, or if it cannot replace one of its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.environments.pool import CLOSED, START_TIMEOUT_S, EnvironmentPool, Environments
from hpc_rl.environments.protocol import EpisodeResult, Reply
from hpc_rl.environments.requests import EnvironmentInfo, EnvironmentSpec, FinishRequest, Request, StartRequest, failed
from hpc_rl.errors import RunError, UserError
from hpc_rl.formats.counted import counted
from hpc_rl.formats.offer import LentEnvironments, write_lent_environments
from hpc_rl.rl.actors import process
from hpc_rl.rl.actors.calls import ActorCall, Pending
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.actors.pools import ClusterNode, cluster_nodes, lent_for_environments, takes_lent_nodes
from hpc_rl.rl.converse.loop_thread import LoopThread

if TYPE_CHECKING:
    from hpc_rl.rl.actors.cluster import DriverConfig

MOST_CALLS = 10_000
"""Requests that an actor accepts at a time. Its processes take one after the other."""
ALIVE_TIMEOUT_S = 120.0
"""An actor that has requests, and does not answer for so long whether it is alive, is lost."""
CHECK_S = 5.0
"""Time between two such questions."""
LOOK_S = 2.0
"""Time between two looks for lent nodes."""
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
    wanted = EnvironmentSpec(own.name, own.kwargs, own.tools, own.max_output_chars, own.sandbox)
    takes_lent = isinstance(config, PpoConfig) and takes_lent_nodes(logs)
    if config.trainer.nnodes == 1 and not takes_lent:
        return EnvironmentPool(wanted, own.workers, own.timeout_s)
    return EnvironmentFleet(wanted, own.workers, own.timeout_s, nodes_of_job(config.trainer.nnodes), logs, takes_lent)


def nodes_of_job(count: int) -> list[ClusterNode]:
    """Return the driver's node and others of its cluster, at most as many as the job has."""
    own = ray.get_runtime_context().get_node_id()
    return sorted(cluster_nodes(), key=lambda node: node.id != own)[:count]


class EnvironmentHost:
    """The actor of a node. Its calls run at the same time.

    Args:
        node: name of the node, for errors.
        logs: folder of the log.
        job: that lends the node, if it is a lent one.
    """

    def __init__(self, node: str, logs: Path, job: str | None = None) -> None:
        self._node = node
        lent = f"-lent{job}" if job else ""
        process.begin(logs / f"node{os.environ.get('SLURM_NODEID', '0')}{lent}-environments.log")
        self._pool: EnvironmentPool | None = None

    async def open(self, wanted: EnvironmentSpec, workers: int, timeout_s: float) -> EnvironmentInfo:
        """Start the processes; see EnvironmentPool."""
        try:
            self._pool = await asyncio.to_thread(EnvironmentPool, wanted, workers, timeout_s)
        except UserError as error:
            raise type(error)(f"on node {self._node}: {error}") from error
        return self._pool.offered

    async def alive(self) -> None:
        """Answer."""

    async def answer(self, number: int, request: Request) -> Reply | EpisodeResult:
        """Return the answer to a request about a conversation."""
        assert self._pool is not None
        answer: Reply | EpisodeResult = await asyncio.wrap_future(self._pool.submit(number, request))
        return answer

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)


class EnvironmentFleet(Environments):
    """The processes on several nodes; see Environments.

    Args:
        wanted: what each process loads.
        workers: number of processes on each node.
        timeout_s: time limit for each reset, step, tool call or reward.
        logs: folder of the actors' logs.
        takes_lent: whether to look for nodes that other jobs lend.

    Raises:
        UserError: the environment or a tool cannot be loaded on one of the nodes of the job.
        RunError: an actor died, or a process ended or took too long, while it loaded them.
    """

    def __init__(
        self,
        wanted: EnvironmentSpec,
        workers: int,
        timeout_s: float,
        nodes: Sequence[ClusterNode],
        logs: Path,
        takes_lent: bool = False,
    ) -> None:
        super().__init__()
        self.workers = workers * len(nodes)
        self._opens, self._each, self._logs = (wanted, workers, timeout_s), workers, logs
        self._closed = False
        self._hosts = [_Host(node, logs) for node in nodes]
        self._lent: dict[ClusterNode, _Host] = {}
        """The actors on lent nodes, also those that load the environment, and those that are lost."""
        self._recorded: list[LentEnvironments] = []
        self._places: dict[int, _Host] = {}
        """Where each conversation is."""
        self._loop = LoopThread("environment-hosts")
        for host in self._hosts:
            self._loop.start(self._watch(host))
        opened = Pending.of_calls([host.call("open", *self._opens) for host in self._hosts])
        try:
            self.offered = opened.wait(3 * START_TIMEOUT_S)[0]
        except UserError:
            self.close()
            raise
        if takes_lent:
            self._loop.start(self._look_for_lent())

    def submit(self, number: int, request: Request) -> Future[Any]:
        """See Environments. A conversation is on the node that had the fewest. Each request about it has to wait for
        the answer to the one before, because calls of the actors have no order."""
        if isinstance(request, StartRequest):
            self._places[number] = self._choose()
        host = self._places.pop(number) if isinstance(request, FinishRequest) else self._places[number]
        host.begin(isinstance(request, StartRequest))
        host.load -= isinstance(request, FinishRequest)
        return self._loop.start(self._answer(host, number, request))

    def _choose(self) -> _Host:
        """Return where a conversation starts."""
        if self._closed:
            raise RunError(CLOSED)
        left = [host for host in self._hosts if host.lost is None]
        if not left:
            raise RunError(f"no process for environments is left: {self._hosts[0].lost}")
        return min(left, key=lambda each: (each.is_doubted, each.load))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        closing = [host.call("close") for host in self._hosts if host.lost is None]
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for call in closing:
            with contextlib.suppress(RunError):
                Pending.of_calls([call]).wait(max(0.0, deadline - time.monotonic()))
        self._loop.start(self._end()).result()
        self._loop.close()

    async def _answer(self, host: _Host, number: int, request: Request) -> Reply | EpisodeResult:
        """Return the answer to a request about a conversation.

        A conversation that has not started may start on another node instead; any other one ends with its node.
        """
        while True:
            try:
                return await host.answer(number, request)
            except _LostError as error:
                reason = str(error)
            except ActorUnavailableError as error:  # the network may have failed for a moment
                host.is_doubted = True
                reason = f"{host.name} did not answer: {_first_line(error)}"
            except RayActorError as error:
                reason = self._lose(host, _first_line(error))
            except Exception as error:
                cause = error.cause if isinstance(error, RayTaskError) else None
                if not isinstance(cause, UserError):
                    found = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
                    return failed(request, f"its answer cannot be passed on: {found}")
                if self._closed or not (isinstance(cause, RunError) or host.job):
                    raise type(cause)(f"on node {host.node}: {cause}") from error
                reason = self._lose(host, str(cause))  # it cannot replace a process
            if self._closed:
                raise RunError(CLOSED)
            others = [each for each in self._hosts if each is not host and each.lost is None and not each.is_doubted]
            if not (isinstance(request, StartRequest) and others):
                return failed(request, reason)
            host.load -= 1
            host = self._places[number] = min(others, key=lambda each: each.load)
            host.begin()

    async def _look_for_lent(self) -> None:
        """Start an actor on each lent node that comes, and note that one has left."""
        while not self._closed:
            await asyncio.sleep(LOOK_S)
            try:
                alive = await asyncio.to_thread(lent_for_environments)
            except RayError:  # its first node is busy, or the run ends
                continue
            for node in alive.keys() - self._lent.keys():
                self._lent[node] = host = _Host(node, self._logs, alive[node])
                self._loop.start(self._admit(host))
            for node in self._lent.keys() - alive.keys():
                self._lose(self._lent[node], "its job has ended")
            self._record()

    async def _admit(self, host: _Host) -> None:
        """Let an actor on a lent node load the environment. It gets conversations then."""
        loaded = asyncio.wrap_future(host.call("open", *self._opens).ref.future())
        try:
            await asyncio.wait_for(loaded, 3 * START_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            self._lose(host, _last_line(error))
            return
        if host.lost is None and not self._closed:
            processes = counted(self._each, "environment process")
            print(f"job {host.job} lends node {host.node}: {processes}", flush=True)
            host.processes = self._each
            self.workers += self._each
            self._hosts.append(host)
            await self._watch(host)

    def _record(self) -> None:
        """Write what `status` shows of lent nodes, if it has changed."""
        found = [LentEnvironments(str(host.job), host.node, host.processes, host.begun) for host in self._lent.values()]
        if found != self._recorded:
            self._recorded = found
            with contextlib.suppress(OSError):
                write_lent_environments(self._logs, found)

    async def _watch(self, host: _Host) -> None:
        """Wait until an actor is lost."""
        self._lose(host, await host.silence())

    def _lose(self, host: _Host, reason: str) -> str:
        """End an actor that is lost, with its requests. Return why it is lost."""
        if host.lost is None:
            host.end(f"{host.name} are lost: {reason}")
            self.workers -= host.processes
            host.processes = 0
            if not self._closed:
                print(f"warning: {host.lost}; their conversations have no score, and other nodes go on", flush=True)
        return str(host.lost)

    async def _end(self) -> None:
        """End all actors, and wait until nobody waits for their answers."""
        for host in {*self._hosts, *self._lent.values()}:
            host.end(CLOSED)
        while any(host.has_requests for host in self._hosts):
            await asyncio.sleep(0)


class _LostError(Exception):
    """The actor of a node has been lost before it has answered."""


class _Host:
    """The actor of a node, as the driver sees it."""

    def __init__(self, node: ClusterNode, logs: Path, job: str | None = None) -> None:
        here = NodeAffinitySchedulingStrategy(node.id, soft=False)
        options = {"num_cpus": 0, "max_concurrency": MOST_CALLS, "scheduling_strategy": here}
        self._actor = ray.remote(EnvironmentHost).options(**options).remote(node.name, logs, job)
        name = f"the environments on node {node.name}" + (f" (job {job})" if job else "")
        self._described = ActorLabel(name, "environment", logs / "node*-environments.log")
        self.node, self.name, self.job = node.name, name, job
        self.processes = 0
        """Processes of a lent node, while it has conversations."""
        self.begun = 0
        """Conversations that were started there."""
        self.load = 0
        """Conversations that are not finished."""
        self.lost: str | None = None
        """Why the actor does not answer any more."""
        self.is_doubted = False
        """Whether a request did not reach the actor, which has not answered since."""
        self._open: set[asyncio.Future[Any]] = set()
        """Answers that are awaited."""

    def call(self, method: str, *arguments: Any) -> ActorCall:
        """Start a call."""
        return ActorCall(getattr(self._actor, method).remote(*arguments), self._described)

    def begin(self, is_start: bool = True) -> None:
        """Count a conversation, if one starts."""
        self.load += is_start
        self.begun += is_start

    @property
    def has_requests(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._open)

    async def answer(self, number: int, request: Request) -> Reply | EpisodeResult:
        """Return the answer to a request about a conversation.

        Raises:
            _LostError: the actor is lost.
            Exception: that of the call.
        """
        if self.lost is not None:
            raise _LostError(self.lost)
        try:
            sent = self._actor.answer.remote(number, request).future()
        except Exception as error:  # noqa: BLE001 - pickle raises whatever the user's class raises
            return failed(request, f"its row cannot be passed on: {type(error).__name__}: {error}")
        answer: asyncio.Future[Reply | EpisodeResult] = asyncio.shield(asyncio.wrap_future(sent))
        self._open.add(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            if self.lost is None:
                raise
            raise _LostError(self.lost) from None
        finally:
            self._open.discard(answer)

    async def silence(self) -> str:
        """Return why the actor is lost, once it is. It is asked whether it is alive while it has requests."""
        since: float | None = None
        """When it was asked first after its last answer."""
        while True:
            await asyncio.sleep(CHECK_S)
            if not (self._open or self.is_doubted):
                since = None
                continue
            since = time.monotonic() if since is None else since
            left_s = since + ALIVE_TIMEOUT_S - time.monotonic()
            try:
                alive = asyncio.wrap_future(self._actor.alive.remote().future())
                await asyncio.wait_for(asyncio.shield(alive), left_s)
            except TimeoutError:
                return f"no answer within {ALIVE_TIMEOUT_S:g} s"
            except ActorUnavailableError:  # the network may have failed for a moment
                continue
            except Exception as error:  # noqa: BLE001 - Ray's errors have no common class
                return _first_line(error)
            since, self.is_doubted = None, False

    def end(self, reason: str) -> None:
        """End the actor, with its processes. Who awaits its answers gets a _LostError."""
        if self.lost is None:
            self.lost = reason
        ray.kill(self._actor)
        for answer in self._open:
            answer.cancel()


def _last_line(error: BaseException) -> str:
    """Return the end of an error, which is the cause if Ray has passed it on."""
    return ([type(error).__name__, *str(error).strip().splitlines()])[-1]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
