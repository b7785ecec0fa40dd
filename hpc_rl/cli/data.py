"""The commands `data`, `fetch` and `wandb`: data sets, downloads and uploads on the login node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hpc_rl.cli.app import RunArgument, SiteOption, app, continue_in_job_python, leave, one_of, path
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted

data_app = typer.Typer(
    help="Prepare and check data sets.\n\nExample: hpc-rl data arithmetic --out data/sums",
    no_args_is_help=True,
)

app.add_typer(data_app, name="data")


_UNREAD: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "rm": {},
    "distill": {"teacher.path": "teacher"},
    "ppo": {
        "reward.function": "exact",
        "reward.functions": [],
        "reward.weights": [],
        "reward.model": None,
        "reward.url": None,
    },
}
"""Kind of job -> values of required options that `check` does not read, so that a file can be checked before they are
chosen."""


@data_app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Data file: .jsonl, .json, .csv, .tsv or .parquet.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options of the job, such as data.prompt_key=question."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose tokenizer and chat template are used: a run, a folder, or a name on the hub. "
            "The default is model.path of the configuration.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Job that will read the file: sft, dpo, rm, distill or ppo. ppo shows the prompt; the others show the "
            "tokens, and which carry loss.",
            **one_of("kind", list(_UNREAD)),
        ),
    ] = "sft",
    row: Annotated[int, typer.Option(min=1, help="Row to show, counted from 1.")] = 1,
    site: SiteOption = None,
) -> None:
    """Check all rows of a data file, and show how one row is tokenized and which tokens carry loss.

    Example: hpc-rl data check train.jsonl --model Qwen/Qwen2.5-0.5B data.max_length=2048
    """
    from hpc_rl.config.compose import compose, compose_partly
    from hpc_rl.config.rl.ppo import PpoConfig
    from hpc_rl.config.training.finetune import FinetuneConfig
    from hpc_rl.data.reading.check import check_data, check_rows
    from hpc_rl.formats.model_families import refuse_family
    from hpc_rl.plan.memory import computed_here
    from hpc_rl.runs.models import model_for
    from hpc_rl.sites.profile import load_profile
    from hpc_rl.submission.hub import hub_cache
    from hpc_rl.system.files import read_json

    profile = load_profile(site).values
    model = model and model_for("--model", model, may_come=False)
    has_model = model is not None or "model.path" not in compose_partly(kind, overrides or [], profile)[1]
    settings = {"data.train_files": [file], **({} if model is None and has_model else {"model.path": model or "none"})}
    config = compose(kind, overrides or [], {**settings, **_UNREAD[kind]}, profile)
    assert isinstance(config, FinetuneConfig | PpoConfig)
    if not has_model:
        print("\n".join(check_rows(file, config.data)))
        print("To see a row as tokens, name a model: --model FOLDER_OR_NAME")
        return
    if config.slurm.python is not None and Path(config.slurm.python).exists():
        continue_in_job_python("data check", ("transformers",), config.slurm.python)
    name = config.model.tokenizer_path or config.model.path
    folder = Path(name).expanduser() if Path(name).expanduser().is_dir() else hub_cache(config).model_folder(name)
    if folder is not None and config.model.tokenizer_path is None:
        found = read_json(folder / "config.json", named=True)
        refuse_family("model.path", name, found, computed_here(config)["model.path"], config.trainer.packing)
    for line in check_data(file, row, config.data, config.model, folder):
        print(line)


@data_app.command()
def convert(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Data file, or the name of a data set on the hub (its train split).")
    ],
    output: Annotated[Path, typer.Option(parser=path, help="File to write: jsonl.")],
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help="Shape of the rows, such as sharegpt or alpaca. By default, the first row determines it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Convert a data set to rows that training reads without further options.

    It reads the shapes of ShareGPT, Alpaca, HH, KTO, UltraFeedback, prompt and completion, OpenAI's preferences and
    verl's files for RL. Every row that is written has been checked.

    Example: hpc-rl data convert sharegpt.json --output train.jsonl
    """
    from hpc_rl.data.reading.convert import convert as convert_rows
    from hpc_rl.data.reading.shapes import SHAPES

    if shape is not None and shape not in SHAPES:
        raise UserError(f"--shape {shape}: choose one of {', '.join(SHAPES)}")
    found = convert_rows(file, output, shape)
    lost = f"; left out, because there is nothing to learn from: {found.left_out:,}" if found.left_out else ""
    print(f"{output}: {counted(found.rows, 'row')} of the shape {found.name}{lost}")
    options = " ".join(filter(None, [found.shape.kind, f"data.train_files={output}", found.shape.options]))
    print(f"To train: hpc-rl submit {options}")


@data_app.command()
def gsm8k(
    source: Annotated[
        str,
        typer.Option(help="Source of GSM8K: a folder, a data file, or the name of a data set on the hub."),
    ],
    out: Annotated[Path, typer.Option(parser=path, help="Folder for train.jsonl and test.jsonl.")],
) -> None:
    """Write GSM8K, grade-school mathematics (Cobbe et al. 2021), as chat messages.

    Example: hpc-rl data gsm8k --source openai/gsm8k:main --out data/gsm8k
    """
    from hpc_rl.data.gsm8k import prepare
    from hpc_rl.data.reading.formats import is_file

    if not Path(source).expanduser().is_dir() and not is_file(source):
        continue_in_job_python("data gsm8k", ("datasets",))
    elif source.endswith(".parquet"):
        continue_in_job_python("data gsm8k", ("pyarrow",))
    _print_counts(out, prepare(source, out))


@data_app.command()
def arithmetic(
    out: Annotated[Path, typer.Option(parser=path, help="Folder for train.jsonl and val.jsonl.")],
    train: Annotated[int, typer.Option(min=1, help="Number of training questions.")] = 4000,
    val: Annotated[int, typer.Option(min=1, help="Number of validation questions.")] = 200,
    seed: Annotated[int, typer.Option(help="Random seed for choosing the questions.")] = 0,
    careless: Annotated[
        float,
        typer.Option(min=0, max=1, help="Fraction of the training answers that are wrong because a carry is omitted."),
    ] = 0.0,
    calls: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Add the column demonstration: chats that call a tool (this fraction) or give up (the others).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write additions as chat messages: a data set that a small model learns on a laptop.

    Example: hpc-rl data arithmetic --out data/sums --train 4000
    """
    from hpc_rl.data.arithmetic import generate

    _print_counts(out, generate(out, train, val, seed, careless, calls))


@data_app.command("select")
def select_rows(
    responses: Annotated[
        list[str], typer.Argument(metavar="RESPONSES", help="Files of scored responses (responses.jsonl of a run).")
    ],
    output: Annotated[Path, typer.Option(parser=path, help="File to write: jsonl.")],
    best_of_n: Annotated[
        bool, typer.Option("--best-of-n", help="The best response to each prompt, as chats for sft.")
    ] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="The best and the worst response to each prompt, as pairs for dpo and rm.")
    ] = False,
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="All pairs of responses with different scores, for rm.")
    ] = False,
    threshold: Annotated[
        float | None,
        typer.Option(help="All responses with at least this score, as chats for sft.", show_default=False),
    ] = None,
) -> None:
    """Select training data from scored responses.

    Duplicates, pairs with equal scores and responses whose reward failed are left out, and counted.

    Example: hpc-rl data select runs/generate-1/responses.jsonl --best-of-n --output best.jsonl
    """
    from hpc_rl.data.selection import select

    asked = {"best-of-n": best_of_n, "pairs": pairs, "all-pairs": all_pairs, "threshold": threshold is not None}
    methods = [name for name, is_asked in asked.items() if is_asked]
    if len(methods) != 1:
        raise UserError(
            f"choose exactly one of --best-of-n, --pairs, --all-pairs and --threshold, found {len(methods)}"
        )
    print(f"{output}: {select(responses, methods[0], threshold, output)}")


def _print_counts(out: Path, counts: dict[str, int]) -> None:
    for name, rows in counts.items():
        print(f"{out / name}.jsonl: {counted(rows, 'row')}")


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

    Write NAME:CONFIGURATION for a data set that has several configurations.
    Jobs with cache.offline=true can then run without internet access.

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
    from hpc_rl.runs.finding import find_run
    from hpc_rl.tracking.wandb_sync import sync as sync_run

    sync_run(find_run(run))
