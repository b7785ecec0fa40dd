"""The commands `doctor` and `explain`, which find problems of a cluster and of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import JsonOption, app, leave, note
from hpc_rl.cli.submit import SlurmFlags, with_slurm_flags
from hpc_rl.cli.text import explanation_text
from hpc_rl.errors import UserError


@app.command()
@with_slurm_flags
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options of the test job, as for `submit`.", show_default=False),
    ] = None,
    *,
    flags: SlurmFlags,
    on_nodes: Annotated[
        int | None, typer.Option(min=1, help="Also check this many nodes, with a short job.", show_default=False)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Run directory to check, as for `submit`; by default one below ./runs.", show_default=False),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Check only this machine, without Slurm.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check for anything that would prevent jobs from running. The exit code is 1 if there is a problem.

    Example: hpc-rl doctor --on-nodes 2 --partition gpu
    """
    from hpc_rl.doctor.checks import as_text, has_problem
    from hpc_rl.doctor.job import doctor_config, doctor_job, run_on_nodes
    from hpc_rl.doctor.login import container_checks, folder_checks, internet_checks, python_checks, slurm_checks
    from hpc_rl.submission import queue
    from hpc_rl.submission.environment import job_environment

    if flags.job_name or flags.after:
        raise UserError("the doctor's job has a fixed name and starts at once: leave out --job-name and --after")
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
        print(as_text(results))
    leave(1 if has_problem(results) else 0)


@app.command()
def explain(
    target: Annotated[
        str, typer.Argument(metavar="LOGFILE_OR_RUN", help="Log file, run directory, name of a run, or job id.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Explain why a run failed by the messages in its logs. Logs of other programs can be explained too.

    Example: hpc-rl explain slurm-123.out
    """
    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs.status import find_run, status_of

    if Path(target).is_file():
        state, found = None, diagnosis.explain_file(Path(target))
    else:
        run = find_run(target)
        status = status_of(run)
        state, found = status.state, diagnosis.explain_run(run, status)
    if as_json:
        findings = [one.as_dict() for one in found.findings]
        known = {"last_message": found.verdict, "findings": findings, "last_errors": found.last_errors}
        print(json.dumps({"state": state, **known}, indent=2))
        return
    if state is not None and state not in diagnosis.FAILED:
        print(f"run {target} has not failed: its state is {state}")
    if text := explanation_text(found):
        print(text)
