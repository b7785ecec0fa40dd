"""Known failures by their messages: the examples of the table, and the messages that programs here really print."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.cli.text import explanation_text
from hpc_rl.config.keys import documented_keys
from hpc_rl.config.kinds import KINDS
from hpc_rl.doctor.diagnosis import (
    HEAD_BYTES,
    NOTHING,
    TAIL_BYTES,
    Explanation,
    LogText,
    explain_run,
    findings,
    last_lines,
    last_message,
    read_ends,
)
from hpc_rl.doctor.known_failures import ANY_EXCEPTION, KNOWN_FAILURES, page
from hpc_rl.errors import UserError
from hpc_rl.node.network import choose_address, given_blocks
from hpc_rl.node.ray_cluster.limits import ray_resources
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import RunStatus
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.software.ray_version import check_ray
from tests.fake_slurm import calls, fake_slurm
from tests.helpers import hpc_rl
from tests.small_disk import needs_root, small_disk

GUIDE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
HERE = Allocation("7", 0, ("a", "b"), 1, cpus=2)


def titles(*texts: str) -> list[str]:
    return [finding.failure.title for finding in findings(LogText("log", text) for text in texts)]


EXAMPLES = [(failure.title, line) for failure in KNOWN_FAILURES for line in failure.messages.strip("\n").split("\n")]


@pytest.mark.parametrize(("title", "line"), EXAMPLES)
def test_every_example_of_the_table_is_known(title: str, line: str) -> None:
    assert titles(f"before\n{line}\nafter")[0] == title, line


def test_options_that_a_remedy_names_exist() -> None:
    known = {key for kind in KINDS.values() for key, *_ in documented_keys(kind.schema)}
    sections = {key.partition(".")[0] for key in known if "." in key}
    free = ("slurm.env.", "rollout.engine_kwargs.", "ray_kwargs.", "ray.init")
    for failure in KNOWN_FAILURES:
        for key in re.findall(r"`(\w+(?:\.\w+)+)(?!\w*[(/])", f"{failure.cause} {failure.fix}"):
            if key.partition(".")[0] in sections and not key.startswith(free):
                assert key in known, (failure.title, key)


OTHERS = [
    # What happens in good runs too.
    ("srun: job 42 queued and waiting for resources", None),
    ("srun: job 42 has been allocated resources", None),
    ("node1:31:42 [0] NCCL INFO NET/IB : No device found.", None),
    ("node1:31:42 [0] NCCL INFO NET/OFI Using aws-ofi-nccl 1.7.4", None),
    ("INFO 11-21 13:28:37 llm_engine.py:249] Initializing with config: model='m', trust_remote_code=True", None),
    ("max locked memory       (kbytes, -l) 64", None),
    ("tmpfs on /tmp type tmpfs (rw,nosuid,noexec)", None),
    ("INFO:    squashfuse not found, will not be able to mount SIF or other squashfs files", None),
    ("[node1:10221] PMIX ERROR: PMIX_ERR_NOT_FOUND in file gds_ds12_lock_pthread.c at line 169", None),
    ("the job exited with code 0", None),
    ("loading 137 files, step 524 of 900", None),
    ("slurm_load_jobs error: Invalid job id specified", "The allocation has ended"),
    # Messages that resemble those of another cause.
    (
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "The GPU is in use by another process",
    ),
    ("RuntimeError: No CUDA GPUs are available", "No GPU is visible"),
    ("ncclSystemError: System call (e.g. socket, malloc) failed", "A system call of NCCL failed"),
    ("ncclInternalError: Internal check failed.", "NCCL reports an internal error"),
    ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "The limit on locked memory is too low"),
    ("OSError: [Errno 12] Cannot allocate memory", "The program requested more memory than there is"),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.", "CUDA out of memory"),
    ("OSError: [Errno 13] Permission denied: '/data/x'", "Permission denied"),
    ("PermissionError: [Errno 13] Permission denied: '/tmp/ray/session_1'", "Ray's folder belongs to another user"),
    ("bash: ./x: /bin/sh: bad interpreter: Permission denied", "Files of a folder cannot be executed"),
    ("bash: ./x: /opt/py: bad interpreter: No such file or directory", "A script's interpreter is missing"),
    ("huggingface_hub.errors.LocalEntryNotFoundError: Cannot find", "A model or data set is not in the cache"),
    ("huggingface_hub.errors.EntryNotFoundError: 404 Client Error.", "A name on the hub does not exist"),
    (
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "A shared library is missing",
    ),
    ("ImportError: x.so: undefined symbol: ncclCommRegister", "The versions of NCCL differ"),
    ("ImportError: x.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "Two packages were built for different versions"),
    ("pyxis:     Write failed because No space left on device", "No space left on device"),
    ("FATAL:   container creation failed: open /x: no space left on device", "The container could not be created"),
    ("srun: error: Unable to create step for job 7: Invalid account", "A step could not be launched"),
    (
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        "Walltime reached",
    ),
    ("ray.exceptions.OutOfMemoryError: Task was killed", "Killed by Ray's memory monitor"),
    ("OSError: [Errno 107] Transport endpoint is not connected", "The container's files are no longer available"),
    (
        "OSError: [Errno 108] Cannot send after transport endpoint shutdown",
        "The parallel file system lost its connection",
    ),
]


@pytest.mark.parametrize(("line", "title"), OTHERS)
def test_a_message_does_not_get_another_cause(line: str, title: str | None) -> None:
    assert titles(f"before\n{line}\nafter") == ([] if title is None else [title])


UNKNOWN = [
    "srun: error: the moon is in the wrong phase",
    "slurmstepd: error: spank: plugin quux said no",
    "sbatch: fatal: cli_filter plugin terminated with error",
    "/var/spool/slurmd/job00042/slurm_script: line 12: frobnicate: too many wheels",
    "FATAL:   the frobnicator is not configured",
    "[ERROR] the image has no frobnicator",
    "slurmstepd: error: pyxis: the frobnicator is closed",
    "bash: line 3: cd: too many arguments",
    "/opt/env/bin/python3.11: Error while finding the frobnicator",
    "enroot-frob: it does not frob",
]
LATER = "srun: error: node1: task 0: Exited with exit code 1\nKeyError: 'later'\nsrun: error: another one\n"


@pytest.mark.parametrize("line", UNKNOWN)
def test_the_first_error_of_the_launch_is_shown_even_if_its_cause_is_unknown(line: str, tmp_path: Path) -> None:
    run, status = failed_run(tmp_path, f"srun: job 42 queued\n{LATER.splitlines()[0]}\n{line}\n{LATER}")
    for brief in (True, False):
        shown = explanation_text(explain_run(run, status), brief).splitlines()
        assert shown[shown.index("the first error of the launch:") + 1] == f"  {line}"
    (run.path / "job-7.log").write_text(f"{line}\n")
    assert explanation_text(explain_run(run, status), brief=True).splitlines()[-1] == f"  {line}"
    refused = explain_run(run, replace(status, exit_code=2))
    assert line in explanation_text(refused, brief=True)


def test_the_first_error_of_the_launch_is_shown_once(tmp_path: Path) -> None:
    busy = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    run, status = failed_run(tmp_path, f"{busy}\nsrun: error: Unable to create step for job 7: Unspecified error\n")
    found = explain_run(run, status)
    assert found.findings[0].failure.title == "The allocation has no free resources for a step"
    assert found.launch_error == ""
    run.path.joinpath("job-7.log").write_text("srun: job 7 queued\nstep 1\n")
    assert explain_run(run, status).launch_error == ""


def own_patterns() -> list[str]:
    """Patterns of the project's own messages: those that match an example which starts with hpc-rl."""
    found = []
    for failure in KNOWN_FAILURES:
        own = "\n".join(line for line in failure.messages.splitlines() if line.startswith("hpc-rl: "))
        for pattern in failure.patterns:
            if re.search(".*?".join(map(re.escape, pattern.split("*"))), own):
                found.append(pattern)
    return found


@pytest.mark.parametrize("pattern", own_patterns())
def test_the_projects_own_messages_are_in_its_source(pattern: str) -> None:
    """A message that is reworded has to be reworded in the table too."""
    root = Path(__file__).parents[2]
    files = [*(root / "hpc_rl").rglob("*.py"), *(root / "slurm_templates").iterdir()]
    source = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)
    for part in pattern.split("*"):
        assert part in source, part


def test_the_table_is_well_formed() -> None:
    assert len({failure.title for failure in KNOWN_FAILURES}) == len({failure.anchor for failure in KNOWN_FAILURES})
    for failure in KNOWN_FAILURES:
        assert failure.anchor and " " not in failure.anchor
        assert bool(failure.patterns) == (failure is not ANY_EXCEPTION)
        for text in (failure.cause, failure.fix):
            assert text.endswith(".") and (text[0].isupper() or text.startswith(("`", "torch"))), text


def test_the_documentation_is_up_to_date() -> None:
    assert GUIDE.read_text() == page(GUIDE.read_text()), (
        "run: python -m hpc_rl.doctor.known_failures docs/troubleshooting.md"
    )


def test_causes_come_before_what_follows_from_them() -> None:
    watchdog = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"
    killed = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0"
    gone = "ray.exceptions.ActorDiedError: The actor died unexpectedly"
    assert titles(gone, f"{watchdog}\n{killed}") == [
        "Killed for lack of memory",
        "NCCL times out",
        "A process of the job has ended",
    ]


def test_rays_own_logs_are_searched_for_causes_alone_and_come_after_the_others() -> None:
    ray = LogText("raylet.out", "Disk quota exceeded\nValueError: no dashboard\nRaylet is terminated", role="ray")
    own = LogText("rank.log", "CUDA out of memory\nRaylet is terminated")
    assert [found.failure.title for found in findings([ray])] == ["Disk quota exceeded"]
    assert [(found.failure.title, found.source) for found in findings([ray, own])] == [
        ("CUDA out of memory", "rank.log"),
        ("Disk quota exceeded", "raylet.out"),
        ("A process of the job has ended", "rank.log"),
    ]


def test_what_ray_reports_of_slurm_comes_before_what_others_noticed() -> None:
    texts = [
        LogText("raylet.out", "Detected 1 oom-kill event", role="ray"),
        LogText("job.log", "Connection closed by peer"),
        LogText("raylet.out", "Connection closed by peer", role="ray"),
    ]
    assert [(found.failure.title, found.source) for found in findings(texts)] == [
        ("Killed for lack of memory", "raylet.out"),
        ("A process of the job has ended", "job.log"),
    ]


NOISE = """
[2026-11-21 16:03:45,369 I 249 249] actor_manager.cc:236: state: DEAD, death context type=ActorDiedErrorContext
\x1b[36m(Worker pid=3137, ip=10.0.0.2)\x1b[0m [2026-11-21 16:03:45,369 W 249 249] store.cc:366: Disk quota exceeded
(raylet) [2026-11-21 16:03:45,369 D 249 249] store.cc:366: CUDA out of memory
2026-11-21 16:03:17,535\tINFO worker.py:1 -- Address already in use
2026-11-21 16:03:17,535\tWARNING worker.py:1 -- Address already in use
[W1121 16:06:07.973195985 socket.cpp:138] [c10d] Address already in use
[rank3]:[W1121 16:06:07.973195985 socket.cpp:138] [c10d] Address already in use
"""


@pytest.mark.parametrize("line", NOISE.strip().splitlines())
def test_what_is_no_error_is_ignored(line: str) -> None:
    assert titles(line) == []
    error = re.sub(
        r" [IWD] (?=\d)|INFO|WARNING|(?<=\[)W(?=\d)", lambda found: " E " if " " in found[0] else "ERROR", line
    )
    assert len(titles(error)) == 1, error


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("ValueError: no number", True),
        ("[rank1]: ValueError: no number", True),
        ("rank 1: torch.cuda.OddError: no number", True),
        ("    my.module.StrangeException", True),
        ("ray.exceptions.RayTaskError(OddError): ray::Actor.act()", True),
        ("(Actor pid=7) KeyboardInterrupt", True),
        ("UserWarning: take care", False),
        ("the reward raised ValueError: no number", False),
        ("    raise ValueError('no number')", False),
        ("NoErrorHere: fine", False),
    ],
)
def test_any_exception_is_a_failure(line: str, known: bool) -> None:
    assert titles(f"Traceback (most recent call last):\n{line}\nbye") == [ANY_EXCEPTION.title] * known


def test_the_last_exception_that_is_no_consequence_is_the_failure() -> None:
    text = "ValueError: first\nKeyError: second\nray.exceptions.ActorDiedError: gone"
    (first, second) = findings([LogText("log", text)])
    assert (first.failure, first.line) == (ANY_EXCEPTION, "KeyError: second")
    assert second.line == "ray.exceptions.ActorDiedError: gone"


def test_a_job_that_left_no_log_is_explained(tmp_path: Path) -> None:
    run, status = failed_run(tmp_path, "")
    Path(status.log or "").unlink()
    (found,) = explain_run(run, status).findings
    assert (found.failure.title, found.source) == ("The nodes do not share the folder", str(run.path))
    assert explain_run(run, replace(status, state="CANCELLED")).findings == []
    full = explain_run(run, replace(status, disk="no bytes are free")).findings
    assert [one.failure.title for one in full] == ["No space left on device"]
    Path(status.log or "").touch()
    assert explain_run(run, status).findings == []


@needs_root
@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("explain", 0, "The nodes do not share the folder"),
        ("status", 0, "The nodes do not share the folder"),
        ("logs", 2, "has no log yet in {}: its job has ended (FAILED), and hpc-rl explain lost shows why"),
        (
            "report",
            2,
            "run lost has nothing to report: its job has failed and left no log; hpc-rl explain lost shows why",
        ),
        ("requeue", 2, "which looks like a disk of this machine alone: the next job would fail like that"),
    ],
)
def test_every_command_can_do_without_the_log_of_a_job(
    command: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "squeue.text").write_text("7|FAILED|node1|NonZeroExitCode|N/A|\n")
    with small_disk(tmp_path / "runs", size="256m"):
        run = RunDir(tmp_path / "runs" / "lost")
        run.path.mkdir(mode=0o700)
        run.script.write_text("#!/bin/bash\n")
        run.script.chmod(0o600)
        run.job.write_text(json.dumps({"job_id": "7"}))
        done = hpc_rl(command, "lost", folder=tmp_path)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code and words.format(run.path) in said, said
    assert not any(call.startswith("sbatch") for call in calls(tmp_path))


MESSAGE = [
    "hpc-rl: rank 1 failed, and its log ends:",
    *(f"    line {number}" for number in range(8)),
    "hpc-rl: the end",
]


def test_the_last_message_is_what_the_job_printed_last() -> None:
    log = "\n".join(["hpc-rl: Ray is up", "step 1", *MESSAGE, "SIGTERM received"])
    assert last_message(log) == MESSAGE
    assert last_message("hpc-rl: Ray is up\nstep 1") == ["hpc-rl: Ray is up"]
    assert last_message("    indented\nhpc-rl: one\n    more\nend") == ["hpc-rl: one", "    more"]
    assert last_message("step 1\n    indented") == []
    assert last_message("hpc-rl: one\n    more\n\n    again\n\nend") == ["hpc-rl: one", "    more", "    again"]


def test_of_a_long_message_the_last_lines_are_shown(tmp_path: Path) -> None:
    run, status = failed_run(tmp_path, "\n".join(MESSAGE))
    assert explain_run(run, status).verdict == [MESSAGE[0], *MESSAGE[4:]]


def test_the_order_of_causes(tmp_path: Path) -> None:
    """What Slurm did, the job's last message, other logs, and then what others noticed."""
    message = "hpc-rl: rank 1 failed, and its log ends:\n    KeyError: 'answer'\n"
    run, status = failed_run(tmp_path, "Connection reset by peer\nexit code 139\nAddress already in use\n" + message)
    found = [one.failure.title for one in explain_run(run, status).findings]
    assert found == [ANY_EXCEPTION.title, "A port is in use", "A process crashed", "A process of the job has ended"]
    run.path.joinpath("job-7.log").write_text(f"srun: error: node1: task 0: Out Of Memory\n{message}")
    assert [one.failure.title for one in explain_run(run, status).findings] == ["Killed for lack of memory"]


def test_input_that_was_refused_is_explained_by_the_last_line(tmp_path: Path) -> None:
    refused = "training data: 32 rows\nthe training data has 32 rows, not 200: use the same data\n"
    run, status = failed_run(tmp_path, refused)
    (run.path / "attempt-2" / "node0.log").write_text("raise ChildFailedError(\n")
    noticed = ["A process of the job has ended"]
    assert [one.failure.title for one in explain_run(run, status).findings] == noticed
    status = replace(status, exit_code=2)
    alone = Explanation(["the training data has 32 rows, not 200: use the same data"], [], [], [])
    assert explain_run(run, status) == alone
    (run.path / "job-7.log").write_text(refused + "hpc-rl: rank 1 refused its input\n")
    found = explain_run(run, status)
    assert (found.verdict, found.findings) == (["hpc-rl: rank 1 refused its input"], [])


@pytest.mark.parametrize("state", ["COMPLETED", "STOPPED"])
def test_a_run_that_ended_well_needs_no_explanation(state: str, tmp_path: Path) -> None:
    run, status = failed_run(tmp_path, "CUDA out of memory\n", state)
    assert explain_run(run, status) == NOTHING


@pytest.mark.parametrize(("value", "known"), [("0.004", False), ("0.031", True), ("3.1e-02", True), ("9e-3", False)])
def test_a_small_difference_of_probabilities_is_none(value: str, known: bool) -> None:
    assert bool(titles(json.dumps({"step": 3}) + f'\n{{"training/rollout_probs_diff_mean": {value}}}\n')) == known


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises((UserError, OSError, ModuleNotFoundError)) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


def occupied_block() -> None:
    with socket.create_server(("", 0)) as taken:
        given_blocks(taken.getsockname()[1], 1, 2, "ray.first_port")


def second_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
        second.bind(first.getsockname())


def long_socket() -> None:
    with socket.socket(socket.AF_UNIX) as too_long:
        too_long.bind("/tmp/" + "x" * 200)


REAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "interface": (lambda _: choose_address("ib99", None), "An interface without an address"),
    "folder": (
        lambda tmp: Rendezvous(tmp / "no" / "attempt-1", ("a", "b"), 1).check_shared(0),
        "The nodes do not share the folder",
    ),
    "address": (lambda tmp: Rendezvous(tmp, ("a", "b"), 1).await_address(0), "Nodes did not start"),
    "ports": (lambda _: occupied_block(), "A port is in use"),
    "port": (lambda _: second_listener(), "A port is in use"),
    "gpus": (lambda _: ray_resources(HERE, {"SLURM_GPUS_ON_NODE": "2"}, gpus=4), "Fewer GPUs than requested"),
    "memory": (lambda _: ray_resources(HERE, {"SLURM_MEM_PER_NODE": "100"}), "Shared memory too small"),
    "socket": (lambda _: long_socket(), "The temporary folder's path is too long"),
    "old Ray": (lambda _: check_ray("2.40.0", "python"), "Ray rejects a token"),
    "module": (lambda _: __import__("ray.no_such_thing"), "A Python module is missing"),
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
        (errno.ENOTCONN, "The container's files are no longer available"),
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
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=True)
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


def test_plan_and_peak_are_shown_if_a_gpu_has_too_little_memory(tmp_path: Path) -> None:
    run, status = failed_run(tmp_path, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert explain_run(run, status).plan == ""
    plan = {"phase": "update", "peak_gb": 40.0, "usable_gb": 76.0, "training_gb": 40.0, "less": ["a.b=1"]}
    run.job.write_text(json.dumps({"plan": plan}))
    records = ({"step": step, "total_steps": 9, "perf/max_memory_gb": 70.0 + step} for step in (1, 2))
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = explain_run(run, status)
    assert "expected at most 40.0 of 76.0 usable GB" in found.plan
    assert "the run recorded 72.0 GB; less memory: a.b=1" in found.plan
    lines = explanation_text(found).splitlines()
    assert [line.split(":")[0] for line in lines[2:]] == ["  cause", "  fix", "  plan", "  more"]
    run.path.joinpath("job-7.log").write_text("Address already in use\n")
    assert explain_run(run, status).plan == ""


def test_a_run_is_explained_by_its_newest_start_alone(tmp_path: Path) -> None:
    log = "Disk quota exceeded\nhpc-rl: stopped before the walltime; job 7 is queued again\nRay is not up after 9 s\n"
    run, status = failed_run(tmp_path, log)
    (run.path / "attempt-1" / "node0.log").write_text("CUDA out of memory")
    (run.path / "attempt-2" / "node0-rank3.log").write_text(
        "Permission\nRuntimeError: no kernel image is available " * 9
    )
    (run.path / "attempt-2" / "node0-rank4.log").write_text("an illegal memory access was encountered")
    found = explain_run(run, status)
    assert [(one.failure.title, Path(one.source).name) for one in found.findings] == [
        ("Illegal memory access in a rollout", "node0-rank4.log"),
        ("Ray does not start", "job-7.log"),
    ]
    assert (found.last_errors, found.last_lines) == ([], ["Ray is not up after 9 s"])
    assert explain_run(run, status, most_files=1).findings == found.findings[1:]


def test_what_slurm_says_explains_a_run_without_a_log(tmp_path: Path) -> None:
    run, status = failed_run(tmp_path, "", "NODE_FAIL")
    (one,) = explain_run(run, status).findings
    assert (one.failure.title, one.source) == ("A node failed", "Slurm")


def test_an_unknown_failure_shows_its_last_errors() -> None:
    assert last_lines("fine\nValueError: one\nfine\nTypeError: two\nbye\n", 1) == (["TypeError: two"], [])
    assert last_lines("a\nb\nc\n", 2) == ([], ["b", "c"])
    success = "hpc-rl: Ray is up on 2 nodes after 8.8 s"
    assert last_lines(f"{success}\ndone\n") == ([], [success, "done"])
    assert last_lines("hpc-rl: no space\ndone\n") == (["hpc-rl: no space"], [])


def test_of_a_long_log_both_ends_are_read(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_text("first\n" + "x" * 5_000_000 + "\nlast\n")
    text = read_ends(log)
    assert text.startswith("first\n") and text.endswith("\nlast\n") and len(text) <= HEAD_BYTES + TAIL_BYTES + 1
    log.write_text("whole\n" * 30_000)
    assert read_ends(log) == log.read_text()
