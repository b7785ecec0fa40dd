"""Tests of the health check: an all-reduce over all nodes, and starting and ending a Ray cluster.

Each test runs the node entry of a real job as a child process, with its own folder and a deadline.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.formats.node_report import Trial
from hpc_rl.run_dir import ENV_ATTEMPT_DIR
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.software.ray_version import installed_ray, token_authentication
from hpc_rl.system.files import open_to_append, read_json, tail
from hpc_rl.system.processes import end, shell_code, start
from hpc_rl.system.scratch import remove_recorded

ALL_REDUCE, RAY = "all-reduce", "ray-cluster"
FOLDERS = (ALL_REDUCE, RAY)
AFTER_START_S = 90
"""For connecting, measuring and ending, after all nodes have started."""
RESULT = "result.json"
_TIMEOUT_CODE = 124
"""As timeout(1) returns it."""


def try_all_reduce(attempt_dir: Path, options: argparse.Namespace) -> Trial | None:
    """Sum over all ranks of all nodes with torchrun. Returns None if this Python has no torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    entry = ["hpc_rl.node.torchrun", *common_options(options)]
    return _run(attempt_dir / ALL_REDUCE, [*entry, "--", "-P", "-m", "hpc_rl.probes.all_reduce"], options.start_timeout)


def try_ray(
    allocation: Allocation, attempt_dir: Path, options: argparse.Namespace, ray_options: Sequence[str]
) -> Trial | None:
    """Start a Ray cluster on all nodes with a task on each. Returns None without Ray or token authentication."""
    version = installed_ray()
    if version is None or not token_authentication(version):
        return None
    first = [] if options.first_port is None else ["--first-port", str(options.first_port)]
    entry = ["hpc_rl.node.ray_cluster.node", *common_options(options), *first, *ray_options]
    driver = [sys.executable, "-P", "-m", "hpc_rl.probes.ray"]
    try:
        return _run(attempt_dir / RAY, [*entry, "--", *driver], options.start_timeout)
    finally:
        remove_recorded(attempt_dir / RAY, allocation.node_rank)  # if Ray was killed, its files are still there


def common_options(options: argparse.Namespace) -> list[str]:
    """Return the options that both node entries take."""
    interface = [] if options.interface is None else ["--interface", options.interface]
    common = ["--processes", str(options.processes), "--device", options.device]
    return [*common, "--start-timeout", str(options.start_timeout), *interface]


def _run(folder: Path, entry: Sequence[str], start_timeout_s: int) -> Trial:
    log = folder / f"{os.environ['SLURM_NODEID']}.out"
    began = time.monotonic()
    with open_to_append(log) as output:
        child = start([sys.executable, "-P", "-m", *entry], {**os.environ, ENV_ATTEMPT_DIR: str(folder)}, output)
        try:
            code = shell_code(child.wait(start_timeout_s + AFTER_START_S))
        except subprocess.TimeoutExpired:
            code = _TIMEOUT_CODE
        finally:
            end(child)
    seconds = time.monotonic() - began
    result = folder / RESULT
    done = code == 0 and os.environ["SLURM_NODEID"] == "0"
    return Trial(seconds, code, read_json(result) if done else {}, "" if code == 0 else last_words(log))


def last_words(log: Path) -> str:
    """Return why a test failed: the last error line of its log, or else the last line."""
    lines = [line.strip() for line in tail(log, 50).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"hpc-rl: (?!the end of Ray's )|\w*(Error|Exception)\b", line)]
    found = ([*lines, *errors] or ["no output"])[-1].removeprefix("hpc-rl: ")
    return re.sub(r"; the end of \S+:$", "", found)  # those lines are not part of the summary
