"""The commands as Python functions, for notebooks and scripts on a login node. torch is not required.

    import hpc_rl

    run = hpc_rl.submit("sft", nodes=2, overrides=["model=qwen2.5-0.5b", "data.train_files=train.jsonl"])
    run.wait()                              # later, or in another notebook: run = hpc_rl.Run("sft-1")
    pandas.DataFrame(run.metrics()).plot(x="step", y="train/loss")
    hpc_rl.submit("ppo", nodes=4, overrides=["recipe=gsm8k-4nodes", f"model.path={run.model}"])

Bad input raises `hpc_rl.UserError` with the message that the command line prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir

if TYPE_CHECKING:
    from hpc_rl.runs.status import RunStatus

SHOWN_ROWS = 20
"""First rows, and last rows, that a notebook shows of a long table."""


def _note(text: str) -> None:
    print(f"hpc-rl: {text}", file=sys.stderr, flush=True)


class Rows(list[dict[str, Any]]):
    """Rows with the same columns, which a notebook shows as a table and pandas.DataFrame accepts."""

    def _repr_html_(self) -> str:
        columns = list(dict.fromkeys(name for row in self for name in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        left_out = len(self) - 2 * SHOWN_ROWS
        shown = list(self) if left_out <= 0 else [*self[:SHOWN_ROWS], *self[-SHOWN_ROWS:]]
        lines = [f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in columns)}</tr>" for row in shown]
        if left_out > 0:
            lines.insert(SHOWN_ROWS, f"<tr><td colspan={len(columns)}>{left_out:,} rows are not shown</td></tr>")
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


class Run:
    """A run: its directory, and the commands for an existing run as methods.

    Args:
        target: path, name below ./runs, or job id.

    Raises:
        UserError: there is no such run.
    """

    path: Path
    """The run directory, absolute."""

    def __init__(self, target: str | Path) -> None:
        from hpc_rl.runs.finding import find_run as find

        self.path = find(str(target)).path

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def _repr_html_(self) -> str:
        now = self.status()
        shown = {"run": now.run, "state": now.state, "job": now.job_id, "step": _step(now), **now.metrics}
        return Rows([{"": name, self.name: value} for name, value in shown.items()])._repr_html_()

    @property
    def name(self) -> str:
        return self.path.name

    def status(self) -> RunStatus:
        """Return state, job, step and last metrics, as `hpc-rl status` shows them."""
        from hpc_rl.runs.status import status_of

        return status_of(self._dir)

    def wait(self, timeout_s: float | None = None, note: Callable[[str], None] = _note) -> RunStatus:
        """Wait until the run's job has ended, and return its status. A job that is requeued at its walltime continues.

        Args:
            timeout_s: maximum number of seconds to wait. None: no limit.
            note: receives a line whenever the state or the step has changed.

        Raises:
            TimeoutError: the job is still queued or running; it continues.
        """
        from hpc_rl.runs.control import wait

        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def check() -> None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.name} has not ended after {timeout_s:g} s; its job continues")

        seen = ""

        def show(now: RunStatus) -> None:
            nonlocal seen
            line = f"{self.name}: {now.state}" + (f", step {_step(now)}" if now.step is not None else "")
            if line != seen:
                note(line)
            seen = line

        wait(self._dir, check, show)
        return self.status()

    def metrics(self) -> Rows:
        """Return one row per step, as in metrics.jsonl: `step`, `time`, and metrics such as `train/loss`. They include
        the scores of checkpoints that other jobs have added (`hpc-rl lend --role eval`)."""
        from hpc_rl.tracking.metrics import read_metrics
        from hpc_rl.tracking.points import with_points

        return Rows(with_points(read_metrics(self._dir.metrics), self._dir.path))

    def logs(self, node: int | None = None) -> str:
        """Return the job's log, or all logs of one node (0, 1, ...), one after the other; of very long ones the end."""
        from hpc_rl.runs.follow import MOST_LOG_BYTES, log_files
        from hpc_rl.system.files import read_end

        files = log_files(self._dir, node)
        return "".join(read_end(file, MOST_LOG_BYTES).decode(errors="replace") for file in files)

    def stop(self) -> str:
        """Ask the run to save as soon as it can and exit. Return a line that describes what was done."""
        from hpc_rl.runs.control import stop

        return stop(self._dir)

    def cancel(self) -> str:
        """End the run's job immediately; its checkpoints are kept. Return a line that describes what was done."""
        from hpc_rl.runs.control import cancel

        return cancel(self._dir)

    @property
    def model(self) -> Path:
        """The folder of the exported model, in Hugging Face's format.

        Raises:
            UserError: the run has not exported a model yet.
        """
        if not self._dir.model.is_dir():
            raise UserError(f"run {self.name} has not exported {self._dir.model}: its state is {self._state()}")
        return self._dir.model

    @property
    def _dir(self) -> RunDir:
        return RunDir(self.path)

    def _state(self) -> str:
        return self.status().state


def submit(
    kind: str,
    overrides: Sequence[str] = (),
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    job_name: str | None = None,
    program: Sequence[str] = (),
    after: Run | str | None = None,
    run_dir: Path | str | None = None,
    site: str | None = None,
    test: bool = False,
    force: bool = False,
    note: Callable[[str], None] = _note,
) -> Run:
    """Check a job and queue it, like `hpc-rl submit`.

    Args:
        kind: sft, dpo, rm, distill, ppo, generate, eval, select, torchrun or ray.
        overrides: `key=value` and `group=name`, as on the command line.
        time: walltime, such as "24:00:00".
        program: your own program and its arguments, if the kind takes one.
        after: a run, or a job id, that has to complete first.
        site: file or name of a site profile.
        test: submit a short trial of two steps instead (`submit --test`).
        force: submit a job even if it does not fit into the memory of its GPUs.
        note: receives sentences about what was chosen, and about what could not be checked.

    Raises:
        UserError: the request is invalid, or sbatch refused the job. Then nothing is left behind.
    """
    from hpc_rl.config.kinds import offered
    from hpc_rl.submission import launch
    from hpc_rl.submission.request import JobRequest

    kinds = [row.name for row in offered()]
    if kind not in kinds:
        raise UserError(f"job kind {kind!r}: choose one of {', '.join(kinds)}")
    if isinstance(overrides, str) or isinstance(program, str):
        raise UserError("overrides and program are lists of words, such as ['optim.lr=1e-4'] and ['train.py', '--lr']")
    flags = {
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": gpus_per_node,
        "slurm.time": time,
        "slurm.partition": partition,
        "slurm.account": account,
        "slurm.job_name": job_name,
    }
    request = JobRequest(
        kind=kind,
        overrides=tuple(overrides),
        program=tuple(program),
        settings={key: value for key, value in flags.items() if value is not None},
        after=str(after.path) if isinstance(after, Run) else after,
        run_dir=None if run_dir is None else Path(run_dir),
        site=site,
        force=force,
        command=("hpc_rl.submit", kind, *overrides, *(["--", *program] if program else [])),
    )
    job, _ = launch.submit(launch.as_test(request) if test else request, note)
    return Run(job.run_dir.path)


def find_run(target: str | Path) -> Run:
    """Find a run, as `Run(target)` does.

    Raises:
        UserError: there is no such run.
    """
    return Run(target)


def find_runs(target: str | None = None) -> Rows:
    """Return the table of `hpc-rl runs`: one row for each run of a directory or a sweep, the newest last.

    Args:
        target: a directory, or the name of a sweep or pipeline. None: all runs below ./runs.

    Raises:
        UserError: there is no such directory, sweep or pipeline.
    """
    from hpc_rl.runs.table import COLUMNS, find_rows

    rows, _ = find_rows(target)
    return Rows({name: row.cell(name) for name in COLUMNS} for row in rows)


def _step(now: RunStatus) -> str:
    return "" if now.step is None else f"{now.step} of {now.total_steps}" if now.total_steps else str(now.step)


def _cell(value: Any) -> str:
    return "" if value is None else escape(f"{value:.6g}" if isinstance(value, float) else str(value))
