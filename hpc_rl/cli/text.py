"""What the commands print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_rl.launch.diagnosis import Finding
    from hpc_rl.launch.runs import RunStatus

GUIDE = "docs/troubleshooting.md"
MOST_SHOWN = 300
"""Characters of a log's line."""


def status_text(found: RunStatus) -> str:
    rows: list[tuple[str, object]] = [
        ("run", f"{found.run}  ({short_path(Path(found.run_dir))})"),
        ("job", found.job_id or "none"),
        ("state", found.state + (f" ({found.reason})" if found.reason else "")),
    ]
    if found.exit_code is not None:
        rows.append(("exit code", found.exit_code))
    if found.nodes:
        rows.append(("nodes", found.nodes))
    if found.attempt:
        rows.append(("attempt", found.attempt))
    if found.step is not None:
        rows.append(("step", f"{found.step} of {found.total_steps}"))
    shown = ("train/loss", "val/loss", "critic/score/mean", "val/score", "perf/tokens_per_s", "perf/eta_s")
    rows += [(key, f"{found.metrics[key]:.6g}") for key in shown if found.metrics.get(key) is not None]
    if found.log and Path(found.log).exists():
        rows.append(("log", short_path(Path(found.log))))
    elif found.state == "FAILED" and not found.attempt:
        rows.append(("log", "none: the job could not write there. Is the run directory on a shared file system?"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def findings_text(found: Sequence[Finding]) -> str:
    """The first in full, which explains most; the others by a line."""
    first, *others = found
    where = first.source if first.source == "Slurm" else short_path(Path(first.source))
    lines = [
        first.failure.title,
        f"  {where}: {first.line[:MOST_SHOWN]}",
        f"  cause: {first.failure.cause}",
        f"  fix:   {first.failure.fix}",
        f"  more:  {GUIDE}#{first.failure.anchor}",
    ]
    return "\n".join(lines + [f"also: {other.failure.title}: {other.line[:MOST_SHOWN]}" for other in others])


def short_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
