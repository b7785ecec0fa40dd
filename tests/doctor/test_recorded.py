"""`explain` on the logs of real runs, with everything that Ray and torch write into them.

The recordings of RUNS are real: `python -m tests.doctor.record` made them. Failures that need Slurm, a GPU or another
machine cannot be made here. For them INJECTED adds the messages that the library's or Slurm's source has to the
recording of a real run that failed in the same part.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpc_rl.doctor.diagnosis import NOTHING, explain_file, explain_run
from tests.doctor.record import CASES
from tests.doctor.recordings import JOB_LOG, RECORDED, read
from tests.helpers import hpc_rl

GOOD = ("good-sft", "good-ppo", "good-torchrun", "good-ray", "good-doctor")

RUNS: dict[str, tuple[str, str]] = {
    "sft-killed-rank": ("A process was killed", "exitcode: -9"),
    "sft-full-disk": ("No space left on device", "[Errno 28]"),
    "sft-bad-row": ("A row of the data cannot be used", "row 10101"),
    "sft-not-finite": ("The loss or a gradient is not finite", "the loss is nan in step 2"),
    "sft-not-cached": ("A model or data set is not in the cache", "nobody/none"),
    "sft-small-vocabulary": ("The tokenizer does not fit the model", "index out of range in self"),
    "sft-broken-weights": ("The weights do not fit the model", "ignore_mismatched_sizes"),
    "torchrun-missing-module": ("A Python module is missing", "flash_attn"),
    "torchrun-shapes": ("Tensor shapes do not match", "(4x16 and 32x8)"),
    "torchrun-dtypes": ("Tensor types do not match", "Float and BFloat16"),
    "torchrun-raises": ("An exception in the program", "the teacher's answer has no final number"),
    "torchrun-port": ("A port is in use", "EADDRINUSE"),
    "torchrun-files": ("Too many open files", "[Errno 24]"),
    "torchrun-hangs": ("NCCL times out", "Timed out waiting"),
    "torchrun-killed": ("A process was killed", "exit code 137"),
    "torchrun-segfault": ("A process crashed", "exit code 139"),
    "torchrun-cuda": ("No GPU is visible", "Torch not compiled with CUDA enabled"),
    "torchrun-disk": ("No space left on device", "[Errno 28]"),
    "torchrun-permission": ("Permission denied", "/sys/kernel/notes"),
    "ray-missing-module": ("A Python module is missing", "ModuleNotFoundError"),
    "ray-memory": ("Killed by Ray's memory monitor", "running low on memory"),
    "ray-killed-actor": ("A process was killed", "died"),
    "ray-placement-group": ("A Ray task did not finish in time", "GetTimeoutError"),
    "ray-port": ("A port is in use", "something uses port 23460"),
    "ray-start-timeout": ("Ray does not start", "Ray is not up after 1 s"),
    "ppo-killed-raylet": ("A process of Ray was killed", "raylet was killed"),
    "ppo-killed-gcs": ("A process of Ray was killed", "GCS server was killed"),
    "ppo-killed-worker": ("A process was killed", " of pool global_pool on node node1"),
    "ppo-reward-raises": ("The reward function failed", "string indices must be integers"),
    "ppo-reward-imports": ("A Python module is missing", "sympy_plus"),
    "ppo-not-finite": ("The loss or a gradient is not finite", "the loss is nan in step 2"),
    "ppo-small-vocabulary": ("The tokenizer does not fit the model", "index out of range in self"),
}
"""Recording -> title of the true cause, and part of the line that shows it."""

RANK_LOG = "attempt-1/node0-global_pool-rank0.log"
INJECTED: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "memory of the cgroup": (
        "torchrun-killed", JOB_LOG,
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
         "srun: error: node1: task 1: Out Of Memory"),
        "Killed for lack of memory",
    ),
    "memory of the cgroup, Ray": (
        "ppo-killed-worker", JOB_LOG,
        ("[2026-11-21T16:05:33.000] error: Detected 1 oom_kill event in StepId=7.0.",),
        "Killed for lack of memory",
    ),
    "time limit": (
        "ppo-killed-raylet", JOB_LOG,
        ("slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-21T16:05:33 DUE TO TIME LIMIT ***",),
        "Walltime reached",
    ),
    "preemption": (
        "torchrun-killed", JOB_LOG,
        ("slurmstepd-node1: error: *** STEP 1.0 ON node1 CANCELLED AT 2026-11-22T07:48:11 DUE TO PREEMPTION ***",
         "srun: Job step aborted: Waiting up to 17 seconds for job step to finish.",
         "slurmstepd-node1: error: *** JOB 1 ON node1 CANCELLED AT 2026-11-22T07:48:15 DUE TO PREEMPTION ***"),
        "Preempted",
    ),
    "node failure": (
        "ppo-killed-raylet", JOB_LOG,
        ("srun: error: Node failure on node2",
         "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-21T16:05:33 DUE TO NODE FAILURE, SEE SLURMCTLD "
         "LOG FOR DETAILS ***"),
        "A node failed",
    ),
    "torchvision of another build": (
        "ppo-killed-worker", JOB_LOG,
        ("RuntimeError: operator torchvision::nms does not exist",
         "hpc-rl: ModuleNotFoundError: Could not import module 'AttentionInterface'. Are this object's requirements "
         "defined correctly? Set the logging verbosity to DEBUG for the original import error."),
        "torchvision does not fit torch",
    ),
    "quota": (
        "ppo-killed-worker", RANK_LOG, ("OSError: [Errno 122] Disk quota exceeded: '/home/me/.cache/x'",),
        "Disk quota exceeded",
    ),
    "memory of a GPU": (
        "ppo-killed-worker", RANK_LOG,
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of",),
        "CUDA out of memory",
    ),
    "cache of vLLM": (
        "ppo-killed-worker", RANK_LOG,
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
         "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
        "CUDA out of memory",
    ),
    "illegal access": (
        "ppo-killed-worker", RANK_LOG,
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered",),
        "Illegal memory access in a rollout",
    ),
    "old driver": (
        "ppo-killed-worker", RANK_LOG,
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11070). Please update",),
        "The NVIDIA driver is too old",
    ),
    "other GPU": (
        "ppo-killed-worker", RANK_LOG,
        ("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",),
        "No kernel for this GPU",
    ),
    "broken GPU": (
        "torchrun-hangs", "attempt-1/node1-rank1.log",
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",),
        "A GPU or its driver failed",
    ),
    "assertion on a GPU": (
        "torchrun-hangs", "attempt-1/node1-rank1.log",
        ("torch.AcceleratorError: CUDA error: device-side assert triggered",),
        "The tokenizer does not fit the model",
    ),
    "no compiler": (
        "ppo-killed-worker", RANK_LOG, ("RuntimeError: Failed to find C compiler. Please specify via CC environment",),
        "Triton cannot compile",
    ),
    "old libc": (
        "torchrun-hangs", "attempt-1/node1-rank1.log",
        ("ImportError: /lib64/libc.so.6: version `GLIBC_2.32' not found (required by /env/flash_attn_2_cuda.so)",),
        "A library is too old",
    ),
    "FUSE": (
        "torchrun-hangs", "attempt-1/node1-rank1.log",
        ("OSError: [Errno 107] Transport endpoint is not connected: '/usr/lib/python3.11'",),
        "The container's files are no longer available",
    ),
    "gated model": (
        "ppo-killed-worker", "attempt-1/driver.log",
        ("huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo for url https://hf.example.org",),
        "A gated or private model",
    ),
    "shared memory": (
        "torchrun-hangs", "attempt-1/node1-rank1.log",
        ("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that",),
        "Shared memory too small",
    ),
    "NCCL": (
        "torchrun-raises", "attempt-1/node0-rank0.log",
        ("[rank0]:[E1121 16:02:40 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout:",),
        "An exception in the program",
    ),
    "another cluster's token": (
        "ray-start-timeout", "attempt-1/ray/node1/raylet.out",
        ("[2026-11-21 16:05:32,381 E 28846 28846] gcs_client.cc:210: Failed to get cluster ID from GCS server: "
         "Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing or incorrect",),
        "Ray does not start",
    ),
}  # fmt: skip
"""What happens -> (recording, file of the run, lines at its end, title of the true cause)."""


def test_every_recording_is_used() -> None:
    assert {path.stem for path in RECORDED.glob("*.txt")} == {*GOOD, *RUNS} == set(CASES)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_run_needs_no_explanation(name: str, tmp_path: Path) -> None:
    run, status = read(name).unpack(tmp_path)
    assert status.state == "COMPLETED"
    assert explain_run(run, status) == NOTHING


@pytest.mark.parametrize("name", GOOD)
def test_the_logs_of_a_good_run_show_no_failure(name: str, tmp_path: Path) -> None:
    """Even if it is unknown that the run has ended well."""
    run, status = read(name).unpack(tmp_path, state="UNKNOWN")
    assert [finding.line for finding in explain_run(run, status).findings] == []
    for log in tmp_path.glob("*.log"):
        assert explain_file(log).findings == []


def test_the_recordings_contain_the_usual_noise() -> None:
    """Words of failures, which Ray writes into the logs of good runs."""
    text = "".join(read("good-ppo").files.values())
    for word in ("ActorDiedErrorContext", "Raylet is terminated", "ValueError: ", "Killing it using SIGKILL"):
        assert word in text


@pytest.mark.parametrize("name", RUNS)
def test_the_true_cause_comes_first(name: str, tmp_path: Path) -> None:
    title, part = RUNS[name]
    run, status = read(name).unpack(tmp_path)
    assert status.state == "FAILED"
    first = explain_run(run, status).findings[0]
    assert (first.failure.title, part in first.line) == (title, True), first.line


@pytest.mark.parametrize("name", INJECTED)
def test_the_true_cause_comes_first_in_the_noise_of_another_run(name: str, tmp_path: Path) -> None:
    base, file, lines, title = INJECTED[name]
    run, status = read(base).with_lines(file, *lines).unpack(tmp_path)
    found = explain_run(run, status).findings
    assert found[0].failure.title == title, [finding.failure.title for finding in found]


def test_the_commands_show_the_jobs_own_message_first(tmp_path: Path) -> None:
    read("ppo-killed-worker").unpack(tmp_path / "runs" / "first")
    for command in ("status", "explain"):
        shown = hpc_rl(command, "first", folder=tmp_path, check=True).stdout.splitlines()
        assert re.match(r"hpc-rl: rank [01] of pool global_pool on node node1", shown[0])  # both were killed
        assert shown[1].startswith("hpc-rl: the driver failed with exit code 1")
        assert shown[2:4] == ["", "A process was killed"]
    read("good-ppo").unpack(tmp_path / "runs" / "second")
    assert (
        hpc_rl("explain", "second", folder=tmp_path, check=True).stdout
        == "run second has not failed: its state is COMPLETED\n"
    )
    assert hpc_rl("status", "second", folder=tmp_path, check=True).stdout.startswith("run ")
    status = tmp_path / "runs/second/status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "state": "RUNNING"}))
    shown = hpc_rl("explain", "second", folder=tmp_path, check=True).stdout
    assert "has not failed: its state is " in shown and "the last lines" not in shown
