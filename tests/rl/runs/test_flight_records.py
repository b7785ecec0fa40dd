"""Workers of a pool write their flight records when the node entry asks for them, as in a job that hangs."""

from __future__ import annotations

import time
from pathlib import Path

import ray

from hpc_rl.liveness.flight_records import WaitCause, wait_causes
from hpc_rl.node.hangs import stack_files
from hpc_rl.node.hangs.watch import process_states, read_heartbeats
from tests.rl.ppo_config import ppo_config
from tests.rl.runs.lone_rank import LoneRank

DEADLINE_S = 600


def test_a_worker_that_the_others_wait_for_is_found(cluster: None, tmp_path: Path) -> None:
    beats, logs = tmp_path / "beats", tmp_path / "attempt-1"
    for folder in (beats, logs):
        folder.mkdir()
    heard = {"env_vars": {"HPC_RL_HEARTBEATS": str(beats), "OMP_NUM_THREADS": "1"}}
    rank = ray.remote(LoneRank).options(num_cpus=1, runtime_env=heard)
    workers = [rank.remote(ppo_config(), "train", number, 2, 2, frozenset(), logs) for number in range(2)]
    try:
        group_dir = ray.get(workers[0].new_group_dir.remote(), timeout=DEADLINE_S)
        ray.get([worker.start.remote(group_dir) for worker in workers], timeout=DEADLINE_S)
        alone = workers[0].meet_others.remote()
        found: list[WaitCause] = []
        deadline = time.monotonic() + DEADLINE_S
        while not found and time.monotonic() < deadline:
            names = {beat.pid: beat.name for beat in read_heartbeats(beats).values()}
            waits = stack_files.collect(beats, logs, 0, names, process_states())
            found = wait_causes(logs)
        assert [(one.ranks, one.pool) for one in found] == [((1,), "train")]
        (late,) = found[0].names
        assert late in names.values() and {names[pid]: in_it for pid, in_it in waits.items()}[late] is False
        assert "in which rank 0 waits" in found[0].line
        ray.get([alone, workers[1].meet_others.remote()], timeout=DEADLINE_S)
    finally:
        for worker in workers:
            ray.kill(worker)
