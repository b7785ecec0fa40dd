"""`hpc-rl runs` and `hpc-rl status` with 10,000 runs in one folder: `python -m benchmarks.scale_runs`.

1,000 of the runs have jobs in the queue; the others have ended. squeue is a program that prints 1,000 rows as the one
of Slurm does (`hpc_rl/slurm/commands.py` has the format), and sacct one that reports that there is no accounting. The
time of Slurm is therefore not part of it. The folder is on the disk of this machine, and its files have been read
before, as by an earlier command.

Seconds are those of whole commands, as a user types them, with the start of Python: wall time, and processor time of
the command. Variants run in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import median, publish, table

RUNS, QUEUED, TIMEOUT_S = 10_000, 1000, 600
COMMANDS = {
    "runs": ["runs"],
    "runs --all": ["runs", "--all"],
    "status of a queued run": ["status", "run-0"],
    "status of an ended run": ["status", "run-{last}"],
}
FIRST_JOB = 70_000
CONFIG = "".join(f"option_{number}: value {number}\n" for number in range(150))
NO_ACCOUNTS = "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n"


def make_runs(folder: Path, runs: int, queued: int) -> None:
    """Create runs in folder/runs: the first ones are queued, the others have ended."""
    for number in range(runs):
        run = folder / "runs" / f"run-{number}"
        run.mkdir(parents=True)
        job_id = str(FIRST_JOB + number)
        job = {"job_id": job_id, "kind": "sft", "submitted": f"2026-01-01T{number // 3600:02}:00:00", "nodes": 1}
        (run / "job.sbatch").write_text("#!/bin/bash\n")
        (run / "job.json").write_text(json.dumps(job))
        if number < queued:
            continue
        (run / "attempt-1").mkdir()
        (run / "config.yaml").write_text(CONFIG)
        line = {"step": 100, "total_steps": 100, "time": 1.7e9, "train/loss": 1.5, "perf/tokens_per_s": 1e4}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        status = {"job_id": job_id, "attempt": 1, "state": "COMPLETED", "exit_code": 0}
        (run / "status.json").write_text(json.dumps(status))


def squeue_rows(queued: int) -> str:
    """Return the rows of squeue for so many pending jobs, in the format that hpc_rl/slurm/commands.py requests."""
    widths = (40, 30, 400, 100, 30)
    rows = [(str(FIRST_JOB + number), "PENDING", "", "Priority", "N/A") for number in range(queued)]
    return "".join("".join(f"{text:<{width}}|" for text, width in zip(row, widths, strict=True)) + "\n" for row in rows)


def make_slurm(folder: Path, queued: int) -> None:
    """Write squeue and sacct into folder/bin."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "rows").write_text(squeue_rows(queued))
    for name, text in (("squeue", f"#!/bin/sh\nexec cat {programs / 'rows'}\n"), ("sacct", NO_ACCOUNTS)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)


def measure(folder: Path, runs: int, queued: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return wall and processor seconds of each command."""
    make_runs(folder, runs, queued)
    make_slurm(folder, queued)
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    found: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "processor_s": []} for name in COMMANDS}
    for repeat in range(repeats + 1):
        for name, words in COMMANDS.items():
            argv = [sys.executable, "-m", "hpc_rl.cli", *(word.format(last=runs - 1) for word in words)]
            began, used = time.monotonic(), children_s()
            ended = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
            if ended.returncode:
                raise SystemExit(f"hpc-rl {' '.join(words)}: {ended.stdout}{ended.stderr}")
            if repeat:  # the first time reads the files
                found[name]["wall_s"].append(time.monotonic() - began)
                found[name]["processor_s"].append(children_s() - used)
    return found


def children_s() -> float:
    """Return the processor seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [f"`hpc-rl {name}`", f"{median(found['wall_s']):.2f}", f"{median(found['processor_s']):.2f}"]
        for name, found in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--queued", type=int, default=QUEUED)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options.runs, options.queued, options.repeats)
    publish("scale_runs", table(["", "s", "processor s"], rows_of(results)), results, [])


if __name__ == "__main__":
    main()
