"""`fetch` and `wandb`: downloads and uploads on the login node, for compute nodes without internet."""

from __future__ import annotations

from typing import Annotated

import typer

from hpc_rl.cli.app import RunArgument, SiteOption, app, leave
from hpc_rl.errors import UserError

wandb_app = typer.Typer(
    help="Upload runs to Weights & Biases.\n\nExample: hpc-rl wandb sync sft-1",
    no_args_is_help=True,
)


@app.command()
def fetch(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="Models or data sets on the hub, and options (KEY=VALUE).")
    ],
    site: SiteOption = None,
) -> None:
    """Download models and data sets into the Hugging Face cache, on the login node.

    Write NAME:CONFIGURATION for a data set that has several configurations. Afterwards jobs need no internet access
    (cache.offline=true).

    Example: hpc-rl fetch Qwen/Qwen2.5-0.5B openai/gsm8k:main cache.hf_home=/scratch/me/hf
    """
    from hpc_rl.config.compose import compose
    from hpc_rl.sites.profile import load_profile
    from hpc_rl.submission.hub import fetch as fetch_names

    overrides = [word for word in names if "=" in word]
    to_fetch = [word for word in names if "=" not in word]
    if not to_fetch:
        raise UserError("no model or data set is named: hpc-rl fetch Qwen/Qwen2.5-0.5B")
    leave(fetch_names(to_fetch, compose("torchrun", overrides, site=load_profile(site).values)))


app.add_typer(wandb_app, name="wandb")


@wandb_app.command()
def sync(run: RunArgument) -> None:
    """Upload the data that a run wrote offline to Weights & Biases, from the login node.

    All attempts of a run appear as one run there.

    Example: hpc-rl wandb sync sft-1
    """
    from hpc_rl.runs.status import find_run
    from hpc_rl.tracking.wandb_sync import sync as sync_run

    sync_run(find_run(run))
