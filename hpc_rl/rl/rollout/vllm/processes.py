"""The processes of a vLLM engine with tensor parallelism: where they run, where they log, and what follows if one dies.

vLLM's executor starts one worker for each device: a child process on CPUs, a Ray actor on GPUs. An engine that has lost
a worker cannot go on, so its process ends too, and the driver replaces it like any other engine that has died.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hpc_rl.errors import RunError
from hpc_rl.rl.actors.deaths import DeathCause, death_cause, evidence, exit_cause, leave_reason
from hpc_rl.rl.actors.process import log_to
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.system.files import tail
from hpc_rl.system.processes import shell_code

ENV_LOG = "HPC_RL_ENGINE_LOG"
"""The log of an engine whose workers have logs of their own beside it."""
NOTICE_S = 10.0
"""Time to wait for the death of a worker after a call has failed: another worker may have noticed the death earlier."""
SHUTDOWN_S = 20.0
"""Time in which vLLM ends the other workers: it waits 5 s, then 4 s after SIGTERM (MultiprocExecutor)."""
POLL_S = 1.0
LOG_LINES = 15
"""Lines at the end of a worker's log that a message shows."""

P = ParamSpec("P")
T = TypeVar("T")


def spread_over(placement: Placement) -> None:
    """Set the variables that vLLM's Ray executor reads (vllm/envs.py)."""
    os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(placement.gpu_share)
    os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, placement.bundles))


def give_workers_logs(log: Path | None) -> None:
    """Let the workers that this engine starts next log to files beside this one; None: to the engine's own output."""
    os.environ.pop(ENV_LOG, None)
    if log is not None:
        os.environ[ENV_LOG] = str(log)  # vLLM passes the variables of this process on to its workers


def worker_log(log: Path, rank: int) -> Path:
    """Return the log of a worker of the engine with this log."""
    return log.with_name(f"{log.stem}-worker{rank}.log")


def log_as_worker(rank: int) -> None:
    """Redirect the output of this worker to its log, if the engine has given its workers logs."""
    if log := os.environ.get(ENV_LOG):
        log_to(worker_log(Path(log), rank))
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stdout)  # vLLM marks each line of this one with the worker's name


@contextlib.contextmanager
def workers_explained(log: Path | None) -> Iterator[None]:
    """Raise a RunError with the ends of the workers' logs if the workers do not start.


    vLLM's own error may lack the cause. Errors in the engine's arguments are raised unchanged.
    """
    try:
        yield
    except (ValueError, TypeError):
        raise
    except Exception as error:  # vLLM has no type for it
        if log is None:
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        found = lines[-1 if isinstance(error, RayTaskError) else 0]
        logs = sorted(log.parent.glob(worker_log(log, 0).name.replace("worker0", "worker*")))
        ends = "".join(f"\nthe end of {each}:\n{tail(each, LOG_LINES)}" for each in logs)
        raise RunError(f"rollout.name=vllm: the workers of the engine did not start: {found}{ends}") from error


class Watched(Protocol):
    """An engine whose workers are watched."""

    watch: WorkerWatch


def ends_with_workers(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wrap a method of a Watched engine that calls its workers: if one has died, this process ends too.

    vLLM reports the death by one of several errors, perhaps before the process has ended.
    """

    @functools.wraps(method)
    def call(self: Watched, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return method(self, *arguments, **named)
        except TimeoutError as error:
            self.watch.give_up(DeathCause(f"its workers did not answer: {error}", 1))
            raise
        except (RuntimeError, AssertionError):
            self.watch.wait_for_the_end()
            raise

    return call


class Death(NamedTuple):
    """The end of a worker."""

    rank: int
    cause: Callable[[Path | None], DeathCause]
    """Finds out how it ended, which may take a while. The argument is the worker's log."""


class WorkerWatch:
    """End this process as soon as a worker of its engine has died.

    Args:
        executor: vLLM's. One that computes in this process has no workers, and is not watched.
        log: see `give_workers_logs`.
    """

    def __init__(self, executor: Any, log: Path | None) -> None:
        self._executor = executor
        self._log = log
        self._stops = threading.Event()
        self._found = threading.Event()
        self._ended = threading.Event()
        """Whether vLLM has ended the other workers."""
        self._first_death = _first_death_of_actors if hasattr(executor, "ray_worker_handles") else _first_death
        self._size = len(getattr(executor, "ray_worker_handles", None) or getattr(executor, "workers", ()))
        self._memory: list[Path] = []
        """Files of the shared memory through which engine and workers talk. Killed processes leave theirs."""
        if self._size:
            handles = [queue.export_handle() for queue in (executor.rpc_broadcast_mq, *executor.response_mqs)]
            self._memory = [Path("/dev/shm", handle.buffer_handle[-1]) for handle in handles if handle.buffer_handle]
            executor.register_failure_callback(self._ended.set)
            threading.Thread(target=self._run, name="worker watch", daemon=True).start()

    def stop(self) -> None:
        """Let the workers end."""
        self._stops.set()

    def wait_for_the_end(self) -> None:
        """Return if no worker has died. Otherwise this process ends."""
        if self._size and self._found.wait(NOTICE_S):
            threading.Event().wait()

    def give_up(self, cause: DeathCause) -> None:
        """End this process, and the workers with it. Return if there are none."""
        if self._size:
            self._end(cause)

    def _run(self) -> None:
        while not self._stops.is_set():
            death = self._first_death(self._executor)
            if death is not None and not self._stops.is_set():
                self._found.set()
                try:
                    cause = self._explained(death)
                except Exception as error:  # noqa: BLE001 - the process has to end whatever cannot be found out
                    cause = DeathCause(f"its worker {death.rank} of {self._size} died; why is not known: {error}", 1)
                self._ended.wait(SHUTDOWN_S)
                self._end(cause)

    def _explained(self, death: Death) -> DeathCause:
        log = worker_log(self._log, death.rank) if self._log else None
        cause = death.cause(log)
        text = f"its worker {death.rank} of {self._size} died: {cause.text}"
        if log and (lines := tail(log, LOG_LINES)):
            text += f"\nthe end of {log}:\n{lines}"
        return DeathCause(text, cause.exit_code)

    def _end(self, cause: DeathCause) -> None:
        try:
            leave_reason(cause)
            for file in self._memory:
                file.unlink(missing_ok=True)
        finally:
            os._exit(cause.exit_code)


def _first_death(executor: Any) -> Death | None:
    """Wait POLL_S for the death of a worker of vLLM's MultiprocExecutor."""
    workers = {worker.proc.sentinel: worker for worker in executor.workers}
    for ended in wait([*workers], POLL_S):
        worker = workers[ended]  # type: ignore[index]
        return Death(worker.rank, functools.partial(_cause_of_child, worker.proc))
    return None


def _cause_of_child(process: BaseProcess, _log: Path | None) -> DeathCause:
    while process.exitcode is None:  # vLLM's own thread waits too, and the kernel tells only one of them
        process.join(POLL_S)
    return exit_cause(shell_code(process.exitcode), "engine")


def _first_death_of_actors(executor: Any) -> Death | None:
    """Wait POLL_S for the death of a worker of vLLM's RayExecutorV2."""
    ranks = {worker.run_ref: worker.rank for worker in executor.ray_worker_handles}
    for ref in ray.wait([*ranks], num_returns=1, timeout=POLL_S)[0]:
        return Death(ranks[ref], functools.partial(_cause_of_actor, ref))
    return None


def _cause_of_actor(ref: Any, log: Path | None) -> DeathCause:
    try:
        ray.get(ref)
    except RayActorError as error:
        return death_cause(evidence(error, log), "engine")
    except RayError as error:
        return DeathCause(f"it failed: {str(error).strip().splitlines()[-1]}", 1)
    return DeathCause("it ended by itself", 1)
