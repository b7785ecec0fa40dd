"""Kill a small run at random moments, and resume it each time.

    python -m tests.faults.kills '[{"kind": "sft", "folder": "F", "options": ["model.path=M"], "kills": 5, "seed": 1}]'

The processes of a run are forked from this one, which has imported everything, so that a start takes about a second.
SFT runs as two ranks. PPO runs as a driver and two workers, and pipes between them stand for Ray.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import RunError
from hpc_rl.finetune import train, trainer  # noqa: F401 - imported before the fork
from hpc_rl.rl.actors import calls, process
from hpc_rl.rl.actors.pools import ClusterNode, Pool, Slot
from hpc_rl.rl.loop import saving, setup  # noqa: F401
from hpc_rl.rl.loop import trainer as rl_trainer  # noqa: F401
from hpc_rl.rl.main_ppo import TaskRunner
from hpc_rl.rl.rollout import request_queue
from hpc_rl.rl.workers import group
from hpc_rl.run_dir import RunDir
from hpc_rl.system.processes import descendants
from hpc_rl.training.checkpoints import folders

RANKS = 2
DEADLINE_S = 600
"""Limit of one start of a run, from its fork to its end."""
_POLL_S = 0.005
_STARTUPS = 0.15
"""Part of the kills that hit a run before its first step."""
_OUTLIVES_S = 0.3
"""How long the other processes may live on after the first one was killed."""


def kill_runs(
    kind: str, folder: str, options: Sequence[str], kills: int, seed: int, damage: str | None = None
) -> dict[str, int]:
    """Kill runs until there were enough kills, and let each run end. Return how many there were of both.

    Args:
        damage: file of the newest checkpoint that is changed at the end, before the last run starts again.
    """
    start, chance = {"sft": start_sft, "ppo": start_ppo}[kind], random.Random(seed)
    done, runs = 0, 0
    while done < kills or not runs:
        run, runs = RunDir(Path(folder) / f"run-{runs}"), runs + 1
        run.path.mkdir(parents=True)
        while not attempt(start, run, options, chance if done < kills else None):
            done += 1
            check(run)
    if damage:
        _, newest = folders.numbered(run.checkpoints)[0]
        data = bytearray((newest / damage).read_bytes())
        data[len(data) // 2] ^= 1
        (newest / damage).write_bytes(data)
        attempt(start, run, options, None)
    return {"kills": done, "runs": runs}


def attempt(start: Callable[..., NoReturn], run: RunDir, options: Sequence[str], chance: random.Random | None) -> bool:
    """Start a run, and kill it at a random moment; without a chance, let it end. Return whether it ended by itself."""
    number = len(run.attempts()) + 1
    logs = run.path / f"attempt-{number}"
    logs.mkdir()
    leader = forked(lambda: start(run, logs, options), logs / "output.log", new_session=True)
    began, steps = time.monotonic(), steps_of(run)
    kill_at = began + chance.random() if chance and chance.random() < _STARTUPS else None
    wanted = steps + (chance.randrange(1, 4) if chance else 10**9)
    while True:
        ended, status = os.waitpid(leader, os.WNOHANG)
        now = time.monotonic()
        if ended:
            kill(leader)
            if os.waitstatus_to_exitcode(status) == 0:
                return True
            sys.exit(f"attempt {number} failed with exit code {os.waitstatus_to_exitcode(status)}{log_ends(logs)}")
        if kill_at is None and steps_of(run) >= wanted:
            kill_at = now + chance.random() / 3 if chance else None
        if kill_at is not None and now > kill_at and chance:
            kill(leader, chance)
            return False
        if now > began + DEADLINE_S:
            kill(leader)
            sys.exit(f"attempt {number} did not end{log_ends(logs)}")
        time.sleep(_POLL_S)


def check(run: RunDir) -> None:
    """Check that a kill left only checkpoints that are as they were written."""
    for _, path in folders.numbered(run.checkpoints):
        if (problem := folders.damage_of(path)) is not None:
            sys.exit(f"{path} is damaged: {problem}")


def kill(leader: int, chance: random.Random | None = None) -> None:
    """Kill all processes of a run; with a chance, one of them first."""
    members = [*descendants(leader), leader]
    if chance:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(members), signal.SIGKILL)
        time.sleep(chance.random() * _OUTLIVES_S)
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(leader, 0)


def log_ends(logs: Path) -> str:
    """Return the last characters of each log of an attempt."""
    return "".join(f"\n--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(logs.glob("*.log")))


def steps_of(run: RunDir) -> int:
    """Return the number of steps that a run has recorded to their end."""
    return run.metrics.read_bytes().count(b'"timing_s/step"') if run.metrics.exists() else 0


def forked(work: Callable[[], None], log: Path | None = None, new_session: bool = False) -> int:
    """Run something in a new process, which ends after it; return its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        if new_session:
            os.setsid()
        if log is not None:
            process.log_to(log)
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a forked process must never return to the caller
        traceback.print_exc()
        os._exit(1)


def start_sft(run: RunDir, logs: Path, options: Sequence[str]) -> NoReturn:
    """Start the ranks, and exit with the code of the first one that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HPC_RL_GROUP_DIR=str(logs / "group"))
    os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))

    def rank(number: int) -> NoReturn:
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
        train.main(["--run-dir", str(run.path), *options])

    pids = [forked(lambda number=number: rank(number)) for number in range(RANKS)]  # type: ignore[misc]
    for _ in pids:
        _, status = os.wait()
        if status:
            os._exit(1)
    os._exit(0)


def start_ppo(run: RunDir, logs: Path, options: Sequence[str]) -> NoReturn:
    """Run the driver. Its workers are forked from it."""
    ray = SimpleNamespace(remote=Host.of, wait=wait, get=lambda ref: ref.result())
    context = SimpleNamespace(get_accelerator_ids=dict)
    for module in (group, calls, request_queue):
        module.ray = ray  # type: ignore[attr-defined]
    process.ray = SimpleNamespace(  # type: ignore[attr-defined]
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"), get_runtime_context=lambda: context
    )
    setup.create_pools = pools  # type: ignore[assignment]
    config = compose("ppo", [*options, f"trainer.n_gpus_per_node={RANKS}"])
    assert isinstance(config, PpoConfig)
    os._exit(TaskRunner().run(config, run, logs))


def pools(spec: dict[str, Sequence[int]], *_: Any) -> dict[str, Pool]:
    """Return pools on this machine."""
    node = ClusterNode("here", "here", address=1, gpus=0, cpus=8)
    return {name: Pool(name, [Slot(i, node, None, i) for i in range(sum(sizes))]) for name, sizes in spec.items()}  # type: ignore[arg-type]


class Host:
    """A forked process with an object; stands for a Ray actor."""

    def __init__(self, kind: type, arguments: Sequence[Any]) -> None:
        self._calls = 0
        self._results: dict[int, tuple[bool, Any]] = {}
        self.connection, theirs = multiprocessing.Pipe()

        def serve() -> None:
            self.connection.close()
            answer(theirs, kind(*arguments))

        forked(serve)
        theirs.close()

    @staticmethod
    def of(kind: type) -> Any:
        """Return what creates hosts, as ray.remote does."""
        made = SimpleNamespace(remote=lambda *arguments: Host(kind, arguments))
        return SimpleNamespace(options=lambda **_: made)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(method, arguments))

    def _call(self, method: str, arguments: Sequence[Any]) -> Ref:
        known = [one.result() if isinstance(one, Ref) else one for one in arguments]
        self.connection.send((self._calls, method, known))
        self._calls += 1
        return Ref(self, self._calls - 1)

    def take_result(self, number: int) -> tuple[bool, Any] | None:
        """Return (whether the call succeeded, its result or error), or None if there is no answer yet."""
        try:
            while self.connection.poll():
                one, *result = self.connection.recv()
                self._results[one] = (result[0], result[1])
        except (EOFError, OSError):
            return self._results.get(number, (False, RunError("a worker died")))
        return self._results.get(number)


class Ref:
    """The result of a call; stands for Ray's reference."""

    def __init__(self, host: Host, number: int) -> None:
        self.host = host
        self._number = number

    @property
    def is_ready(self) -> bool:
        return self.host.take_result(self._number) is not None

    def result(self) -> Any:
        """Wait for the result and return it, or raise the call's error."""
        while (found := self.host.take_result(self._number)) is None:
            multiprocessing.connection.wait([self.host.connection], DEADLINE_S)
        if not found[0]:
            raise found[1]
        return found[1]


def answer(connection: Connection, target: Any) -> None:
    """Answer calls until the other side is gone."""
    with suppress(EOFError, OSError):
        while True:
            number, method, arguments = connection.recv()
            try:
                result = (True, getattr(target, method)(*arguments))
            except Exception as error:  # noqa: BLE001 - raised on the other side
                traceback.print_exc()
                result = (False, error)
            connection.send((number, *result))


def wait(refs: Sequence[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
    """Wait until as many results are ready, as ray.wait does."""
    deadline = time.monotonic() + timeout
    while (
        len(ready := [ref for ref in refs if ref.is_ready]) < num_returns and (left := deadline - time.monotonic()) > 0
    ):
        multiprocessing.connection.wait([ref.host.connection for ref in refs if ref not in ready], left)
    ready = ready[:num_returns]
    return ready, [ref for ref in refs if ref not in ready]


if __name__ == "__main__":
    print(json.dumps([kill_runs(**request) for request in json.loads(sys.argv[1])]))
