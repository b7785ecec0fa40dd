"""The files of a run directory.

The run directory is the run: every command and every process of a run finds its files through this class. Standard
library only, because login node, node entry and trainer all import it.
"""

from __future__ import annotations

import fcntl
import grp
import json
import os
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hpc_rl.errors import UserError
from hpc_rl.formats.typed_json import JOB, STATUS, is_job_id, well_typed
from hpc_rl.system.files import ATTEMPT, NotPlainError, open_regular, read_json, read_regular, write_atomically
from hpc_rl.system.locks import try_lock
from hpc_rl.system.ownership import foreign_entry, open_own, weakness

ENV_RUN_DIR = "HPC_RL_RUN_DIR"
ENV_ATTEMPT_DIR = "HPC_RL_ATTEMPT_DIR"
ENV_GROUP_DIR = "HPC_RL_GROUP_DIR"
"""Variable with the private folder in which the ranks of a process group meet (training/parallel/rendezvous.py)."""
WALLTIME, REQUEUE, PREEMPTION = "walltime", "requeue", "preemption"
"""Reasons in the stop file after which the job script queues the job again, once the run has saved."""
_SHARED_BITS = stat.S_ISGID | stat.S_IRGRP
SWEEP_MARK = "sweep.json"
"""A folder with this file contains the run directories of a sweep, which are named after it and numbered."""
PIPELINE_MARK = "pipeline.json"
"""A folder with this file contains the run directories of a pipeline, which are named after it, a round and a stage."""
TOKENIZED = f".tokenized-{os.getuid()}"
"""Folder of this user's tokenized data, beside the runs, which may be in a folder that several users share."""
_CONFIG, _SCRIPT, _JOB, _STATUS = "config.yaml", "job.sbatch", "job.json", "status.json"
MARKS = (_SCRIPT, _JOB, _STATUS, _CONFIG)
"""A folder with one of these files is a run."""
LOCK_TIMEOUT_S = 2.0
"""A command such as `status` holds the lock of a run for a moment to see whether a job has it."""
_LOCK_POLL_S = 0.1
_MOST_LOCK_BYTES = 2**16  # of a file with a few words
UNFINISHED = ("RUNNING", "REQUEUED")
"""States in status.json of a job that has not ended."""


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory; none of them needs to exist."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The options of the run's next attempt, YAML. A user may edit them."""
        return self.path / _CONFIG

    @property
    def written(self) -> Path:
        """The options that hpc-rl wrote, without the user's edits; see `hpc_rl.submission.edits`."""
        return self.path / f".{_CONFIG}.written"

    @property
    def latest_settings(self) -> Path:
        """The options of the newest attempt, or of the next one if there was none yet."""
        return (self.attempt_with_settings() or self.path) / _CONFIG

    @property
    def script(self) -> Path:
        """The job script as it was submitted."""
        return self.path / _SCRIPT

    @property
    def support(self) -> Path:
        """support.sh: functions of bash that the job script uses."""
        return self.path / "support.sh"

    @property
    def job(self) -> Path:
        """job.json: what was submitted, when and as which job."""
        return self.path / _JOB

    @property
    def status(self) -> Path:
        """status.json: the state of the job, for clusters without accounting. See `write_status`."""
        return self.path / _STATUS

    @property
    def stop(self) -> Path:
        """The stop file: while it exists, trainers save and exit. Its text is the reason."""
        return self.path / "stop"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def saved(self) -> Path:
        """saved.jsonl: complete checkpoints of a user's program; see `hpc_rl.adapters.saved`."""
        return self.path / "saved.jsonl"

    @property
    def samples(self) -> Path:
        """samples.jsonl: prompts, responses and scores of training and validation."""
        return self.path / "samples.jsonl"

    @property
    def timeline(self) -> Path:
        """timeline.json: when each part of a run's latest step ran (reinforcement learning)."""
        return self.path / "timeline.json"

    @property
    def ref_logprobs(self) -> Path:
        """ref_logprobs/: a folder for each reference and data set, with the reference's log-probabilities."""
        return self.path / "ref_logprobs"

    @property
    def teacher_top_k(self) -> Path:
        """teacher_top_k/: a folder for each teacher and data set, with the teacher's most probable tokens."""
        return self.path / "teacher_top_k"

    @property
    def stream(self) -> Path:
        """stream/: where the windows of a streamed data set begin, and their rows until they are tokenized."""
        return self.path / "stream"

    @property
    def responses(self) -> Path:
        """responses.jsonl: all responses of generation or evaluation, one JSON object per line."""
        return self.path / "responses.jsonl"

    @property
    def response_parts(self) -> Path:
        """response-parts/: the finished blocks of responses while not all are finished, and what they belong to."""
        return self.path / "response-parts"

    @property
    def selected(self) -> Path:
        """selected.jsonl: training data that was selected from responses."""
        return self.path / "selected.jsonl"

    @property
    def evaluation(self) -> Path:
        """eval.json: the scores of an evaluation, by data set."""
        return self.path / "eval.json"

    @property
    def endpoint(self) -> Path:
        """endpoint.json: where agents find the policy while the run trains, and the key that it demands (mode 0600)."""
        return self.path / "endpoint.json"

    @property
    def tokenized(self) -> Path:
        """.tokenized-UID/: tokenized data of all runs in a folder, beside the run, its sweep or its pipeline."""
        above = self.path.absolute().parent
        is_set = any((above / mark).is_file() for mark in (SWEEP_MARK, PIPELINE_MARK))
        return (above.parent if is_set else above) / TOKENIZED

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

    @property
    def lock(self) -> Path:
        """The file that the running job has locked. Its last line is the job's id."""
        return self.path / ".lock"

    @property
    def losses(self) -> Path:
        """lost-nodes: the nodes that jobs of this run lost. One line for each time: job, attempt, nodes."""
        return self.path / "lost-nodes"

    @property
    def cancelled(self) -> Path:
        """.cancelled: the id of the job that this user cancelled last."""
        return self.path / ".cancelled"

    def read_job(self) -> dict[str, Any]:
        """Return job.json; empty if there is none, or it is damaged."""
        return well_typed(read_json(self.job), JOB)

    def read_status(self) -> dict[str, Any]:
        """Return status.json; empty if there is none, or it is damaged."""
        return well_typed(read_json(self.status), STATUS)

    def damaged(self) -> list[str]:
        """Return a line for each file of the run that exists and cannot be read."""
        found = {path: _problem(path) for path in (self.config, self.metrics, self.samples, self.evaluation)}
        for path, types in ((self.job, JOB), (self.status, STATUS)):
            record = read_json(path)
            is_damaged = path.exists() and (not record or well_typed(record, types) != record)
            found[path] = _problem(path) or ("it is damaged" if is_damaged else None)
        return [f"{path} is left out: {problem}" for path, problem in found.items() if problem]

    def holder(self) -> str | None:
        """Return the id of the job that holds the lock; None if there is none, or the file system has no locks."""
        try:
            with open_regular(self.lock) as lock:
                lock.seek(max(0, os.fstat(lock.fileno()).st_size - _MOST_LOCK_BYTES))
                ids = list(filter(is_job_id, lock.read(_MOST_LOCK_BYTES).decode(errors="replace").split()))
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            own = self.read_status()
            # A job that has just taken the lock has not written its id yet.
            has_ended = own.get("job_id") == ids[-1] and own.get("state") not in UNFINISHED if ids else True
            return None if has_ended else ids[-1]
        except OSError:
            return None
        return None

    def take_lock(self, job_id: str = "") -> IO[str]:
        """Lock the directory, as the job script does, so that it holds one job at a time. Closing the file unlocks it.

        Args:
            job_id: id of the job that holds it from now on; empty if none does.

        Raises:
            UserError: another job holds it, or it cannot be locked.
        """
        try:
            lock = open_own(self.path.resolve() / self.lock.name, "a+")
        except OSError as error:
            raise UserError(f"cannot lock {self.path}: {self.lock.name} {error.strerror}") from error
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    lock.seek(0)
                    owner = lock.read().split()[-1:] or ["?"]
                    lock.close()
                    raise UserError(
                        f"job {' '.join(owner)} is running in {self.path}: wait for it, or choose another run directory"
                    )
                time.sleep(_LOCK_POLL_S)
        except OSError as error:  # a file system without locks; a submission has already checked for a running job
            print(f"hpc-rl: no file lock in {self.path}: {error.strerror}", file=sys.stderr)
        if job_id:
            lock.write(job_id + "\n")
            lock.flush()
        return lock

    def check_owner(self, group: str | None = None) -> None:
        """Check that this user owns the directory, if it exists, and that nobody else has written or can write to it.

        A script, a configuration or a stop file in it would otherwise be the work of other users.

        Args:
            group: the UNIX group that may read the directory. Its members are trusted: folders above the directory may
                belong to them. None: the group that an existing directory was shared with.

        Raises:
            UserError: another user owns it, has written or can write to it, or can replace it.
        """
        try:
            found = weakness(self.path, trusted_group(self.path, group))
            planted = foreign_entry(self.path) if found is None and self.path.exists() else None
        except OSError as error:
            raise UserError(f"run directory {self.path}: {error.strerror or error}") from error
        if found is not None:
            raise UserError(
                f"run directory {self.path}: {found}, so other users could run code as you; choose a --run-dir in a "
                "folder that only you can write to (chmod go-w FOLDER), or set slurm.group to a group that you trust"
            )
        if planted is not None:
            raise UserError(
                f"run directory {self.path} contains {planted}: unless you have moved it there, others could once "
                "write to this directory; choose another --run-dir"
            )

    def attempts(self) -> list[Path]:
        """Return the folders attempt-1, attempt-2 and so on, one for each start of the job, oldest first."""
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        found = sorted((int(match[1]), name) for name in names if (match := ATTEMPT.fullmatch(name)))
        return [self.path / name for _, name in found]

    def next_attempt(self) -> Path:
        """Return the folder of the next attempt. It replaces no deleted one: the newest has the highest number."""
        return self.path / f"attempt-{self.last_attempt() + 1}"

    def last_attempt(self) -> int:
        """Return the number of the newest attempt, or 0 if there is none."""
        found = self.attempts()
        return int(found[-1].name.removeprefix("attempt-")) if found else 0

    def attempt_with_settings(self, before: Path | None = None) -> Path | None:
        """Return the folder of the newest attempt that has a config.yaml, or of the newest one before an attempt."""
        found = self.attempts()
        earlier = found[: found.index(before)] if before in found else found
        return next((path for path in reversed(earlier) if (path / self.config.name).is_file()), None)

    def write_status(self, job_id: str | None, attempt: int, state: str, exit_code: int | None) -> None:
        """Write status.json, in the format of the job script's `report` function.

        Args:
            attempt: number of the attempt; 0 if the job never started.
            exit_code: None if the job runs, or never started.
        """
        status = {"job_id": job_id, "attempt": attempt, "state": state, "exit_code": exit_code}
        write_atomically(self.status, json.dumps(status) + "\n")


def _problem(path: Path) -> str | None:
    """Return why a file of a run cannot be opened; None if it can, or if there is none."""
    try:
        open_regular(path).close()
    except NotPlainError as error:
        return error.strerror
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error.strerror)
    return None


def trusted_group(path: Path, group: str | None) -> int | None:
    """Return the id of the group that the user trusts with a run directory; None without one.

    Args:
        group: its name. None: the group that the directory was shared with, if it exists.
    """
    if group is not None:
        try:
            return grp.getgrnam(group).gr_gid
        except KeyError:
            return None
    if not path.exists():
        return None
    found = path.stat()
    return found.st_gid if found.st_mode & _SHARED_BITS == _SHARED_BITS else None


def outcome_file(attempt_dir: Path) -> Path:
    """Return the file with the exit code on which the nodes of an attempt agreed; see `hpc_rl.node.ending`."""
    return attempt_dir / ".outcome"


def read_outcome(attempt_dir: Path) -> int | None:
    """Return the exit code on which the nodes of an attempt agreed, or None if they have not."""
    try:
        return int(read_regular(outcome_file(attempt_dir), _MOST_LOCK_BYTES))
    except (OSError, ValueError):
        return None


def lost_file(attempt_dir: Path) -> Path:
    """Return the file with the names of the nodes that an attempt lost, one per line."""
    return attempt_dir / ".lost"


def moved_end_file(attempt_dir: Path) -> Path:
    """Return the file with the end of the walltime in Unix time, if it moved because the job was suspended."""
    return attempt_dir / ".job-end"


def terminated_file(attempt_dir: Path) -> Path:
    """Return the file with which the job script notes that Slurm ends the job: CANCELLED or TIMEOUT."""
    return attempt_dir / ".terminated"


def current_run_dir() -> RunDir | None:
    """Return the run directory that the job script exported, or None outside a job."""
    value = os.environ.get(ENV_RUN_DIR)
    return RunDir(Path(value)) if value else None


def current_attempt_dir() -> Path | None:
    """Return the attempt's folder that the job script exported, or None outside a job."""
    value = os.environ.get(ENV_ATTEMPT_DIR)
    return Path(value) if value else None
