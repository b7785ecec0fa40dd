"""The commands `eval` and `chat`: what a model can do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpc_rl.cli.app import app, continue_in_job_python
from hpc_rl.cli.completion import run_names
from hpc_rl.cli.submit import (
    DryRunOption,
    FollowOption,
    ForceOption,
    InAllocationOption,
    LocalOption,
    RunDirOption,
    SlurmFlags,
    WaitOption,
    carry_out,
    with_slurm_flags,
)
from hpc_rl.errors import UserError

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN_OR_MODEL",
        help="A run with an exported model (directory, name or job id), a model folder, or a name on the hub.",
        autocompletion=run_names,
    ),
]


@app.command("eval")
@with_slurm_flags
def evaluate(
    model: ModelArgument,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="data=FILE[,FILE...], and options of the job.", show_default=False),
    ] = None,
    *,
    flags: SlurmFlags,
    run_dir: RunDirOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    wait: WaitOption = False,
    follow: FollowOption = False,
    local: LocalOption = False,
    in_allocation: InAllocationOption = False,
) -> None:
    """Score a model on data sets: mean score, pass@k and maj@k with confidence intervals, in eval.json of a new run.

    The same as hpc-rl submit eval model.path=MODEL data.files=[FILE,...].

    Example: hpc-rl eval sft-1 data=test.jsonl reward.function=gsm8k rollout.n=8 --follow
    """
    from hpc_rl.runs.models import model_of
    from hpc_rl.submission.request import JobRequest

    words = [_data_files(word) for word in arguments or []]
    if set_twice := [word for word in words if word.startswith("model.path=")]:
        raise UserError(f"{set_twice[0]}: the model is the first argument, {model}: leave model.path out")
    settings = {**flags.settings(), "model.path": model_of(model, may_come=flags.after is not None)}
    request = JobRequest(
        kind="eval",
        overrides=tuple(words),
        settings=settings,
        after=flags.after,
        run_dir=run_dir,
        site=flags.site,
        local=local,
        force=force,
        command=tuple(sys.argv),
    )
    carry_out(request, dry_run=dry_run, wait=wait, follow=follow, in_allocation=in_allocation)


@app.command()
def chat(
    model: ModelArgument,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most probable token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed.", show_default=False)] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that comes with the model.")
    ] = False,
) -> None:
    """Chat with a model in this terminal, on a GPU of this machine or on its CPUs.

    /reset begins a new conversation. /exit, Ctrl-D or Ctrl-C ends the program.

    Example: hpc-rl chat sft-1 --temperature 0
    """
    from hpc_rl.formats.model_kind import architectures_of, is_classifier
    from hpc_rl.runs.models import model_of

    name = model_of(model)
    if not Path(name).exists() and name.startswith(("/", ".", "~")):
        raise UserError(f"{name}: there is no such run or model folder")
    if is_classifier(found := architectures_of(Path(name))):
        raise UserError(
            f"{name} is a classifier ({found[0]}), such as a reward model, and cannot answer: name a language model"
        )
    continue_in_job_python("chat", ("torch", "transformers"))
    command = [
        sys.executable,
        "-P",
        "-m",
        "hpc_rl.probes.chat",
        name,
        f"--temperature={temperature}",
        f"--max-tokens={max_tokens}",
    ]
    sys.stdout.flush()
    command += ["--trust-remote-code"] if trust_remote_code else []
    os.execv(sys.executable, [*command, *([] if seed is None else [f"--seed={seed}"])])


def _data_files(word: str) -> str:
    """Return data.files=[A,B] for data=A,B; other words unchanged."""
    key, _, value = word.partition("=")
    if key != "data":
        return word
    files = [name for name in value.split(",") if name]
    if not files:
        raise UserError(f"{word}: name at least one data file: data=FILE[,FILE...]")
    return f"data.files={files[0]}" if len(files) == 1 else "data.files=[{}]".format(",".join(map(_quoted, files)))


def _quoted(name: str) -> str:
    """Quote a text for Hydra's grammar."""
    return "'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'"
