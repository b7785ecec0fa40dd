"""What the doctor's job really does: an all-reduce over all nodes, and a Ray cluster up and down.

Each is a job in small: the same node entries as in a real one, below this process, with a folder and a deadline.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.host.files import tail
from hpc_rl.host.node_report import Trial
from hpc_rl.host.processes import end, shell_code, start
from hpc_rl.host.ray_version import installed_ray, token_authentication
from hpc_rl.host.scratch import remove_scratch, scratch_dir
from hpc_rl.run_dir import ENV_ATTEMPT_DIR
from hpc_rl.slurm.allocation import Allocation

ALL_REDUCE, RAY = "all-reduce", "ray-cluster"
FOLDERS = (ALL_REDUCE, RAY)
AFTER_START_S = 90
"""For what comes after all nodes have met: connecting, measuring, leaving."""
RESULT = "result.json"
_TOO_LONG = 124


def try_all_reduce(attempt_dir: Path, options: argparse.Namespace) -> Trial | None:
    """Sums over all ranks of all nodes, by torchrun; None where this Python has no torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    entry = ["hpc_rl.node.torchrun", *_common(options)]
    return _run(attempt_dir / ALL_REDUCE, [*entry, "--", "-m", "hpc_rl.probes.all_reduce"], options.start_timeout)


def try_ray(
    allocation: Allocation, attempt_dir: Path, options: argparse.Namespace, ray_options: Sequence[str]
) -> Trial | None:
    """A Ray cluster of all nodes with a task on each; None where this Python has no Ray, or one without tokens."""
    version = installed_ray()
    if version is None or not token_authentication(version):
        return None
    first = [] if options.first_port is None else ["--first-port", str(options.first_port)]
    entry = ["hpc_rl.node.ray_cluster.node", *_common(options), "--device", options.device, *first, *ray_options]
    driver = [sys.executable, "-P", "-m", "hpc_rl.probes.ray"]
    try:
        return _run(attempt_dir / RAY, [*entry, "--", *driver], options.start_timeout)
    finally:
        # A Ray that was killed could not remove its files.
        place = allocation.node_rank if allocation.nodes.count(allocation.node) > 1 else None
        remove_scratch(scratch_dir(os.environ, allocation.job_id, allocation.restart, place))


def _common(options: argparse.Namespace) -> list[str]:
    interface = [] if options.interface is None else ["--interface", options.interface]
    return ["--processes", str(options.processes), "--start-timeout", str(options.start_timeout), *interface]


def _run(folder: Path, entry: Sequence[str], start_timeout_s: int) -> Trial:
    log = folder / f"{os.environ['SLURM_NODEID']}.out"
    began = time.monotonic()
    with log.open("ab") as output:
        child = start([sys.executable, "-P", "-m", *entry], {**os.environ, ENV_ATTEMPT_DIR: str(folder)}, output)
        try:
            code = shell_code(child.wait(start_timeout_s + AFTER_START_S))
        except subprocess.TimeoutExpired:
            code = _TOO_LONG
        finally:
            end(child)
    seconds = time.monotonic() - began
    result = folder / RESULT
    done = code == 0 and os.environ["SLURM_NODEID"] == "0" and result.exists()
    return Trial(seconds, code, json.loads(result.read_text()) if done else {}, "" if code == 0 else last_words(log))


def last_words(log: Path) -> str:
    """Why something failed: the last error line of its log, or else the last line."""
    lines = [line.strip() for line in tail(log, 50).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"hpc-rl: |\w*(Error|Exception)\b", line)]
    found = ([*lines, *errors] or ["it said nothing"])[-1].removeprefix("hpc-rl: ")
    return re.sub(r"; the end of \S+:$", "", found)  # which follows on lines of its own
