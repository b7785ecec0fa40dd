"""`doctor` and `explain`: what is wrong with a cluster, and with a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import JsonOption, app, leave, note
from hpc_rl.cli.submit import SlurmFlags, with_slurm_flags
from hpc_rl.cli.text import MOST_SHOWN, findings_text
from hpc_rl.errors import UserError


@app.command()
@with_slurm_flags
def doctor(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options, as for submit.", show_default=False)
    ] = None,
    *,
    flags: SlurmFlags,
    on_nodes: Annotated[
        int | None, typer.Option(min=1, help="Look at so many nodes too, by a short job.", show_default=False)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Run directory to look at, as for submit; in ./runs where not given.", show_default=False),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Look at this machine alone, without Slurm.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Look for what would keep jobs from running; exit code 1 where something would.

    Example: hpc-rl doctor --on-nodes 2 --partition gpu
    """
    from hpc_rl.doctor import findings as found
    from hpc_rl.doctor.job import doctor_config, doctor_job, run_on_nodes
    from hpc_rl.doctor.login import container_checks, folder_checks, internet_checks, python_checks, slurm_checks
    from hpc_rl.submission import queue
    from hpc_rl.submission.environment import job_environment

    if flags.job_name or flags.after:
        raise UserError("the doctor's job has a name of its own and waits for nobody: leave out --job-name and --after")
    if on_nodes is None:
        config = doctor_config(overrides or [], flags.settings(), flags.site)
        slurm = [] if local else slurm_checks(config.slurm)
        hf_home = job_environment(config).get("HF_HOME")
        folder = folder_checks((run_dir or Path("runs")).absolute(), hf_home)
        python = container_checks(config) if config.container.image else python_checks(config.slurm.python)
        results = [*slurm, *folder, *python, *internet_checks()]
    else:
        if not local:
            queue.require_slurm()
        job = doctor_job(on_nodes, overrides or [], flags.settings(), run_dir, flags.site, local=local)
        results = run_on_nodes(job, local, note)
    if as_json:
        print(json.dumps([check.as_dict() for check in results], indent=2))
    else:
        print(found.as_text(results))
    leave(1 if found.has_problem(results) else 0)


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="LOGFILE_OR_RUN", help="A log file, or a run as for status.")],
    as_json: JsonOption = False,
) -> None:
    """Say why a run failed, by the messages in its logs; any program's log will do.

    Example: hpc-rl explain slurm-123.out
    """
    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs.status import find_run, status_of

    if Path(target).is_file():
        state, (found, last) = None, diagnosis.explain_file(Path(target))
    else:
        run = find_run(target)
        status = status_of(run)
        state, (found, last) = status.state, diagnosis.explain_run(run, status)
    if as_json:
        print(json.dumps({"state": state, "findings": [one.as_dict() for one in found], "last_errors": last}, indent=2))
        return
    if state is not None and state not in diagnosis.FAILED:
        print(f"run {target} has not failed: it is {state}")
    if found:
        print(findings_text(found))
    elif last and state in (None, *diagnosis.FAILED):
        print("none of the known failures; the last lines that look like errors:")
        print("\n".join(f"  {line[:MOST_SHOWN]}" for line in last))
