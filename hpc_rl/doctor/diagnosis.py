"""Why a run failed, according to the messages in its logs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpc_rl.doctor.known_failures import ANY_EXCEPTION, KNOWN_FAILURES, Kind, KnownFailure
from hpc_rl.errors import EXIT_BAD_INPUT, UserError
from hpc_rl.liveness import flight_records
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import STOPPED, RunStatus, status_of
from hpc_rl.system.files import open_regular
from hpc_rl.tracking.metrics import MOST_STEPS, read_thinned
from hpc_rl.tracking.planned import read_expected

HEAD_BYTES, TAIL_BYTES = 64_000, 192_000
"""Bytes that are read of a longer log: its beginning and its end."""
MOST_FILES, FEW_FILES = 200, 24
"""Logs of an attempt that `explain` reads, and that `status`, which has to be quick, reads."""
FAILED = frozenset({"BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"})
"""States that need an explanation; a cancelled or stopped run did what its user asked for."""
ENDED_WELL = frozenset({"COMPLETED", "CANCELLED", STOPPED})
MOST_LINES = 5
"""Lines of a message of the job that are kept, and error lines of an unknown failure."""

_LOG_SUFFIXES = (".log", ".out", ".err")
_NEW_START = re.compile(r"^(?>.*?(?:is queued again|DUE TO JOB REQUEUE)).*\n", re.MULTILINE)
"""Everything above this line of a job's log belongs to an earlier start."""
_OWN, _INDENT = "hpc-rl: ", "    "
_PREFIX = r"\s*+(?:\x1b\[\d*m)?(?:\[rank\d+\]: ?|rank \d+: |\([\w:.]+(?: pid=\d[^)]*+)?\)(?:\x1b\[0m)? )?\s*+"
"""What torch, hpc-rl and Ray put in front of another process's line."""
_NOISE = re.compile(
    _PREFIX
    + r"(?:\[\d{4}-\d\d-\d\d [\d:,]+ [DIW] \d+ \d+\]"  # Ray's C++ code: [2026-11-21 16:03:45,369 I 24977 24994]
    + r"|\d{4}-\d\d-\d\d [\d:,]+\s+(?:DEBUG|INFO|WARNING)\b"  # Ray's Python code: 2026-11-21 16:03:19,019 INFO
    + r"|\[?[IW]\d{4} \d\d:\d\d:\d\d)"  # torch: [W1121 16:06:07.973195985
)
_LAUNCH_ERROR = re.compile(
    r"(?:srun|sbatch|salloc|scontrol|slurm\w*(?:-\S+)?|enroot[\w-]*|apptainer|singularity|docker|podman|torchrun): .*"
    r"|nvidia-container-cli: .*|FATAL:? .*|ERROR:? +\S.*|\[ERROR\] .*|Lmod has detected .*"
    r"|\w*(?:Conda|CommandNotFound)Error: .*"
    r"|\S+: line \d+: .*|(?:/usr)?(?:/bin/)?(?:ba|z|da|k|c)?sh: .*|(?:/usr/bin/)?env: .*|\S*python[\d.]*: .*"
)
"""A line of what comes before the first program of the job: the script, Slurm and container runtimes."""
_EXCEPTION = re.compile(_PREFIX + r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)(?:\(\w+\))?(?:: |:?$)")
"""The last line of a traceback."""
_HARMLESS = re.compile(
    r"srun: (?!error|fatal|unrecognized|Check)|slurmstepd: (?!error|fatal)|\S+: (?:INFO|WARNING|warning|info)\b"
)
"""Lines of the same programs that report no error."""
_ERROR_LINE = re.compile(
    r"\berror\b|\bfatal\b|^hpc-rl: (?!Ray is up )|\b[A-Z]\w*(Error|Exception)\b|^Traceback", re.IGNORECASE
)

Role = Literal["verdict", "own", "ray"]
_ORDER: tuple[set[tuple[Kind, Role]], ...] = (
    {("outside", "verdict"), ("outside", "own")},
    {("cause", "verdict")},
    {("exception", "verdict")},
    {("cause", "own")},
    {("death", "verdict"), ("death", "own")},
    {("exception", "own")},
    {("outside", "ray"), ("cause", "ray")},
    {("consequence", "verdict"), ("consequence", "own")},
)
"""Order of the findings, the most likely cause first. Ray's own logs also contain exceptions and lost connections if
all is well, so these kinds of failures are not searched there."""
_RANKS = {place: rank for rank, places in enumerate(_ORDER) for place in places}


@dataclass(frozen=True)
class LogText:
    """Part of a log, or another text to search."""

    source: str
    text: str
    role: Role = "own"
    """verdict: the job's own last message; own: other logs of the job; ray: the logs of Ray's processes."""


@dataclass(frozen=True)
class Finding:
    failure: KnownFailure
    source: str
    line: str
    """The first line that shows the failure."""

    def as_dict(self) -> dict[str, str]:
        failure = self.failure
        known = {"title": failure.title, "cause": failure.cause, "fix": failure.fix, "anchor": failure.anchor}
        return {**known, "source": self.source, "line": self.line}


@dataclass(frozen=True)
class Explanation:
    """What the logs of a job show about its failure."""

    verdict: list[str]
    """The job's own last message, which starts with `hpc-rl:`; empty if there is none."""
    findings: list[Finding]
    """Known failures, the most likely cause first."""
    last_errors: list[str]
    """The last lines of the job's log that look like errors."""
    last_lines: list[str]
    """The last lines of the job's log, if none looks like an error."""
    launch_error: str = ""
    """The first error of the shell, Slurm or a container runtime that no finding shows; empty if there is none."""
    plan: str = ""
    """Plan and recorded peak of the memory of a GPU, if the run ended because it had too little."""


_GPU_MEMORY = next(failure for failure in KNOWN_FAILURES if "CUDA out of memory" in failure.patterns)
NOTHING = Explanation([], [], [], [])


def diagnosis_of(run: RunDir) -> tuple[RunStatus, Explanation]:
    """Return a run's status and, if it failed, the explanation, from a limited number of logs."""
    status = status_of(run)
    return status, explain_run(run, status, FEW_FILES) if status.state in FAILED else NOTHING


def explain_run(run: RunDir, status: RunStatus, most_files: int = MOST_FILES) -> Explanation:
    """Explain a run by the logs of its newest start. A run that ended well needs no explanation."""
    if status.state in ENDED_WELL:
        return NOTHING
    log = Path(status.log) if status.log else None
    job_log = _NEW_START.split(_ends_of(log))[-1] if log is not None else ""
    found = _explain(job_log, status.log or "", _other_texts(run, status, most_files))
    if status.exit_code == EXIT_BAD_INPUT:
        found = _of_bad_input(found, job_log)
    return replace(found, plan=_plan_beside(run, found.findings))


def _of_bad_input(found: Explanation, job_log: str) -> Explanation:
    """Explain a job that refused its input: the last line of its log names the cause, if no message of the job does."""
    own = [one for one in found.findings if one.failure.kind != "consequence"]
    if found.verdict or own:
        return replace(found, findings=own)
    lines = [line for line in job_log.splitlines() if line.strip() and not _NOISE.match(line)]
    last = lines[-1:]
    error = "" if [found.launch_error] == last else found.launch_error
    return Explanation(verdict=last, findings=[], last_errors=[], last_lines=[], launch_error=error)


def _plan_beside(run: RunDir, found: Sequence[Finding]) -> str:
    """Return plan and recorded peak of a run's memory if its GPUs had too little; empty if there was no plan."""
    expected = read_expected(run)
    if expected is None or not any(finding.failure is _GPU_MEMORY for finding in found):
        return ""
    records = read_thinned(run.metrics, MOST_STEPS).records
    peaks = [float(record.get("perf/max_memory_gb") or 0.0) for record in records]
    return expected.beside(max(peaks, default=0.0))


def explain_file(path: Path) -> Explanation:
    """Explain any program's log.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return _explain(read_ends(path, named=True), str(path), ())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _explain(job_log: str, source: str, others: Iterable[LogText]) -> Explanation:
    verdict = last_message(job_log)
    texts = [LogText(source, "\n".join(verdict), "verdict"), LogText(source, job_log), *others]
    found = findings(texts)
    shown = {finding.line for finding in found}
    error = _launch_error(job_log)
    return Explanation(_shortened(verdict), found, *last_lines(job_log), "" if error in shown else error)


def findings(texts: Iterable[LogText]) -> list[Finding]:
    """Return the failures that the texts show, each once, the most likely cause first."""
    found: dict[KnownFailure, tuple[int, Finding]] = {}
    for text in texts:
        for failure in KNOWN_FAILURES:
            rank = _RANKS.get((failure.kind, text.role))
            if rank is None or (failure in found and found[failure][0] <= rank):
                continue
            line = _exception_line(text.text) if failure is ANY_EXCEPTION else _first_line(failure, text.text)
            if line is not None:
                found[failure] = rank, Finding(failure, text.source, line)
    ranked = sorted(found.values(), key=lambda pair: (pair[0], KNOWN_FAILURES.index(pair[1].failure)))
    ordered = [finding for _, finding in ranked]
    # A line shows one failure: what follows is more general.
    first = {(finding.source, finding.line): finding for finding in reversed(ordered)}
    ordered = [finding for finding in ordered if first[finding.source, finding.line] is finding]
    # Behind a cause, the exception is the same failure once more.
    return [finding for finding in ordered if finding.failure is not ANY_EXCEPTION or finding is ordered[0]]


def _launch_error(text: str) -> str:
    """Return the first error of the launch that is not a consequence of another one."""
    lines = (line.strip() for line in text.splitlines() if not _NOISE.match(line))
    errors = (line for line in lines if _LAUNCH_ERROR.match(line) and not _HARMLESS.match(line))
    return next((line for line in errors if not _is_consequence(line)), "")


def _is_consequence(line: str) -> bool:
    return any(_first_line(one, line) for one in KNOWN_FAILURES if one.kind == "consequence")


def last_message(job_log: str) -> list[str]:
    """Return the job's own last message: the last consecutive `hpc-rl:` lines, with the indented lines below them."""
    lines = [line for line in job_log.splitlines() if line.strip()]
    last = next((number for number in reversed(range(len(lines))) if lines[number].startswith(_OWN)), None)
    if last is None:
        return []
    first = last
    for number in reversed(range(last)):
        if lines[number].startswith(_OWN):
            first = number
        elif not lines[number].startswith(_INDENT):
            break
    end = last + 1
    while end < len(lines) and lines[end].startswith(_INDENT):
        end += 1
    return lines[first:end]


def _shortened(message: list[str]) -> list[str]:
    """Keep the `hpc-rl:` lines, and the last lines that are indented below each."""
    kept: list[str] = []
    for number, line in enumerate(message):
        following = message[number + 1 : number + 1 + MOST_LINES]
        is_near_end = len(following) < MOST_LINES or any(one.startswith(_OWN) for one in following)
        if line.startswith(_OWN) or is_near_end:
            kept.append(line)
    return kept


def last_lines(text: str, count: int = MOST_LINES) -> tuple[list[str], list[str]]:
    """Return the last lines that look like errors and, if there are none, the last lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    errors = [line for line in lines if _ERROR_LINE.search(line)][-count:]
    return errors, [] if errors else lines[-count:]


def _other_texts(run: RunDir, status: RunStatus, most_files: int) -> Iterator[LogText]:
    """Yield Slurm's state, the metrics, and the logs of ranks, nodes and Ray's processes."""
    yield LogText("Slurm", f"state {status.state} {status.reason}")
    if status.disk:  # a full disk may have no log about it
        reason = "Read-only file system" if status.disk.endswith("read-only") else "No space left on device"
        yield LogText(str(run.path), f"{reason}: {status.disk}")
    elif status.left_no_log:
        yield LogText(str(run.path), f"the job left no log: its nodes may not see {run.path}")
    if metrics := _ends_of(run.metrics):
        yield LogText(str(run.metrics), metrics)
    for attempt in run.attempts()[-1:]:
        if most_files >= MOST_FILES or len(list(attempt.glob("flight-*"))) <= most_files:
            yield LogText(str(attempt), "\n".join(flight_records.explanations(attempt)))
        logs = sorted(path for path in attempt.rglob("*") if path.suffix in _LOG_SUFFIXES and path.is_file())
        for path in sorted(logs, key=lambda path: path.parent != attempt)[:most_files]:
            yield LogText(str(path), _ends_of(path), "own" if path.parent == attempt else "ray")


def _ends_of(path: Path) -> str:
    """Read a text file of a run; see `read_ends`. It is empty if there is no such file."""
    try:
        return read_ends(path)
    except OSError:
        return ""


def read_ends(path: Path, named: bool = False) -> str:
    """Read a text file, or the first and the last part of a long one.

    Args:
        named: see `open_regular`.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path, named=named) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEAD_BYTES)
        file.seek(max(len(head), size - TAIL_BYTES))
        skipped = b"\n" if file.tell() > len(head) else b""
        return (head + skipped + file.read(TAIL_BYTES)).decode(errors="replace")


def _first_line(failure: KnownFailure, text: str) -> str | None:
    lines = (line for pattern in failure.patterns for line in _lines_with(pattern, text))
    return next((line for line in lines if failure.over is None or _number(failure, line) > failure.over), None)


def _exception_line(text: str) -> str | None:
    """Return the last line of the last traceback that is not a consequence of another process's failure."""
    exceptions = [line.strip() for line in text.splitlines() if _EXCEPTION.match(line)]
    return next((line for line in reversed(exceptions) if not _is_consequence(line)), None)


def _lines_with(pattern: str, text: str) -> Iterator[str]:
    """Yield the lines that match a pattern and are not noise.

    The longest part of the pattern is searched as plain text first, which is a hundred times faster than a regular
    expression.
    """
    parts = pattern.removeprefix("^").split("*")
    begins = re.compile(f"{_PREFIX}{re.escape(parts[0])}" if pattern.startswith("^") else "")
    key = max(parts, key=len)
    place = text.find(key)
    while place >= 0:
        begin, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
        line = text[begin : end if end >= 0 else len(text)]
        if begins.match(line) and _has_in_order(parts, line) and not _NOISE.match(line):
            yield line.strip()
        place = text.find(key, begin + len(line))


def _has_in_order(parts: Sequence[str], line: str) -> bool:
    """Return whether a line has these parts one after the other. The first place of each leaves most for the rest."""
    place = 0
    for part in parts:
        found = line.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def _number(failure: KnownFailure, line: str) -> float:
    """Return the number that follows the pattern, or 0 if there is none."""
    match = re.search(re.escape(failure.patterns[0]) + r"\W{1,4}(\d+\.?\d*([eE][+-]?\d+)?)", line)
    return float(match[1]) if match else 0.0
