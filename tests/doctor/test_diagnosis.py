"""Known failures by their messages: as the documentation shows them, and as programs here really say them."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.doctor.diagnosis import HEAD_BYTES, TAIL_BYTES, Text, error_lines, explain_run, findings, read_ends
from hpc_rl.doctor.known_failures import KNOWN_FAILURES
from hpc_rl.errors import UserError
from hpc_rl.host.ray_version import check_ray
from hpc_rl.node.meeting import Meeting
from hpc_rl.node.network import choose_address, given_block
from hpc_rl.node.ray_cluster.layout import check_length
from hpc_rl.node.ray_cluster.limits import granted
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import RunStatus
from hpc_rl.slurm.allocation import Allocation

GUIDE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
HERE = Allocation("7", 0, ("a", "b"), 1, cpus=2)


def sections() -> dict[str, str]:
    """Title -> symptoms, of the known failures in the documentation."""
    known = GUIDE.read_text().split("\n## Known failures\n")[1]
    parts = re.findall(r"^### (.+?)\n\n```\n(.*?)\n```", known, re.MULTILINE | re.DOTALL)
    assert len(parts) == known.count("\n### ")
    return dict(parts)


def titles(*texts: str) -> list[str]:
    return [finding.failure.title for finding in findings(Text("log", text) for text in texts)]


def test_the_documentation_has_every_failure_and_no_other_in_the_same_order() -> None:
    assert list(sections()) == [failure.title for failure in KNOWN_FAILURES]
    for failure in KNOWN_FAILURES:
        assert failure.anchor and " " not in failure.anchor


@pytest.mark.parametrize("title", sections())
def test_every_symptom_of_the_documentation_is_known(title: str) -> None:
    for line in sections()[title].splitlines():
        assert titles(f"before\n{line}\nafter")[0] == title, line


def test_causes_come_before_what_follows_from_them() -> None:
    watchdog = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"
    killed = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0"
    gone = "ray.exceptions.ActorDiedError: The actor died unexpectedly"
    assert titles(gone, f"{watchdog}\n{killed}") == [
        "Killed for lack of memory",
        "NCCL times out",
        "A process of the job has gone",
    ]


def test_what_ray_complains_of_comes_after_all_others() -> None:
    texts = [
        Text("raylet.out", "Detected 1 oom-kill event", own=False),
        Text("job.log", "Connection closed by peer"),
        Text("raylet.out", "Connection closed by peer", own=False),
    ]
    assert [(found.failure.title, found.source) for found in findings(texts)] == [
        ("A process of the job has gone", "job.log"),
        ("Killed for lack of memory", "raylet.out"),
    ]


@pytest.mark.parametrize(("value", "known"), [("0.004", False), ("0.031", True), ("3.1e-02", True), ("9e-3", False)])
def test_a_small_difference_of_probabilities_is_none(value: str, known: bool) -> None:
    assert bool(titles(json.dumps({"step": 3}) + f'\n{{"training/rollout_probs_diff_mean": {value}}}\n')) == known


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises((UserError, OSError, ModuleNotFoundError)) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


def occupied_block() -> None:
    with socket.create_server(("", 0)) as taken:
        given_block(taken.getsockname()[1], 2, "ray.first_port")


def second_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
        second.bind(first.getsockname())


def long_socket() -> None:
    with socket.socket(socket.AF_UNIX) as too_long:
        too_long.bind("/tmp/" + "x" * 200)


REAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "interface": (lambda _: choose_address("ib99", None), "An interface without an address"),
    "folder": (
        lambda tmp: Meeting(tmp / "no" / "attempt-1", ("a", "b"), 1).check_shared(0),
        "The nodes do not share the folder",
    ),
    "address": (lambda tmp: Meeting(tmp, ("a", "b"), 1).await_address(0), "Nodes did not start"),
    "ports": (lambda _: occupied_block(), "A port is taken"),
    "port": (lambda _: second_listener(), "A port is taken"),
    "gpus": (lambda _: granted(HERE, {"SLURM_GPUS_ON_NODE": "2"}, gpus=4), "Fewer GPUs than asked for"),
    "memory": (lambda _: granted(HERE, {"SLURM_MEM_PER_NODE": "100"}), "Shared memory too small"),
    "temporary folder": (
        lambda _: check_length(Path("/scratch/" + "x" * 60)),
        "The temporary folder's path is too long",
    ),
    "socket": (lambda _: long_socket(), "The temporary folder's path is too long"),
    "old Ray": (lambda _: check_ray("2.40.0", "python"), "Ray refuses a token"),
    "module": (lambda _: __import__("ray.no_such_thing"), "Python is missing on the nodes"),
}


@pytest.mark.parametrize("case", REAL)
def test_real_errors_are_known(case: str, tmp_path: Path) -> None:
    action, title = REAL[case]
    assert titles(error_of(lambda: action(tmp_path)))[0] == title


@pytest.mark.parametrize(
    ("number", "title"),
    [
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.ENOSPC, "No space left on device"),
        (errno.EMFILE, "Too many open files"),
        (errno.ENOTCONN, "The container's files have gone"),
        (errno.EHOSTUNREACH, "Nodes cannot reach each other"),
    ],
)
def test_the_systems_own_words_are_known(number: int, title: str) -> None:
    assert titles(f"OSError: {OSError(number, os.strerror(number))}") == [title]


LIBRARIES = """
import sys, tempfile, threading
from datetime import timedelta
import torch
import torch.distributed as dist

def show(action):
    try:
        action()
    except Exception as error:
        print("MESSAGE", f"{type(error).__name__}: {error}".replace(chr(10), " "), flush=True)

def lonely_all_reduce():
    folder, groups = tempfile.mkdtemp(), {}
    def join(rank):
        groups[rank] = dist.ProcessGroupGloo(dist.FileStore(folder + "/store", 2), rank, 2, timedelta(seconds=1))
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    groups[0].allreduce([torch.ones(4)]).wait()

show(lonely_all_reduce)
show(lambda: dist.TCPStore("127.0.0.1", 9, is_master=False, timeout=timedelta(seconds=1)))
from transformers import AutoTokenizer
show(lambda: AutoTokenizer.from_pretrained("nobody/none"))
"""


def test_what_torch_and_transformers_really_say_is_known() -> None:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIBRARIES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    messages = [line for line in done.stdout.splitlines() if line.startswith("MESSAGE")]
    assert [titles(message)[0] for message in messages] == [
        "NCCL times out",
        "Nodes cannot reach each other",
        "A model or data set is not in the cache",
    ], done.stdout


def failed_run(folder: Path, log: str, state: str = "FAILED") -> tuple[RunDir, RunStatus]:
    run = RunDir(folder / "run")
    (run.path / "attempt-1" / "ray" / "node0").mkdir(parents=True)
    (run.path / "attempt-2").mkdir()
    (run.path / "job-7.log").write_text(log)
    return run, RunStatus("run", str(run.path), "7", state, log=str(run.path / "job-7.log"))


def test_a_run_is_explained_by_its_newest_start_alone(tmp_path: Path) -> None:
    log = "Disk quota exceeded\nhpc-rl: saved before the walltime; job 7 is queued again\nRay is not up after 9 s\n"
    run, status = failed_run(tmp_path, log)
    (run.path / "attempt-1" / "node0.log").write_text("CUDA out of memory")
    (run.path / "attempt-2" / "node0-rank3.log").write_text(
        "Permission\nRuntimeError: no kernel image is available " * 9
    )
    (run.path / "attempt-2" / "node0-rank4.log").write_text("an illegal memory access was encountered")
    found, last = explain_run(run, status)
    assert [(one.failure.title, Path(one.source).name) for one in found] == [
        ("Illegal memory access in a rollout", "node0-rank4.log"),
        ("Ray does not come up", "job-7.log"),
    ]
    assert last == ["Ray is not up after 9 s"]


def test_what_slurm_says_explains_a_run_without_a_log(tmp_path: Path) -> None:
    run, status = failed_run(tmp_path, "", "NODE_FAIL")
    (one,) = explain_run(run, status)[0]
    assert (one.failure.title, one.source) == ("A node failed", "Slurm")


def test_an_unknown_failure_shows_its_last_errors() -> None:
    assert error_lines("fine\nValueError: one\nfine\nTypeError: two\nbye\n", 1) == ["TypeError: two"]
    assert error_lines("a\nb\nc\n", 2) == ["b", "c"]


def test_of_a_long_log_both_ends_are_read(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_text("first\n" + "x" * 5_000_000 + "\nlast\n")
    text = read_ends(log)
    assert text.startswith("first\n") and text.endswith("\nlast\n") and len(text) <= HEAD_BYTES + TAIL_BYTES + 1
    log.write_text("whole\n" * 30_000)
    assert read_ends(log) == log.read_text()
