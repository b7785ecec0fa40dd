"""Find a run by its path, name or job id, and read its state."""

from __future__ import annotations

import json
import os
import pwd
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.formats.auto_lending import AutoLending, needs_looks, read_auto_lending
from hpc_rl.formats.offer import LentEnvironments, LentNode, read_lent_environments, read_lent_nodes
from hpc_rl.run_dir import RunDir, terminated_file
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import Place, by_place, recorded
from hpc_rl.slurm.states import ENDED, JobState
from hpc_rl.system.disk import disk_problem
from hpc_rl.system.files import open_regular, read_end, read_regular
from hpc_rl.tracking.metrics import parse_line
from hpc_rl.tracking.points import read_points

_END_BYTES, _MOST_LOSSES_BYTES = 2**16, 2**20
"""Of metrics.jsonl and of lost-nodes that are read."""
NOT_SUBMITTED = "NOT SUBMITTED"
UNKNOWN = "UNKNOWN"
"""Slurm does not answer, and the job has not recorded a state."""
SCRIPT_KILLED = "the job's script was killed before it could record how the job ended"
REQUEUED_ITSELF = "the job has recorded that it is queued again, so Slurm may show this state only for a moment"
CANCELLED = "CANCELLED"
BY_YOU = "by you"
STOPPED = "STOPPED"
"""A state of hpc-rl: the run saved and exited early. In Slurm its job has the state FAILED with exit code 75."""
Ask = Callable[[str], JobState | None]
"""Returns what Slurm reports about a job; None if it has no record. May raise commands.NoAnswer."""


@dataclass(frozen=True)
class RunStatus:
    """A run as `hpc-rl status` shows it."""

    run: str
    run_dir: str
    job_id: str | None
    state: str
    reason: str = ""
    nodes: str = ""
    expected_start: str = ""
    """Slurm's estimate for a pending job, ISO 8601; empty if there is none."""
    exit_code: int | None = None
    attempt: int = 0
    step: int | None = None
    total_steps: int | None = None
    step_age_s: float | None = None
    """Seconds since the last step was recorded, while the job runs."""
    metrics: dict[str, float] = field(default_factory=dict)
    log: str | None = None
    lost_nodes: tuple[str, ...] = ()
    """Nodes that this job has lost, one entry for each time."""
    lent_nodes: tuple[LentNode, ...] = ()
    """The nodes that other jobs lend to the newest attempt, or have lent."""
    lends_to: str = ""
    """Directory of the run to which the nodes of this one are lent."""
    lent_environments: tuple[LentEnvironments, ...] = ()
    """Those of them that are for environments."""
    auto_lending: AutoLending | None = None
    """The lender jobs that the run queues itself; None if it does not."""
    disk: str = ""
    """What is free on the run directory's file system, if it is hardly anything."""
    is_last_recorded: bool = False
    """Whether Slurm does not answer, so that the state is the last one that the job recorded. It may have ended."""
    may_return: bool = False
    """Whether the job has recorded that it is queued again, and Slurm shows that it has ended: for good, or only until
    Slurm has queued it; see `control.EndDetector`."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED or self.state == STOPPED

    @property
    def active(self) -> bool:
        """Whether a job may be writing to the run directory; true also while Slurm does not answer."""
        return not self.ended and self.state != NOT_SUBMITTED

    @property
    def left_no_log(self) -> bool:
        """Whether the job has failed, and neither Slurm nor the job left a file: usually, its nodes lack the folder."""
        if self.state != "FAILED" or self.log is None or Path(self.log).exists():
            return False
        return RunDir(Path(self.run_dir)).read_status().get("job_id") != self.job_id

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def current_job(run: RunDir) -> str | None:
    """Return the id of the job that holds the run directory's lock, or else of its newest job.

    The newest one was written at submission (job.json) or when it started (status.json).
    """
    if (holder := run.holder()) is not None:
        return holder
    marks = [path for path in (run.job, run.status) if path.is_file()]
    newest = max(marks, key=lambda path: path.stat().st_mtime_ns, default=None)
    record = {} if newest is None else run.read_job() if newest == run.job else run.read_status()
    return record.get("job_id")


def is_local(job_id: str) -> bool:
    return job_id.startswith("local-")


def in_slurm(run: RunDir) -> bool:
    """Return whether Slurm queued the run's newest job; False for --local, --in-allocation and runs without a job."""
    return _in_slurm(run.read_job(), current_job(run))


def _in_slurm(job: Mapping[str, Any], job_id: str | None) -> bool:
    return not is_local(job_id or "") and ("pid" not in job or job.get("job_id") != job_id)


def place_of(run: RunDir) -> Place:
    """Return the cluster to which the run's newest job was submitted."""
    return recorded(run.read_job(), os.environ)


def status_of(run: RunDir, within_s: float = commands.LOOK_S) -> RunStatus:
    """Read the state from Slurm, or from the run directory if Slurm has no record; the progress from metrics.jsonl.

    Args:
        within_s: seconds to wait for Slurm. After that, the state is the last one that the job recorded.
    """
    job = current_job(run), run.read_job()
    place = recorded(job[1], os.environ)
    return _status(run, *job, lambda job_id: commands.job_state(job_id, within_s, place), disk_problem(run.path) or "")


def statuses_of(found: Sequence[RunDir], within_s: float = commands.LOOK_S) -> list[RunStatus]:
    """Read the states of many runs with a constant number of queries to each of their clusters. See `status_of`."""
    jobs = [(current_job(run), run.read_job()) for run in found]
    places = [recorded(job, os.environ) for _, job in jobs]
    ids = by_place(
        (job_id, place) for (job_id, job), place in zip(jobs, places, strict=True) if job_id and _in_slurm(job, job_id)
    )
    asks = {place: _answers(job_ids, place, within_s) for place, job_ids in ids.items()}
    devices = [_device(run.path) for run in found]
    one_on = dict(zip(devices, found, strict=True))
    disks = {device: disk_problem(run.path) or "" for device, run in one_on.items()}
    return [
        _status(run, *job, asks.get(place, _unknown), disks[device])
        for run, job, place, device in zip(found, jobs, places, devices, strict=True)
    ]


def _unknown(_job_id: str) -> JobState | None:
    return None


def _answers(job_ids: Sequence[str], place: Place, within_s: float) -> Ask:
    """Ask a cluster about many jobs at once."""
    try:
        return commands.job_states(job_ids, within_s, place).get
    except commands.NoAnswer as error:
        silence = error

        def no_answer(_job_id: str) -> JobState | None:
            raise silence

        return no_answer


def _status(run: RunDir, job_id: str | None, job: Mapping[str, Any], ask: Ask, disk: str) -> RunStatus:
    latest, newest = _last_metrics(run), run.attempts()[-1:]
    fields = _job_fields(run, job_id, job, ask)
    if fields["state"] == CANCELLED and not fields.get("reason"):
        fields["reason"] = _canceller(run, job_id, None)
    return RunStatus(
        run=run.name,
        run_dir=str(run.path),
        job_id=job_id,
        **fields,
        attempt=run.last_attempt(),
        step=latest.pop("step", None),
        total_steps=latest.pop("total_steps", None),
        step_age_s=_age_s(run.metrics) if fields["state"] == "RUNNING" else None,
        metrics=latest,
        log=str(job_log(run, job_id)) if job_id else None,
        lost_nodes=lost_nodes(run, job_id),
        lends_to=job.get("lends_to", ""),
        lent_nodes=tuple(node for attempt in newest for node in read_lent_nodes(attempt)),
        lent_environments=tuple(node for attempt in newest for node in read_lent_environments(attempt)),
        auto_lending=read_auto_lending(run.path) if needs_looks(run.path) else None,
        disk=disk,
    )


def _device(path: Path) -> int:
    """Return the number of a path's file system. The path need not exist."""
    with suppress(OSError):
        return path.stat().st_dev
    return next(folder for folder in path.parents if folder.exists()).stat().st_dev


def job_log(run: RunDir, job_id: str) -> Path:
    return run.path / f"job-{job_id}.log"


def lost_nodes(run: RunDir, job_id: str | None) -> tuple[str, ...]:
    """Return the nodes that a job has lost so far, one entry for each time."""
    lines = [line.split() for line in read_end(run.losses, _MOST_LOSSES_BYTES).decode(errors="replace").splitlines()]
    return tuple(words[2] for words in lines if len(words) == 3 and words[0] == job_id)


def process_alive(pid: int, start_time: int) -> bool:
    """Return whether the process with this id and start time (proc(5), field 22 of stat, clock ticks) is running."""
    return process_start_time(pid) == start_time


def process_start_time(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name, in parentheses, may contain spaces.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _job_fields(run: RunDir, job_id: str | None, job: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    if job_id is None:
        return {"state": NOT_SUBMITTED}
    own = run.read_status()
    own = own if own.get("job_id") == job_id else {}
    own_fields = {"state": own.get("state", UNKNOWN), "exit_code": own.get("exit_code")}
    requeued = own_fields["state"] == "REQUEUED"
    unfinished = requeued or own_fields["state"] in ("RUNNING", UNKNOWN)
    if is_local(job_id) and job.get("job_id") != job_id:  # no job: what was started by hand only holds the lock
        return {"state": own.get("state", "RUNNING")}
    if not _in_slurm(job, job_id):
        here = job.get("host") == os.uname().nodename
        if here and unfinished and not process_alive(job.get("pid", 0), job.get("start_time", 0)):
            return {"state": "FAILED", "reason": "its process no longer exists", "exit_code": 1}
        return {**own_fields, "nodes": job.get("nodes", job.get("host", ""))}
    try:
        slurm = ask(job_id)
    except commands.NoAnswer as error:
        return {**own_fields, **_last_recorded(run, str(error), own_fields["state"])} if unfinished else own_fields
    if slurm is None:
        return {**_forgotten(run, own), "may_return": requeued} if unfinished else own_fields
    if slurm.ended and own.get("state") == STOPPED:
        return {**own_fields, "nodes": slurm.nodes}
    exit_code = own.get("exit_code") if slurm.ended and slurm.exit_code is None else slurm.exit_code
    was_killed = slurm.state == "FAILED" and own_fields["state"] == "RUNNING" and (slurm.exit_code or 0) > 128
    may_return = requeued and slurm.ended and slurm.state != "CANCELLED"
    reason = SCRIPT_KILLED if was_killed else REQUEUED_ITSELF if may_return else slurm.reason
    if slurm.ended and slurm.state != "COMPLETED":
        exit_code = exit_code or None  # Slurm shows 0 for jobs that it ended, such as CANCELLED and NODE_FAIL
    if slurm.state == CANCELLED and not reason.startswith("Dependency"):  # others are why it waited before
        reason = _canceller(run, job_id, slurm.cancelled_by)
    fields = {"state": slurm.state, "reason": reason, "nodes": slurm.nodes, "may_return": may_return}
    return {**fields, "expected_start": slurm.expected_start, "exit_code": exit_code}


def _canceller(run: RunDir, job_id: str | None, user: int | None) -> str:
    """Return who cancelled a job, as far as is known."""
    with suppress(OSError), open_regular(run.cancelled) as file:
        if file.read(64).decode(errors="replace").strip() == job_id:
            return BY_YOU
    if user == os.getuid() or (job_id is not None and is_local(job_id)):
        return BY_YOU
    if user is None:
        return "by you or an administrator"
    try:
        return f"by {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"by the user with the id {user}"


def _forgotten(run: RunDir, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for a job of which Slurm has no record, and which did not record how it ended."""
    with suppress(OSError):
        said = read_regular(terminated_file(run.path / f"attempt-{own.get('attempt')}")).decode(errors="replace")
        state = said.strip() if said.strip() in ENDED else "CANCELLED"
        return {"state": state, "reason": "Slurm ended the job", "exit_code": 128 + signal.SIGTERM}
    gone = "Slurm has no record of the job, and the job did not record how it ended"
    return {"state": "FAILED", "reason": gone, "exit_code": 1}


def _last_recorded(run: RunDir, silence: str, state: str) -> dict[str, Any]:
    """Return the fields for a job that may have ended since it recorded its state."""
    if state == UNKNOWN:
        return {"reason": f"{silence}; the job has not recorded a state yet", "is_last_recorded": True}
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.status.stat().st_mtime))
    return {"reason": f"{silence}; this is the last recorded state, of {at}", "is_last_recorded": True}


def _age_s(path: Path) -> float | None:
    """Return the seconds since a file was written; 0 if the clock of its file system is ahead."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None


def _last_metrics(run: RunDir) -> dict[str, Any]:
    """Return the record of the last step, which may have several lines, with the scores of the last checkpoint that
    has some; the last line may be half-written."""
    lines = read_end(run.metrics, _END_BYTES).decode(errors="replace").splitlines()
    latest: dict[str, Any] = {}
    for record in filter(None, map(parse_line, reversed(lines))):
        if latest and record["step"] != latest["step"]:
            break
        latest = {**record, **latest}
    points = read_points(run.path) if latest else {}
    newest = max((step for step in points if step <= latest["step"]), default=None)
    return latest if newest is None else {**points[newest], **latest}
