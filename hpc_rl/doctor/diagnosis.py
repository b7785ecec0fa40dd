"""Why a run failed, by the messages in its logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.doctor.known_failures import KNOWN_FAILURES, KnownFailure
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import RunStatus, status_of

HEAD_BYTES, TAIL_BYTES = 64_000, 192_000
"""Read of a longer log: how it began, and how it ended."""
MOST_FILES, FEW_FILES = 200, 24
"""Logs of an attempt that `explain` reads, and `status`, which has to be quick."""
_LOG_SUFFIXES = (".log", ".out", ".err")
_NEW_START = re.compile(r"^.*(is queued again|DUE TO JOB REQUEUE).*\n", re.MULTILINE)
"""What stands above in a job's log belongs to an earlier start."""
_ERROR_LINE = re.compile(r"\berror\b|^hpc-rl: |\b[A-Z]\w*(Error|Exception)\b|^Traceback", re.IGNORECASE)
FAILED = frozenset({"BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"})
"""States that want an explanation; what was cancelled or stopped was asked for."""


@dataclass(frozen=True)
class Text:
    """Something to search."""

    source: str
    text: str
    own: bool = True
    """False for Ray's own logs, which also complain when all is well: what the others say comes first."""


@dataclass(frozen=True)
class Finding:
    failure: KnownFailure
    source: str
    line: str
    """The first one that shows it."""

    def as_dict(self) -> dict[str, str]:
        failure = self.failure
        known = {"title": failure.title, "cause": failure.cause, "fix": failure.fix, "anchor": failure.anchor}
        return {**known, "source": self.source, "line": self.line}


def findings(texts: Iterable[Text]) -> list[Finding]:
    """Known failures in the texts, each once, causes before what follows from them."""
    found: dict[KnownFailure, tuple[bool, Finding]] = {}
    for text in texts:
        for failure in KNOWN_FAILURES:
            if failure in found and found[failure][0] >= text.own:
                continue
            line = _first_line(failure, text.text)
            if line is not None:
                found[failure] = text.own, Finding(failure, text.source, line)
    ranked = sorted(found.values(), key=lambda pair: (not pair[0], KNOWN_FAILURES.index(pair[1].failure)))
    return [finding for _, finding in ranked]


def explain_file(path: Path) -> tuple[list[Finding], list[str]]:
    """Known failures in a log, and its last error lines.

    Raises:
        UserError: it cannot be read.
    """
    try:
        text = read_ends(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return findings([Text(str(path), text)]), error_lines(text)


def explain_run(run: RunDir, status: RunStatus) -> tuple[list[Finding], list[str]]:
    """The same of a run, by the newest start of its job; the error lines are those of the job's log."""
    texts = list(texts_of_run(run, status, MOST_FILES))
    job_log = next((text.text for text in texts if text.source == status.log), "")
    return findings(texts), error_lines(job_log)


def error_lines(text: str, count: int = 5) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [line for line in lines if _ERROR_LINE.search(line)][-count:] or lines[-count:]


def texts_of_run(run: RunDir, status: RunStatus, most_files: int) -> Iterator[Text]:
    """What Slurm says, the job's log, the metrics, and the logs of ranks, nodes and Ray's processes."""
    yield Text("Slurm", f"state {status.state} {status.reason}")
    log = Path(status.log) if status.log else None
    if log is not None and log.exists():
        yield Text(str(log), _NEW_START.split(read_ends(log))[-1])
    if run.metrics.exists():
        yield Text(str(run.metrics), read_ends(run.metrics))
    for attempt in run.attempts()[-1:]:
        logs = sorted(path for path in attempt.rglob("*") if path.suffix in _LOG_SUFFIXES and path.is_file())
        for path in sorted(logs, key=lambda path: path.parent != attempt)[:most_files]:
            yield Text(str(path), read_ends(path), own=path.parent == attempt)


def read_ends(path: Path) -> str:
    """A text file: of a long one its first and its last part."""
    with path.open("rb") as file:
        size = path.stat().st_size
        head = file.read(HEAD_BYTES)
        file.seek(max(len(head), size - TAIL_BYTES))
        skipped = b"\n" if file.tell() > len(head) else b""
        return (head + skipped + file.read(TAIL_BYTES)).decode(errors="replace")


def _first_line(failure: KnownFailure, text: str) -> str | None:
    lines = (line for pattern in failure.patterns for line in _lines_with(pattern, text))
    return next((line for line in lines if failure.over is None or _number(failure, line) > failure.over), None)


def _lines_with(pattern: str, text: str) -> Iterator[str]:
    """Looks for the longest part as it stands first, which is a hundred times quicker than a regular expression."""
    parts = pattern.split("*")
    key = max(parts, key=len)
    whole = re.compile(".*?".join(map(re.escape, parts)))
    place = text.find(key)
    while place >= 0:
        begin, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
        line = text[begin : end if end >= 0 else len(text)]
        if whole.search(line):
            yield line.strip()
        place = text.find(key, begin + len(line))


def _number(failure: KnownFailure, line: str) -> float:
    """The number behind the pattern; 0 where there is none."""
    match = re.search(re.escape(failure.patterns[0]) + r"\W{1,4}(\d+\.?\d*([eE][+-]?\d+)?)", line)
    return float(match[1]) if match else 0.0


def diagnosis_of(run: RunDir) -> tuple[RunStatus, list[Finding]]:
    """A run's status, and why it failed where it has."""
    status = status_of(run)
    return status, findings(texts_of_run(run, status, FEW_FILES)) if status.state in FAILED else []
