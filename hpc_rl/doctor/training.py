"""The results of the training checks as lines of the doctor, and as a text for the site profile and bug reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_rl.doctor.checks import Check, as_text, ok, problem, skipped
from hpc_rl.errors import UserError
from hpc_rl.formats.acceptance import Line
from hpc_rl.formats.counted import counted
from hpc_rl.formats.layouts import WITHOUT_CHECK, Covered
from hpc_rl.formats.node_report import NodeReport
from hpc_rl.system.files import write_atomically
from hpc_rl.system.machine import PACKAGES

NOT_RUN = "the job ended before this check"
COVERED = "layouts that were covered:"
NOT_PASSED = "layouts whose check did not pass:"
ELSEWHERE = "layouts that need other nodes, GPUs or packages than those of this job:"
UNCHECKED = "layouts that no check covers:"
_FOLDERS = re.compile(r"(?<![\w.:/~])~?(?:/[\w.+@%-]+)+/(?=[\w.+@%-])")
"""The folders of a path, without the name of the file."""
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_KEY = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_)\w{8,}")


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


def report(
    reports: Sequence[NodeReport], checks: Sequence[Check], lines: Sequence[Line], date: str, home: Path, user: str
) -> str:
    """Return the result as plain text: versions and hardware, one line for each check, and the layouts.

    The text names no user, machine or folder; see `anonymous`.

    Args:
        reports: of the nodes of the job, at least one.
        checks: the training checks.
        lines: their results.
        date: as it is shown, such as 2026-01-31.
    """
    text = "\n".join(
        [f"hpc-rl doctor --train, {date}: {summary(checks)}", *_versions(reports), as_text(checks), *layouts(lines)]
    )
    return anonymous(text, [one.node for one in sorted(reports, key=lambda one: one.rank)], home, user)


def layouts(lines: Sequence[Line]) -> list[str]:
    """Return the layouts of processes and GPUs: those that the checks covered, and the others, grouped by reason."""
    passed = {layout for line in lines if line.state == "passed" for layout in line.covers}
    planned = {layout for line in lines for layout in line.covers}
    groups: dict[str, list[str]] = {name: [] for name in (COVERED, NOT_PASSED, ELSEWHERE, UNCHECKED)}
    for layout in Covered:
        rest = UNCHECKED if layout in WITHOUT_CHECK else ELSEWHERE
        groups[COVERED if layout in passed else NOT_PASSED if layout in planned else rest].append(f"  {layout}")
    return [line for name, members in groups.items() if members for line in (name, *members)]


def anonymous(text: str, nodes: Sequence[str], home: Path, user: str) -> str:
    """Return a text without names of machines, the user and folders, addresses, and what looks like a key.

    Args:
        nodes: names of the nodes of the job, in their order, which become node0, node1 and so on.
    """
    text = text.replace(str(home), "~") if str(home) != "/" else text
    text = _FOLDERS.sub("", text)
    names = {one: f"node{number}" for number, name in enumerate(nodes) for one in (name, name.split(".")[0])}
    for name, shown in [*names.items(), (user, "USER")]:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text) if name else text
    return _KEY.sub("KEY", _ADDRESS.sub("ADDRESS", text))


def write_page(report: str, run: Path) -> Path:
    """Write the result for a bug report beside the run directory, which may be removed; return the path.

    Raises:
        UserError: the page cannot be written.
    """
    page = run.with_name(f"{run.name}.md")
    try:
        write_atomically(page, f"```text\n{report}\n```\n")
    except OSError as error:
        raise UserError(f"the page for bug reports {page} cannot be written: {error.strerror}") from error
    return page


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
    links = f", links between GPUs: {report.gpu_links}" if report.gpu_links else ""
    return f"{gpus}{driver}{links}, {counted(report.cpus, 'CPU')}, {report.memory / 2**30:.0f} GiB memory"
