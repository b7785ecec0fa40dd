"""Why a run failed, by the messages in its logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.launch import runs
from hpc_rl.launch.known_failures import KNOWN_FAILURES, KnownFailure
from hpc_rl.launch.runs import RunStatus
from hpc_rl.run_dir import RunDir

HEAD_BYTES, TAIL_BYTES = 64_000, 192_000
"""Read of a longer log: how it began, and how it ended."""
MOST_FILES = 200
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
    """Known failures in a log, and its last error lines."""
    text = read_ends(path)
    return findings([Text(str(path), text)]), error_lines(text)


def explain_run(run: RunDir, status: RunStatus) -> tuple[list[Finding], list[str]]:
    """The same of a run, by the newest start of its job; the error lines are those of the job's log."""
    texts = list(texts_of_run(run, status))
    job_log = next((text.text for text in texts if text.source == status.log), "")
    return findings(texts), error_lines(job_log)


def error_lines(text: str, count: int = 5) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [line for line in lines if _ERROR_LINE.search(line)][-count:] or lines[-count:]


def texts_of_run(run: RunDir, status: RunStatus) -> Iterator[Text]:
    """What Slurm says, the job's log, the metrics, and the logs of every rank, node and Ray process."""
    yield Text("Slurm", f"state {status.state} {status.reason}")
    log = Path(status.log) if status.log else None
    if log is not None and log.exists():
        yield Text(str(log), _NEW_START.split(read_ends(log))[-1])
    if run.metrics.exists():
        yield Text(str(run.metrics), read_ends(run.metrics))
    for attempt in run.attempts()[-1:]:
        logs = sorted(path for path in attempt.rglob("*") if path.suffix in _LOG_SUFFIXES)
        for path in sorted(logs, key=lambda path: path.parent != attempt)[:MOST_FILES]:
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
    for match in re.finditer(_pattern(failure), text):
        if failure.over is None or _number(match) > failure.over:
            begin = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.end())
            return text[begin : end if end >= 0 else len(text)].strip()
    return None


def _number(match: re.Match[str]) -> float:
    return float(next(group for group in match.groups() if group))


def _pattern(failure: KnownFailure) -> str:
    return "|".join(f"(?:{pattern})" for pattern in failure.patterns)


def diagnosis_of(run: RunDir) -> tuple[RunStatus, list[Finding]]:
    """A run's status, and why it failed where it has."""
    status = runs.status(run)
    return status, explain_run(run, status)[0] if status.state in FAILED else []
