"""`init`: a starter project in which `hpc-rl submit sft` and `hpc-rl submit ppo` work as they are typed."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Annotated

import typer

from hpc_rl.cli.app import app
from hpc_rl.errors import UserError

FILES = {
    "README.md": "README.md",
    "sft.yaml": "configs/sft.yaml",
    "ppo.yaml": "configs/ppo.yaml",
    "rewards.py": "rewards.py",
}
"""File in `starter` -> where it goes."""
ROWS = {"train": 2000, "val": 100}
_STARTER = Path(__file__).with_name("starter")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the project; it may exist.", show_default=False)] = Path(),
    model: Annotated[str, typer.Option(help="Model to train: a folder, or a name on the hub.")] = (
        "Qwen/Qwen2.5-0.5B-Instruct"
    ),
) -> None:
    """Write a starter project: options, a reward function, a small data set and a README.

    Example: hpc-rl init my-project
    """
    from hpc_rl.data.arithmetic import generate

    if Path(model).is_dir():
        model = str(Path(model).absolute())
    targets = [folder / target for target in (*FILES.values(), "data/train.jsonl", "data/val.jsonl")]
    if existing := [str(target) for target in targets if target.exists()]:
        raise UserError(f"{', '.join(existing)} exists already, and init replaces no file: choose another folder")
    try:
        for source, target in FILES.items():
            text = Template((_STARTER / source).read_text()).safe_substitute(model=model)
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).write_text(text)
        generate(folder / "data", ROWS["train"], ROWS["val"])
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    steps = [] if folder == Path() else [f"cd {folder}"]
    if not Path(model).is_dir():
        steps.append(f"hpc-rl fetch {model}")
    steps += ["hpc-rl submit sft --nodes 2", "hpc-rl submit ppo --nodes 4"]
    print("\n".join(["wrote " + ", ".join(map(str, targets)), "next:", *(f"  {step}" for step in steps)]))
