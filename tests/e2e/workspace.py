"""A user's folder on a cluster: a small model, data, and the hpc-rl command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.hold import SITECUSTOMIZE
from tests.helpers import make_tiny_model
from tests.sandbox.processes import DEADLINE_S

QUESTIONS = [
    {
        "question": f"A shelf has {rows} rows of {books} books. {out} books are lent out. How many books are left?",
        "answer": f"There are {rows} * {books} = <<{rows}*{books}={rows * books}>>{rows * books} books. "
        f"{rows * books} - {out} = <<{rows * books}-{out}={rows * books - out}>>{rows * books - out} are left.\n"
        f"#### {rows * books - out}",
    }
    for rows in range(2, 10)
    for books in range(3, 9)
    for out in (1, 4)
]
"""Rows in the format of GSM8K."""

MODEL = ["model.path=model", "data.train_files=data/train.jsonl", "trainer.device=cpu", "data.max_length=512"]
QUICK = [*MODEL, "data.train_batch_size=8", "trainer.micro_tokens=1024", "optim.lr=1e-3"]


@dataclass(frozen=True)
class Workspace:
    folder: Path
    environ: Mapping[str, str]
    login: Sequence[str] = ()
    """Prefix of a command that runs it on the login node: `Cluster.login`."""

    def hpc_rl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self.login, sys.executable, "-m", "hpc_rl.cli", *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=dict(self.environ),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def ok(self, *arguments: str) -> str:
        done = self.hpc_rl(*arguments)
        assert done.returncode == 0, (
            f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}{self.logs()}\n{self.jobs()}"
        )
        return done.stdout

    def jobs(self) -> str:
        """Return what Slurm shows of all jobs, or nothing if it does not answer."""
        command = [*self.login, "timeout", "20", "scontrol", "show", "job", "--oneliner"]
        return subprocess.run(command, env=dict(self.environ), capture_output=True, text=True, check=False).stdout

    def status(self, run: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.ok("status", run, "--json"))
        return found

    def losses(self, run: str) -> dict[int, float]:
        """Return the training loss of each step. If a step was repeated after resuming, the last one counts."""
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}

    def hold_at(self, step: int | str, *packages: str) -> list[str]:
        """Return the options with which an SFT run waits after a step for `stop`, `go` or its end.

        Args:
            step: several as "3-4".
            packages: further folders for PYTHONPATH.
        """
        folder = self.folder / "hold"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        return [f"slurm.env.PYTHONPATH={':'.join([str(folder), *packages])}", f"slurm.env.HOLD_AT_STEP={step}"]

    def release(self, run: str) -> None:
        """Let a run continue that `hold_at` holds, or that waits for `go` by itself."""
        (self.folder / "runs" / run / "go").touch()

    def logs(self) -> str:
        return "".join(
            f"\n--- {log}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("runs/*/job-*.log"))
        )

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        began = asked = time.monotonic()
        while not condition():
            now = time.monotonic()
            assert now < began + DEADLINE_S, f"after {DEADLINE_S:g} s still not: {what}{self.logs()}"
            time.sleep(max(0.1, 4 * (now - asked)))  # a condition that takes long leaves the processors to the job
            asked = time.monotonic()

    def wait_for_step(self, run: str, step: int) -> None:
        metrics = self.folder / "runs" / run / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and max(self.losses(run), default=0) >= step, f"{run} at step {step}")


def make_workspace(folder: Path, environ: Mapping[str, str]) -> Workspace:
    """Create a new folder with a model, raw data and prepared data."""
    folder.mkdir(parents=True)
    workspace = Workspace(folder, {**environ, "OMP_NUM_THREADS": "1"})
    make_tiny_model(folder / "model", hidden=32, layers=2)
    (folder / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    workspace.ok("data", "gsm8k", "--source", "raw.jsonl", "--out", "data")
    return workspace
