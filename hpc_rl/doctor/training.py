"""The results of the training checks as lines of the doctor, and as a text for the site profile and bug reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_rl.doctor.checks import Check, as_text, ok, problem, skipped
from hpc_rl.host.acceptance import Line
from hpc_rl.host.counted import counted
from hpc_rl.host.machine import PACKAGES
from hpc_rl.host.node_report import NodeReport

NOT_RUN = "the job ended before this check"


def training_checks(lines: Sequence[Line]) -> list[Check]:
    """Judge the newest line of each check, also if the job was cut off."""
    if not lines:
        return [problem("training", "no training check has started", "see the job's log, and raise --time")]
    return [_check(line) for line in lines]


def _check(line: Line) -> Check:
    if line.state == "passed":
        return ok(line.name, f"{line.found} ({line.seconds:.0f} s)")
    if line.state == "skipped":
        return skipped(line.name, line.found)
    if line.state == "failed":
        remedy = f"avoid it with {line.setting}" if line.setting else "see the logs of the job"
        return problem(line.name, f"{line.found}. Meaning: {line.meaning}", remedy)
    reason = NOT_RUN if line.state == "planned" else "the job ended during this check"
    return problem(line.name, reason, "run the doctor again with a longer --time")


def summary(checks: Iterable[Check]) -> str:
    """Return the numbers of results, such as `12 ok, 3 skipped, 1 problem`."""
    levels = [check.level for check in checks]
    return ", ".join(f"{levels.count(level)} {level}" for level in dict.fromkeys(levels))


def report(reports: Sequence[NodeReport], checks: Sequence[Check], date: str, home: Path) -> str:
    """Return the result as plain text: versions and hardware, then one line for each check.

    The home folder is written as `~`, so that the text does not name its user.

    Args:
        reports: of the nodes of the job, at least one.
        checks: the training checks.
        date: as it is shown, such as 2026-01-31.
    """
    text = "\n".join([f"hpc-rl doctor --train, {date}: {summary(checks)}", *_versions(reports), as_text(checks)])
    return text.replace(str(home), "~") if str(home) != "/" else text


def _versions(reports: Sequence[NodeReport]) -> list[str]:
    """Return versions, hardware and network in some lines, the same for all nodes if they are alike."""
    first = min(reports, key=lambda one: one.rank)
    versions = ", ".join(f"{name} {first.python.versions[name]}" for name in PACKAGES if name in first.python.versions)
    cuda = f", torch for CUDA {first.python.torch_cuda}" if first.python.torch_cuda else ""
    hardware = dict.fromkeys(map(_hardware, reports))
    count = f"{counted(first.nodes, 'node')} x {counted(first.processes, 'process')} on {first.device}"
    network = f"interface {first.interface or 'none'} of {', '.join(first.interfaces)}"
    inside = ", in a container" if any("CONTAINER" in name for name in first.environ) else ""
    return [
        f"Python {first.python.version} on {first.python.machine}, {versions}{cuda}{inside}",
        f"{count}, {network}",
        *hardware,
    ]


def _hardware(report: NodeReport) -> str:
    gpus = " + ".join(f"{report.gpus.count(name)} x {name}" for name in dict.fromkeys(report.gpus)) or "no GPUs"
    driver = f", driver {report.gpu_driver}" if report.gpu_driver else ""
    return f"{gpus}{driver}, {counted(report.cpus, 'CPU')}, {report.memory / 2**30:.0f} GiB memory"
