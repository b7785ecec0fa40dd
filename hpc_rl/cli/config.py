"""`config`: every option, and what a recipe makes of them."""

from __future__ import annotations

import sys
from textwrap import fill, indent
from typing import Annotated

import typer

from hpc_rl.cli.app import JsonOption, KindArgument, SiteOption, app, note


def _print_keys(context: typer.Context, value: bool) -> None:
    """The --help of `config`: its own, and every documented key of the job kind."""
    if not value or context.resilient_parsing:
        return
    from rich.console import Console
    from rich.markup import escape

    from hpc_rl.config.compose import SCHEMAS, documented_keys

    print(context.get_help())
    kinds = [word for word in sys.argv[1:] if word in SCHEMAS]
    console = Console(highlight=False)
    for kind in kinds:
        for key, type_name, default, meaning in documented_keys(SCHEMAS[kind]):
            console.print(
                f"[bold]{key}[/bold] = {escape(default)}  [dim]({escape(type_name)})[/dim]", soft_wrap=True, markup=True
            )
            console.print(indent(fill(meaning, console.width - 5), "    "), markup=False)
    raise typer.Exit()


@app.command(context_settings={"help_option_names": []})
def config(
    kind: KindArgument,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options, as for submit.", show_default=False)
    ] = None,
    site: SiteOption = None,
    as_json: JsonOption = False,
    _help: Annotated[
        bool, typer.Option("-h", "--help", help="Also lists every key.", is_eager=True, callback=_print_keys)
    ] = False,
) -> None:
    """Print the resolved configuration; with --help, every key with type, default and meaning.

    Example: hpc-rl config sft optim.lr=1e-4
    """
    from hpc_rl.config.compose import compose_partly, dump
    from hpc_rl.sites.profile import load_profile

    found, missing = compose_partly(kind.value, overrides or [], load_profile(site).values)
    print(found.model_dump_json(indent=2) if as_json else dump(found), end="\n" if as_json else "")
    if missing:
        note(f"still to be given: {', '.join(missing)}")
