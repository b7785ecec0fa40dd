import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.node.rank import place_in_job
from hpc_rl.node.rank_ends import read_exits
from hpc_rl.node.torchrun import parse, process_environment, torchrun_command
from hpc_rl.run_dir import read_outcome
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.software import jit_caches
from tests.marks import long

DEADLINE_S = 600
SCRATCH = Path("/tmp/scratch")
PAIR = Allocation("7", 1, ("a", "b"), 1, cpus=8)


def options(*extra: str, processes: int = 4) -> argparse.Namespace:
    return parse(["--processes", str(processes), *extra, "--", "train.py"])


def test_what_the_user_exported_wins() -> None:
    exported = {"NCCL_DEBUG": "INFO", "PATH": "/bin", "TMPDIR": "/var/tmp"}
    environ = process_environment(exported, PAIR, options(), "ib0", SCRATCH)
    assert environ == {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "TMPDIR": str(SCRATCH),  # which is not in the user's, so that one cannot be used
        "HPC_RL_HEARTBEATS": str(SCRATCH / "heartbeats"),
        "OMP_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "true",
        "GLOO_SOCKET_IFNAME": "ib0",
        **{name: environ[name] for name in jit_caches.VARIABLES},
    }
    staged = process_environment({"TMPDIR": "/local/7"}, PAIR, options(), "ib0", Path("/local/7/0.7.abc"))
    assert staged["TMPDIR"] == "/local/7"
    own = {"TRITON_CACHE_DIR": "/mine"}
    assert process_environment(own, PAIR, options(), "ib0", SCRATCH)["TRITON_CACHE_DIR"] == "/mine"
    assert process_environment({}, PAIR, options(processes=16), "lo", SCRATCH)["OMP_NUM_THREADS"] == "1"


def test_nccl_is_bound_only_to_an_interface_that_the_user_chose() -> None:
    chosen = options("--interface", "hsn0")
    assert process_environment({}, PAIR, chosen, "hsn0", SCRATCH)["NCCL_SOCKET_IFNAME"] == "=hsn0"
    assert "NCCL_SOCKET_IFNAME" not in process_environment({}, PAIR, options("--device", "cpu"), "hsn0", SCRATCH)


def test_each_node_has_a_torchrun_of_its_own() -> None:
    command = torchrun_command(PAIR, 4, "/tmp/scratch", ["train.py", "--lr", "1"])
    assert {"--nnodes=1", "--nproc-per-node=4", "--rdzv-backend=local"} < set(command)
    assert command[-6:] == ["-m", "hpc_rl.node.rank", "--", "train.py", "--lr", "1"]


def test_ranks_follow_slurms_order_of_nodes() -> None:
    environ = {"HPC_RL_NODE_RANK": "2", "HPC_RL_NODES": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "RANK": "1"}
    assert place_in_job(environ) == {
        **{"RANK": "9", "ROLE_RANK": "9", "WORLD_SIZE": "12", "ROLE_WORLD_SIZE": "12"},
        **{"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"},
    }


INHERITED = {
    "GLOO_SOCKET_IFNAME": "^lo,docker0",
    "CUDA_VISIBLE_DEVICES": "1",
    "ROCR_VISIBLE_DEVICES": "1",
    "https_proxy": "http://proxy:3128",
}
"""What Slurm and shells set, and what cannot work."""


def test_ranks_do_not_inherit_what_cannot_work(entry: "Entry") -> None:
    names = [*INHERITED, "no_proxy"]
    program = f"import json, os; print(json.dumps([os.environ.get(name) for name in {names}]), flush=True)"
    code, out, err = entry.run(program, **INHERITED, no_proxy="mine")
    assert code == 0, err
    assert '["lo", "1", null, "http://proxy:3128", "mine,localhost,127.0.0.1"]' in out
    assert "hpc-rl: node localhost: GLOO_SOCKET_IFNAME=^lo,docker0 fits no interface of this node" in err
    assert (
        "hpc-rl: node localhost: the devices are those of NVIDIA: CUDA_VISIBLE_DEVICES=1 holds, instead of ROCR" in err
    )


@pytest.fixture
def entry(tmp_path: Path) -> Iterator["Entry"]:
    entry = Entry(tmp_path)
    yield entry
    entry.end()


class Entry:
    """Runs the node entry of one node as Slurm would.

    Args:
        options: further options of the node entry.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        self.attempt = folder / "attempt-1"
        self.attempt.mkdir()
        self._running: list[subprocess.Popen[str]] = []

    def start(self, program: str, **environ: str) -> "subprocess.Popen[str]":
        (self.folder / "program.py").write_text(program)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0"}
        command = [sys.executable, "-m", "hpc_rl.node.torchrun", "--processes", "2", "--start-timeout", "5"]
        process = subprocess.Popen(
            [*command, *self._options, "--", str(self.folder / "program.py"), "a b"],
            cwd=self.folder,
            env={**os.environ, **slurm, "HPC_RL_ATTEMPT_DIR": str(self.attempt), "OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._running.append(process)
        return process

    def run(self, program: str, **environ: str) -> tuple[int, str, str]:
        process = self.start(program, **environ)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def await_marks(self) -> list[Path]:
        """Wait for the files with the process ids of both ranks, which the program writes."""
        deadline = time.monotonic() + DEADLINE_S
        marks = [self.folder / f"program.py.{rank}" for rank in range(2)]
        while not all(mark.exists() and mark.read_text() for mark in marks):
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in self._running), "the node entry has ended"
            time.sleep(0.05)
        return marks

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait(600)


RANK = "import os, sys; rank = os.environ['RANK']\n"


def test_each_rank_has_a_log_and_rank_0_is_shown(entry: Entry) -> None:
    code, out, _ = entry.run(RANK + "print(f'rank {rank} of', os.environ['WORLD_SIZE'], sys.argv[1:])")
    assert (code, out) == (0, "rank 0 of 2 ['a b']\n")
    assert (entry.attempt / "node0-rank1.log").read_text() == "rank 1 of 2 ['a b']\n"
    assert (entry.attempt / "node0.log").exists()


def test_only_rank_0_continues_the_run_of_wandb(tmp_path: Path) -> None:
    entry = Entry(tmp_path, "--adapter", "prime-rl")
    try:
        code, out, _ = entry.run("import os; print(os.environ.get('WANDB_RUN_ID'))")
    finally:
        entry.end()
    assert (code, out.strip()) == (0, (tmp_path / ".wandb-id").read_text())
    assert (entry.attempt / "node0-rank1.log").read_text() == "None\n"


def test_programs_meet_by_torchs_own_variables_or_in_the_private_folder(entry: Entry) -> None:
    program = """
import os, torch, torch.distributed as dist
store = dist.FileStore(os.environ["HPC_RL_GROUP_DIR"] + ".store", -1)
places = [{}, {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}]
for place in places:
    dist.init_process_group("gloo", **place)
    sum = torch.ones(1) + dist.get_rank()
    dist.all_reduce(sum)
    assert sum == 3, sum
    dist.destroy_process_group()
print(os.environ["TORCHELASTIC_RUN_ID"], os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"])
"""
    assert entry.run(program) == (0, "7.0 0 2\n", "")


@pytest.mark.parametrize(("code", "left"), [(3, 3), long(75, 0)])
def test_the_ranks_exit_code_is_the_jobs(entry: Entry, code: int, left: int) -> None:
    """srun, which takes other codes than 0 as failures, sees none if the ranks have saved and stopped."""
    assert entry.run(f"raise SystemExit({code})")[0] == left
    assert read_outcome(entry.attempt) == code


def test_the_first_rank_to_fail_is_named_with_the_end_of_its_log(entry: Entry) -> None:
    code, out, _ = entry.run(RANK + "import time\nif rank == '1': sys.exit('no luck')\ntime.sleep(60)")
    assert code == 1
    assert "rank 1 on node localhost failed with exit code 1; its log is" in out
    assert out.rstrip().endswith("no luck")


def test_a_killed_rank_is_told_from_one_that_left(entry: Entry) -> None:
    code, out, _ = entry.run(RANK + "import signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert code == 137
    assert "exit code 137 (killed (signal 9) by a user or a program, or for lack of memory" in out


def test_bad_input_is_one_line(entry: Entry) -> None:
    """Rank 0, which prints the message, is the last to end."""
    slow = "import time\nif rank == '0':\n    time.sleep(3); print('data.x: wrong')\nsys.exit(2)"
    code, out, err = entry.run(RANK + slow)
    assert (code, out, err) == (2, "data.x: wrong\n", "")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        (
            {"HPC_RL_ATTEMPT_DIR": "/nowhere/attempt-1", "SLURM_JOB_NODELIST": "a,b", "SLURM_NODEID": "3"},
            "SLURM_NODEID is 3",
        ),
    ],
)
def test_what_is_missing_is_one_line_and_exit_code_2(entry: Entry, environ: dict[str, str], said: str) -> None:
    code, _, err = entry.run("", **environ)
    assert code == 2
    assert err.startswith("hpc-rl: ") and said in err and "Traceback" not in err


def test_ranks_that_save_longer_are_not_ended(entry: Entry) -> None:
    slow = "import time\nif rank == '0':\n    time.sleep(3); open(sys.argv[0] + '.saved', 'w')\nsys.exit(75)"
    assert (entry.run(RANK + slow)[0], read_outcome(entry.attempt)) == (0, 75)
    assert (entry.folder / "program.py.saved").exists()


def test_a_rank_that_ignores_sigterm_is_killed(entry: Entry) -> None:
    process = entry.start(
        RANK + "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'{sys.argv[0]}.{rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    marks = entry.await_marks()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    for mark in marks:
        assert not Path(f"/proc/{mark.read_text()}").exists()


def test_nothing_survives_the_entry(entry: Entry) -> None:
    process = entry.start(
        RANK + "import time\nopen(f'{sys.argv[0]}.{rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    marks = entry.await_marks()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    for mark in marks:
        assert not Path(f"/proc/{mark.read_text()}").exists()
    assert [ended.exit_code for ended in read_exits(entry.attempt)] == [143, 143]


SAVES = RANK + (
    "import pathlib, time\n"
    "open(f'{sys.argv[0]}.{rank}', 'w').write(str(os.getpid()))\n"
    "stop = pathlib.Path(os.environ['HPC_RL_ATTEMPT_DIR']).parent / 'stop'\n"
    "while not stop.exists(): time.sleep(0.05)\n"
    "sys.exit(75 if stop.read_text() == os.environ['EXPECTED'] else 1)\n"
)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGTERM, "preemption"), (signal.SIGUSR2, "requeue")])
def test_a_signal_of_slurm_lets_the_ranks_save(entry: Entry, number: int, reason: str) -> None:
    process = entry.start(SAVES, SLURM_STEP_ID="0", EXPECTED=f"{reason}\n")
    entry.await_marks()
    process.send_signal(number)
    process.communicate(timeout=600)
    assert (process.returncode, read_outcome(entry.attempt)) == (0, 75)


def test_a_second_signal_ends_ranks_that_do_not_save(entry: Entry) -> None:
    process = entry.start(
        RANK + "import time\nopen(f'{sys.argv[0]}.{rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)",
        SLURM_STEP_ID="0",
    )
    marks = entry.await_marks()
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 600
    while not (entry.folder / "stop").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.poll() is None and Path(f"/proc/{marks[0].read_text()}").exists()
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None:  # signals that come close together are one
        process.send_signal(signal.SIGTERM)
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert process.returncode == 143
