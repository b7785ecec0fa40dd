"""The files of a run directory.

The run directory is the run: every command and every process of a run finds its files through this class. Standard
library only, because login node, node entry and trainer all import it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.host.files import write_atomically

ENV_RUN_DIR = "HPC_RL_RUN_DIR"
ENV_ATTEMPT_DIR = "HPC_RL_ATTEMPT_DIR"


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory; none of them needs to exist."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML; written by the job script."""
        return self.path / "config.yaml"

    @property
    def script(self) -> Path:
        """The job script as it was submitted."""
        return self.path / "job.sbatch"

    @property
    def job(self) -> Path:
        """job.json: what was submitted, when and as which job."""
        return self.path / "job.json"

    @property
    def status(self) -> Path:
        """status.json: the state of the job, for clusters without accounting. See `write_status`."""
        return self.path / "status.json"

    @property
    def stop(self) -> Path:
        """The stop file: while it exists, trainers save and exit. Its text is the reason."""
        return self.path / "stop"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """samples.jsonl: prompts, responses and scores of training and validation."""
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The exported Hugging Face model."""
        return self.path / "model"

    @property
    def profiles(self) -> Path:
        """profiles/step-N/: traces of the steps of trainer.profile_steps."""
        return self.path / "profiles"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def git(self) -> Path:
        """git.txt: commit and uncommitted changes of the folder that the job was submitted from."""
        return self.path / "git.txt"

    def attempts(self) -> list[Path]:
        """Return the folders attempt-1, attempt-2 and so on, one for each start of the job, oldest first."""
        found = [(int(m[1]), p) for p in self.path.glob("attempt-*") if (m := re.fullmatch(r"attempt-(\d+)", p.name))]
        return [path for _, path in sorted(found)]

    def edited_since(self) -> Path | None:
        """Return the folder of the newest attempt with settings if config.yaml was changed after it, or None."""
        attempt = next((path for path in reversed(self.attempts()) if (path / self.config.name).is_file()), None)
        if attempt is None or not self.config.is_file():
            return None
        return attempt if self.config.read_bytes() != (attempt / self.config.name).read_bytes() else None

    def write_status(self, job_id: str | None, attempt: int, state: str, exit_code: int | None) -> None:
        """Write status.json, in the format of the job script's `report` function.

        Args:
            attempt: number of the attempt; 0 if the job never started.
            exit_code: None if the job runs, or never started.
        """
        status = {"job_id": job_id, "attempt": attempt, "state": state, "exit_code": exit_code}
        write_atomically(self.status, json.dumps(status) + "\n")


def current_run_dir() -> RunDir | None:
    """Return the run directory that the job script exported, or None outside a job."""
    value = os.environ.get(ENV_RUN_DIR)
    return RunDir(Path(value)) if value else None


def current_attempt_dir() -> Path | None:
    """Return the attempt's folder that the job script exported, or None outside a job."""
    value = os.environ.get(ENV_ATTEMPT_DIR)
    return Path(value) if value else None
