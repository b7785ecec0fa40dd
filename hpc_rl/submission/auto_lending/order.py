"""The order of `hpc-rl lend RUN --auto N`: the complete lender job, from which a run makes as many as it needs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.config.compose import validate
from hpc_rl.config.lend import LendConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.auto_lending import order_file
from hpc_rl.formats.counted import counted
from hpc_rl.formats.offer import LENT
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.control import check_own
from hpc_rl.runs.folders import ROOT
from hpc_rl.submission.job import Job
from hpc_rl.submission.lending import KIND
from hpc_rl.submission.request import free_name
from hpc_rl.system.files import read_json, write_atomically


@dataclass(frozen=True)
class Order:
    """What a run may queue."""

    number: int
    """Another one for each order."""
    most: int
    """Lender jobs that there may be, waiting and running together."""
    folder: Path
    """The folder below which their run directories are."""
    config: LendConfig
    stem: str
    """Beginning of their names."""
    working_dir: Path
    program: tuple[str, ...]
    command: tuple[str, ...]

    def job(self) -> Job:
        """Return the next lender job. The process has to be in `folder`."""
        run = RunDir((ROOT / free_name(self.stem)).absolute())
        job = Job(KIND, self.config, run, self.working_dir, self.program, command=self.command, is_named=False)
        return replace(job, facts={"lends_to": self.program[0]})


def place_order(run: RunDir, job: Job, most: int) -> str:
    """Order lender jobs of a run; return what follows, as a sentence.

    Args:
        job: any one of them.

    Raises:
        UserError: these are more than the site allows, or they are not for engines.
    """
    if not isinstance(job.config, LendConfig) or job.config.lend.resource != LENT:
        raise UserError(f"--auto {most}: a run queues only lender jobs with engines itself; remove --role, or --auto")
    if most > (limit := job.config.lend.auto_most):
        allowed = f"at most {limit} lender jobs of a run" if limit else "no lender jobs that a run queues itself"
        raise UserError(f"--auto {most}: this site allows {allowed} (lend.auto_most)")
    record = {
        "number": time.time_ns() // 1_000_000,
        "most": most,
        "look_s": job.config.lend.auto_look_s,
        "folder": str(Path.cwd()),
        "config": job.config.model_dump(mode="json"),
        "stem": job.run_dir.name.rpartition("-")[0],
        "working_dir": str(job.working_dir),
        "program": job.program,
        "command": job.command,
    }
    check_own(run)
    write_atomically(order_file(run.path), json.dumps(record), forbidden=0o077)
    image = "; its image has to contain sbatch" if job.config.container.image else ""
    return (
        f"run {run.name} will queue up to {counted(most, 'lender job')} itself while it waits for its engines: hpc-rl "
        f"status {run.name} shows them, and hpc-rl lend {run.name} --auto 0 ends this{image}"
    )


def read_order(run: RunDir) -> Order | None:
    """Return the order of a run, or None if there is none.

    Raises:
        UserError: it is damaged.
    """
    path = order_file(run.path)
    if not path.exists():
        return None
    record: dict[str, Any] = read_json(path)
    try:
        config = validate(KIND, record["config"])
        assert isinstance(config, LendConfig)
        return Order(
            int(record["number"]),
            int(record["most"]),
            Path(record["folder"]),
            config,
            str(record["stem"]),
            Path(record["working_dir"]),
            tuple(map(str, record["program"])),
            tuple(map(str, record["command"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error!r}): order again (hpc-rl lend {run.name} --auto N)") from error
