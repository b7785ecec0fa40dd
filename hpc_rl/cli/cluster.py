"""Commands about the cluster: doctor, explain and site."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_rl.cli.app import JsonOption, SiteOption, app, leave, note, path
from hpc_rl.cli.submit import SlurmFlags, with_slurm_flags
from hpc_rl.cli.text import explanation_text
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from hpc_rl.sites.choice import Choice
    from hpc_rl.sites.profile import Profile
    from hpc_rl.slurm.cluster import Partition


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
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Also run every part of training once on these nodes, with small models. Needs --on-nodes.",
        ),
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            parser=path, help="Run directory to check. The default is a new one below ./runs.", show_default=False
        ),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Check only this machine, without Slurm.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check for anything that would prevent jobs from running. The exit code is 1 if there is a problem.

    Example: hpc-rl doctor --on-nodes 2 --partition gpu
    """
    from hpc_rl.doctor.checks import as_text, has_problem
    from hpc_rl.doctor.job import Findings, doctor_config, doctor_job, run_on_nodes
    from hpc_rl.doctor.login import container_checks, folder_checks, internet_checks, python_checks, slurm_checks
    from hpc_rl.submission import queue
    from hpc_rl.submission.script.environment import job_environment

    if flags.job_name or flags.after:
        raise UserError(
            "the job of `doctor` has a fixed name and does not wait for other jobs: leave out --job-name and --after"
        )
    if train and on_nodes is None:
        raise UserError("--train runs on the nodes of a job: add --on-nodes N (and --local for this machine)")
    if on_nodes is None:
        config = doctor_config(overrides or [], flags.settings(), flags.site)
        slurm = [] if local else slurm_checks(config.slurm)
        hf_home = job_environment(config).get("HF_HOME")
        folder = folder_checks((run_dir or Path("runs")).absolute(), hf_home)
        python = container_checks(config) if config.container.image else python_checks(config.slurm.python)
        found = Findings([*slurm, *folder, *python, *internet_checks()])
    else:
        if not local:
            queue.require_slurm()
        job = doctor_job(on_nodes, overrides or [], flags.settings(), run_dir, flags.site, local=local, trains=train)
        found = run_on_nodes(job, local, note)
    if as_json:
        print(json.dumps([check.as_dict() for check in found.everything], indent=2))
    else:
        print("\n\n".join(filter(None, [as_text(found.checks), found.report or as_text(found.training)])))
    if found.report:
        _record(found.report, job.run_dir.path)
    leave(1 if has_problem(found.everything) else 0)


def _record(report: str, run: Path) -> None:
    """Write the result of the training checks to the site profile and to a page for bug reports. If a file cannot be
    written, only a message tells so."""
    from hpc_rl.doctor.training import write_page
    from hpc_rl.sites.record import write_record

    writers: dict[str, Callable[[], Path]] = {
        "the result is in": partial(write_record, report),
        "a page for bug reports, without names and folders, is": partial(write_page, report, run),
    }
    for words, write in writers.items():
        try:
            note(f"{words} {write()}")
        except UserError as error:
            note(str(error))


@app.command()
def explain(
    target: Annotated[
        str, typer.Argument(metavar="LOGFILE_OR_RUN", help="Log file, run directory, name of a run, or job id.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Explain why a run failed, based on the messages in its logs. The logs of other programs can be explained too.

    Example: hpc-rl explain slurm-123.out
    """
    from hpc_rl.doctor import diagnosis
    from hpc_rl.runs.finding import find_run
    from hpc_rl.runs.status import CANCELLED, status_of
    from hpc_rl.slurm.states import never_starts

    if Path(target).is_file():
        state, never, found = None, None, diagnosis.explain_file(Path(target))
    else:
        run = find_run(target)
        status = status_of(run)
        state, found = status.state, diagnosis.explain_run(run, status)
        never = f"{status.reason}: {why}" if state == "PENDING" and (why := never_starts(status.reason)) else None
        by = f" {status.reason}" if state == CANCELLED and status.reason else ""
    if as_json:
        findings = [one.as_dict() for one in found.findings]
        known = {"last_message": found.verdict, "findings": findings}
        last = {"last_errors": found.last_errors, "last_lines": found.last_lines}
        further = {"launch_error": found.launch_error, "plan": found.plan}
        print(json.dumps({"state": state, **known, **last, **further}, indent=2))
        return
    has_not_failed = state is not None and state not in diagnosis.FAILED
    if has_not_failed:
        said = f"it was cancelled{by}" if state == CANCELLED else f"its state is {state}"
        print(f"run {target} has not failed: {said}")
        if never:
            print(f"it will not start by waiting: {never}")
    if text := explanation_text(found, brief=has_not_failed):
        print(text)


site_app = typer.Typer(
    help="Show the profile of the cluster, or write one.\n\nExample: hpc-rl site show",
    no_args_is_help=True,
)

app.add_typer(site_app, name="site")


@site_app.command()
def show(site: SiteOption = None, as_json: JsonOption = False) -> None:
    """Show the profile that applies in this folder: each key, its value, and the file and line that set it.

    Example: hpc-rl site show
    """
    from hpc_rl.sites.profile import load_profile

    profile = load_profile(site)
    print(_as_json(profile) if as_json else _as_text(profile))


@site_app.command()
def detect(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; use the most likely partition and account.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing profile.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE", help="File to write. The default is ~/.config/hpc-rl/site.yaml."),
    ] = None,
) -> None:
    """Detect the cluster from its login node and write a commented profile.

    Example: hpc-rl site detect --yes --out site.yaml
    """
    from hpc_rl.sites import detection as login_node
    from hpc_rl.sites.choice import search
    from hpc_rl.sites.profile import USER
    from hpc_rl.sites.proposal import choose_accounts, choose_partitions, dimensions, first_choice, propose
    from hpc_rl.slurm.commands import NoAnswer
    from hpc_rl.submission.executor import limited_trials

    path = out or USER.expanduser()
    login_node.check_writable(path, force)
    facts = login_node.look()
    partitions = choose_partitions(facts)
    if not partitions:
        raise UserError(
            "Slurm has no partition that is up and open to your accounts and groups; ask the cluster's administrators"
        )
    today, refusal = date.today().isoformat(), limited_trials()

    def tried(partition: Partition, account: str | None, is_account_fixed: bool) -> tuple[Choice, str | None]:
        first = first_choice(facts, partition, account)
        options = dimensions(facts, partition, first, is_account_fixed)
        try:
            return search(first, options, lambda one: refusal(propose(facts, partition, one, today)))
        except NoAnswer as error:
            note(f"the profile has not been tried: {error}")
            return first, None

    partition = partitions[0] if yes else _ask_partition(partitions)
    accounts = choose_accounts(facts, partition)
    account = _only(accounts, partition) if yes else _ask_account(accounts)
    if facts.needs_account and not accounts:
        note("Slurm rejects jobs without an account, but lists none for you: ask the cluster's administrators")
    choice, refused = tried(partition, account, is_account_fixed=not yes and len(accounts) > 1)
    for other in partitions if yes and refused else []:
        if other == partition:
            continue
        found, still_refused = tried(other, _only(choose_accounts(facts, other), other), is_account_fixed=False)
        if still_refused is None:
            note(f"sbatch refuses all test jobs in partition {partition.name}, so {other.name} is proposed: {refused}")
            partition, choice, refused = other, found, None
            break
    login_node.write(path, propose(facts, partition, choice, today, refused), force)
    charged = f"account {choice.account}" if choice.account else "default account"
    print(f"wrote {path}: partition {partition.name}, {charged}")
    if refused:
        note(
            f"sbatch refuses a test job with this profile: {refused}; edit {path} as your cluster's documentation says"
        )
    print("  hpc-rl site show\n  hpc-rl doctor")


def _only(accounts: list[str], partition: Partition) -> str | None:
    """Return the account to use without asking: the only one, or the first that the partition allows.

    If there are several and the partition does not restrict them, Slurm's default is best.
    """
    return accounts[0] if len(accounts) == 1 or (accounts and partition.accounts is not None) else None


def _ask_partition(partitions: list[Partition]) -> Partition:
    by_name = {one.name: one for one in partitions}
    if len(by_name) == 1:
        return partitions[0]
    return by_name[_ask("partition", list(by_name), partitions[0].name)]


def _ask_account(accounts: list[str]) -> str | None:
    if len(accounts) < 2:
        return accounts[0] if accounts else None
    return _ask("account", accounts, accounts[0])


def _ask(what: str, choices: list[str], likely: str) -> str:
    if not sys.stdin.isatty():
        raise UserError(
            f"choose a {what} ({', '.join(choices)}): this needs a terminal; without one, --yes chooses {likely}"
        )
    while True:
        answer: str = typer.prompt(f"{what} ({', '.join(choices)})", default=likely, err=True)
        if answer in choices:
            return answer
        note(f"{answer!r} is not in the list")


def _as_text(profile: Profile) -> str:
    from hpc_rl.sites.profile import short

    rows = [(key, _shown(value), str(profile.origins[key])) for key, value in profile.values.items()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for key, value, origin in sorted(rows)]
    layers = [f"# {one.name}: {short(one.file)}{'' if one.found else ' (none)'}" for one in profile.layers]
    return "\n".join([*layers, *lines])


def _as_json(profile: Profile) -> str:
    layers = [{"name": one.name, "file": str(one.file), "found": one.found} for one in profile.layers]
    values = {
        key: {"value": value, "file": str(profile.origins[key].file), "line": profile.origins[key].line}
        for key, value in profile.values.items()
    }
    return json.dumps({"layers": layers, "values": values}, indent=2)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
