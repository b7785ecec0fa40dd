"""Text that the commands print."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.formats.counted import counted
from hpc_rl.formats.offer import LentNode, by_job
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.formatting import duration

if TYPE_CHECKING:
    from hpc_rl.doctor.diagnosis import Explanation
    from hpc_rl.runs.status import RunStatus
    from hpc_rl.runs.table import RunRow
    from hpc_rl.submission.job import Job

GUIDE = "docs/troubleshooting.md"
MOST_SHOWN = 300
"""Characters of a log line that are shown."""
_MOST_LENDERS = 16


def status_text(found: RunStatus) -> str:
    from hpc_rl.runs.control import how_to_resume

    rows: list[tuple[str, object]] = [
        ("run", f"{found.run}  ({short_path(Path(found.run_dir))})"),
        ("job", found.job_id or "none"),
        ("state", found.state + (f" ({found.reason})" if found.reason else "")),
    ]
    if found.lends_to:
        rows.append(("lends to", f"{Path(found.lends_to).name}  ({short_path(Path(found.lends_to))})"))
    if found.expected_start:
        rows.append(("expected start", found.expected_start.replace("T", " ")))
    if found.exit_code is not None:
        rows.append(("exit code", found.exit_code))
    if found.nodes:
        rows.append(("nodes", found.nodes))
    if found.attempt:
        rows.append(("attempt", found.attempt))
    if found.lost_nodes:
        rows.append(("lost nodes", " ".join(found.lost_nodes)))
    rows += [("lent nodes", lender) for lender in by_job(found.lent_nodes, _MOST_LENDERS)]
    environments = [LentNode(at.job, at.node, at.processes, at.conversations) for at in found.lent_environments]
    for at in by_job(environments, _MOST_LENDERS):  # processes in place of engines, conversations in place of tokens
        processes = counted(at.engines, "environment process") if at.engines else "no environments now"
        rows.append(("lent nodes", f"{at.name}: {processes}, {counted(at.tokens, 'conversation')}"))
    if (auto := found.auto_lending) is not None:
        counts = f"{counted(auto.waiting, 'lender job')} in the queue, {auto.running} running, at most {auto.most}"
        if not auto.most:
            counts = f"{counted(auto.waiting, 'lender job')} still in the queue; no more will be queued"
        rows.append(("auto", counts + (f" ({auto.problem})" if auto.problem else "")))
    if found.step is not None:
        age = "" if found.step_age_s is None else f", {duration(found.step_age_s)} ago"
        rows.append(("step", f"{found.step} of {found.total_steps}{age}"))
    score = "eval/score" if "eval/score" in found.metrics else "generate/score"
    shown = ("train/loss", "val/loss", "critic/score/mean", "val/score", score, "perf/tokens_per_s")
    rows += [(key, f"{found.metrics[key]:.6g}") for key in shown if found.metrics.get(key) is not None]
    if found.state == "RUNNING" and found.metrics.get("perf/eta_s") is not None:
        rows.append(("time left", duration(found.metrics["perf/eta_s"])))
    if found.state == "STOPPED":
        rows.append(("to resume", how_to_resume(RunDir(Path(found.run_dir)))))
    if found.disk:
        rows.append(("disk", found.disk))
    if found.log and Path(found.log).exists():
        rows.append(("log", short_path(Path(found.log))))
    elif found.left_no_log:
        reason = "Its file system is full" if found.disk else "Is the run directory on a shared file system?"
        rows.append(("log", f"none: the job could not write it. {reason}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def outcome_text(run: RunDir, status: RunStatus, explanation: Explanation, with_scores: bool = True) -> str:
    """Return the cause of a failure, the status of a run, and the scores of an evaluation."""
    from hpc_rl.tracking.evaluations import evaluation_text, read_evaluation

    reasons = explanation_text(explanation, brief=True)
    scores = evaluation_text([(run.name, read_evaluation(run))]) if with_scores else ""
    return "\n".join(filter(None, [reasons and f"{reasons}\n", status_text(status), scores]))


def explanation_text(found: Explanation, brief: bool = False) -> str:
    """Render the job's own last message, the most likely cause in full, and the other findings in one line each.

    Args:
        brief: leave out the other findings, and lines of an unknown failure.
    """
    blocks = ["\n".join(line[:MOST_SHOWN] for line in found.verdict)] if found.verdict else []
    if found.findings:
        first, *others = found.findings
        where = first.source if first.source == "Slurm" else short_path(Path(first.source))
        lines = [
            first.failure.title,
            f"  {where}: {first.line[:MOST_SHOWN]}",
            f"  cause: {first.failure.cause}",
            f"  fix:   {first.failure.fix}",
            f"  more:  {GUIDE}#{first.failure.anchor}",
        ]
        if found.plan:
            lines.insert(-1, f"  plan:  {found.plan}")
        more = [] if brief else [f"also: {other.failure.title}: {other.line[:MOST_SHOWN]}" for other in others]
        blocks.append("\n".join(lines + more))
    if found.launch_error:
        blocks.append(f"the first error of the launch:\n  {found.launch_error[:MOST_SHOWN]}")
    if found.last_errors and not (found.findings or brief):
        blocks.append(
            _quoted("the cause is not a known failure; the last lines that look like errors:", found.last_errors)
        )
    elif found.last_lines and not (found.findings or brief):
        blocks.append(
            _quoted("no known failure, and no line that looks like an error; the last lines:", found.last_lines)
        )
    return "\n\n".join(blocks)


def _quoted(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line[:MOST_SHOWN]}" for line in lines)])


def submitted_text(job: Job, job_id: str) -> str:
    waits = f" after {_jobs(job.after.job_ids)}" if job.after and job.after.job_ids else ""
    slurm = job.config.slurm
    place = f"partition {slurm.partition}" if slurm.partition else "the default partition"
    asked = ", ".join([job.size, slurm.time or "the partition's default time", place])
    return f"submitted job {job_id}{waits}: run {job.run_dir.name} in {short_path(job.run_dir.path)}\n  {asked}"


def _jobs(job_ids: tuple[str, ...]) -> str:
    return f"job {job_ids[0]}" if len(job_ids) == 1 else f"{len(job_ids)} jobs"


def runs_table(rows: Sequence[RunRow]) -> str:
    """Return one line per run. If all runs belong to one sweep, each swept key has its own column. Evaluations name the
    model and the data, and lenders their run."""
    keys = list(rows[0].values) if rows and all(row.sweep == rows[0].sweep for row in rows) else []
    table = [["run", *keys, "job", "state", "step", "last metric", "node hours"]]
    for row in rows:
        now = row.status
        failed = f" ({now.exit_code})" if now.state == "FAILED" and now.exit_code is not None else ""
        step = "" if now.step is None else f"{now.step}/{now.total_steps}"
        values = [row.values.get(key, "") for key in keys]
        measured = f"{row.metric[0]} {row.metric[1]:.4g}" if row.metric else ""
        measured = f"{measured}  {row.purpose}".strip()
        spent = f"{row.node_hours:.2f}"
        table.append([now.run, *values, now.job_id or "", now.state + failed, step, measured, spent])
    if any(row.lent_hours for row in rows):
        lent = [f"{row.lent_hours:.2f}" if row.lent_hours else "" for row in rows]
        table = [[*cells, more] for cells, more in zip(table, ["lent", *lent], strict=True)]
    numbers = ("step", "node hours", "lent")
    return aligned(table, right={place for place, name in enumerate(table[0]) if name in numbers})


def aligned(rows: Sequence[Sequence[str]], right: Set[int] = frozenset()) -> str:
    """Align rows of text in columns.

    Args:
        right: indices of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if place in right else text.ljust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def size_text(size: float) -> str:
    """Format a number of bytes as `1.2 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def short_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
