"""`site`: the cluster's profile, and what holds of it here."""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_rl.cli.app import JsonOption, SiteOption, app, note
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from hpc_rl.sites.profile import Profile
    from hpc_rl.sites.proposal import Facts
    from hpc_rl.slurm.cluster import Partition

site_app = typer.Typer(
    help="The cluster's profile: write one, and see which line comes from where.\n\nExample: hpc-rl site show",
    no_args_is_help=True,
)
app.add_typer(site_app, name="site")


@site_app.command()
def show(site: SiteOption = None, as_json: JsonOption = False) -> None:
    """Show the profile that holds in this folder: each key, its value, and the line that it comes from.

    Example: hpc-rl site show
    """
    from hpc_rl.sites.profile import load_profile

    profile = load_profile(site)
    print(_as_json(profile) if as_json else _as_text(profile))


@site_app.command()
def detect(
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take what is likely.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a profile that is there.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write; ~/.config/hpc-rl/site.yaml where not given.")
    ] = None,
) -> None:
    """Look at the cluster from its login node, and write a commented profile for it.

    Example: hpc-rl site detect --yes --out site.yaml
    """
    from hpc_rl.sites import detection as login_node
    from hpc_rl.sites.profile import USER
    from hpc_rl.sites.proposal import choose_accounts, choose_partitions, propose

    path = out or USER.expanduser()
    login_node.check_writable(path, force)
    facts = login_node.look()
    partitions = choose_partitions(facts)
    if not partitions:
        raise UserError("Slurm has no partition that is up and that your accounts and groups may use")
    partition = partitions[0] if yes else _ask_partition(partitions)
    accounts = choose_accounts(facts, partition)
    account = _only(accounts, partition) if yes else _ask_account(accounts)
    _warn(facts, accounts)
    login_node.write(path, propose(facts, partition, account, date.today().isoformat()), force)
    print(f"wrote {path}: partition {partition.name}, {f'account {account}' if account else 'no account named'}")
    print("  hpc-rl site show\n  hpc-rl doctor")


def _only(accounts: list[str], partition: Partition) -> str | None:
    """The account to name without asking: one of those that the partition insists on, or the only one.

    Where there are several, Slurm's default for this user is best.
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
        raise UserError(f"which {what}, {', '.join(choices)}? There is no terminal to ask: --yes takes {likely}")
    while True:
        answer: str = typer.prompt(f"{what} ({', '.join(choices)})", default=likely, err=True)
        if answer in choices:
            return answer
        note(f"{answer!r} is none of them")


def _warn(facts: Facts, accounts: list[str]) -> None:
    if facts.needs_account and not accounts:
        note("Slurm shows no account of yours, and takes no job without one: ask who administers the cluster")


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
