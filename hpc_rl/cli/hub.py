"""`fetch` and `wandb`: what a login node downloads and uploads for compute nodes without internet."""

from __future__ import annotations

from typing import Annotated

import typer

from hpc_rl.cli.app import RunArgument, SiteOption, app, leave
from hpc_rl.errors import UserError

wandb_app = typer.Typer(
    help="Runs in Weights & Biases.\n\nExample: hpc-rl wandb sync sft-1",
    no_args_is_help=True,
)


@app.command()
def fetch(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Models or data sets on the hub, and options (KEY=VALUE).")
    ],
    site: SiteOption = None,
) -> None:
    """Download models and data sets into the cache, on the login node.

    NAME:CONFIGURATION is a data set that has several. Afterwards jobs need no internet (cache.offline=true).

    Example: hpc-rl fetch Qwen/Qwen2.5-0.5B openai/gsm8k:main cache.hf_home=/scratch/me/hf
    """
    from hpc_rl.config.compose import compose
    from hpc_rl.sites.profile import load_profile
    from hpc_rl.submission.hub import fetch as fetch_names

    overrides = [word for word in names if "=" in word]
    wanted = [word for word in names if "=" not in word]
    if not wanted:
        raise UserError("name a model or a data set: hpc-rl fetch Qwen/Qwen2.5-0.5B")
    leave(fetch_names(wanted, compose("torchrun", overrides, site=load_profile(site).values)))


app.add_typer(wandb_app, name="wandb")


@wandb_app.command()
def sync(run: RunArgument) -> None:
    """Upload what a run wrote offline to Weights & Biases, from the login node.

    A run that was stopped and went on is one run there.

    Example: hpc-rl wandb sync sft-1
    """
    from hpc_rl.runs.status import find_run
    from hpc_rl.tracking.wandb_sync import sync as sync_run

    sync_run(find_run(run))
