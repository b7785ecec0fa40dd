"""Everything that the login node can know to be wrong, before anything is queued."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpc_rl.config.roles import engine_name
from hpc_rl.config.schema import (
    DataConfig,
    JobConfig,
    ModelConfig,
    PpoConfig,
    PromptDataConfig,
    RayJobConfig,
    SftConfig,
)
from hpc_rl.data.rows import CannotCheck, check_file, check_prompts, is_file
from hpc_rl.errors import UserError
from hpc_rl.launch.container import runtimes
from hpc_rl.launch.render import Job
from hpc_rl.launch.sif import check_image
from hpc_rl.ray_version import check_ray, installed_ray
from hpc_rl.rewards.check import check_function, check_url
from hpc_rl.slurm import commands

_OTHER_DATA = (".arrow", ".csv", ".gz", ".tsv", ".txt", ".zip", ".zst")
MAX_ROWS = 10_000
"""Rows of a data file that are looked at here; the job itself looks at all of them."""


def check(job: Job) -> list[str]:
    """Check all that the job needs.

    Returns:
        Notes: what could not be checked here and will be at the start of the job.

    Raises:
        UserError: all problems, a line each.
    """
    checks: list[Callable[[], str | None]] = [partial(check_run_dir, job.run_dir.path)]
    if job.after is not None:
        checks.append(partial(check_after, job.after))
    config = job.config
    checks += _container_checks(config)
    same_python = config.slurm.python is None and config.container.image is None
    if isinstance(config, RayJobConfig) and same_python:
        checks.append(partial(check_ray, installed_ray(), sys.executable))
    if isinstance(config, SftConfig | PpoConfig):
        checks += _model_checks(config)
    if isinstance(config, PpoConfig):
        checks += _ppo_checks(config, same_python)
    if job.kind in PROGRAM_CHECKS:
        checks.append(partial(PROGRAM_CHECKS[job.kind], job.program))
    problems, notes = [], []
    for one in checks:
        try:
            if note := one():
                notes.append(note)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return notes


def _container_checks(config: JobConfig) -> list[Callable[[], str | None]]:
    container = config.container
    if container.image is None:
        return []
    if container.runtime == "pyxis":
        return [partial(check_pyxis, container.image)]
    return [
        partial(check_image, Path(container.image).absolute(), container.arch),
        partial(check_binds, container.binds),
        partial(check_runtime, runtimes(container)),
    ]


def _model_checks(config: SftConfig | PpoConfig) -> list[Callable[[], str | None]]:
    model, data = config.model, config.data
    checks: list[Callable[[], str | None]] = [
        partial(check_model, model),
        partial(check_chat_template, model, data),
    ]
    return checks + [partial(check_data, file, data) for file in [*data.train_files, *data.val_files]]


def _ppo_checks(config: PpoConfig, same_python: bool) -> list[Callable[[], str | None]]:
    checks: list[Callable[[], str | None]] = []
    reward = config.reward
    if reward.function is not None:
        checks.append(partial(check_function, reward.function, reward.kwargs, same_python=same_python))
    if reward.url is not None:
        checks.append(partial(check_url, reward.url))
    for key, path in {"reward.model": reward.model, "critic.path": config.critic.path}.items():
        if path is not None:
            checks.append(partial(check_model_path, key, path))
    if same_python and engine_name(config) == "vllm":
        checks.append(partial(check_vllm, config.rollout.name))
    return checks


def check_vllm(asked: str) -> None:
    if importlib.util.find_spec("vllm") is None:
        meant = "rollout.name=vllm" if asked == "vllm" else f"rollout.name={asked} is vllm on GPUs"
        raise UserError(f"{meant}, and {sys.executable} has no vllm: install it, or use rollout.name=hf")


def check_run_dir(path: Path) -> None:
    """It is empty or a run of ours, and writable; where it does not exist, the nearest folder above it is."""
    existing = next(folder for folder in [path, *path.parents] if folder.exists())
    if not existing.is_dir():
        raise UserError(f"run directory {path}: {existing} is a file")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(f"run directory {path} is not writable: {existing}: {error.strerror}") from error


def check_after(job_id: str) -> str | None:
    """A job after one that has failed, or that never was, would wait for ever or not at all."""
    if not commands.available():
        return f"job {job_id} is looked up when the script is submitted"
    try:
        state = commands.job_state(job_id)
    except commands.NoAnswer as error:
        raise UserError(f"--after {job_id}: {error}") from error
    if state is None:
        raise UserError(f"--after {job_id}: Slurm does not know this job")
    if state.ended and state.state != "COMPLETED":
        raise UserError(f"--after {job_id}: this job is {state.state}, so a job after it would never start")
    return None


def check_data(file: str, data: DataConfig | PromptDataConfig) -> str | None:
    if not is_file(file):
        if Path(file).is_dir():
            return f"data folder {file} is read when the job starts"
        if file.startswith(("/", ".")) or Path(file).suffix in _OTHER_DATA:
            raise UserError(f"{file}: no such folder, and no .jsonl or .parquet file")
        return f"data set {file} is a name on the hub: it is looked up when the job starts"
    try:
        if isinstance(data, PromptDataConfig):
            check_prompts(file, data, MAX_ROWS)
        else:
            check_file(file, data, MAX_ROWS)
    except CannotCheck as error:
        return f"{file} is checked when the job starts ({error})"
    return None


def check_pyxis(image: str) -> str | None:
    """A file or a name in a registry, which srun's plugin reads."""
    if image.startswith(("/", ".")) and not Path(image).exists():
        raise UserError(f"image {image}: no such file")
    return None if Path(image).exists() else f"image {image} is fetched from its registry when the job starts"


def check_binds(binds: list[str]) -> str | None:
    unseen = [source for source in (bind.partition(":")[0] for bind in binds) if not Path(source).exists()]
    return f"not on this machine, and needed on the nodes: {', '.join(unseen)} (container.binds)" if unseen else None


def check_runtime(programs: list[str]) -> str | None:
    if any(shutil.which(name) for name in programs):
        return None
    return f"no {' and no '.join(programs)} on PATH here: whether the nodes have one is seen when the job starts"


def check_model(model: ModelConfig) -> str | None:
    return check_model_path("model.path", model.path)


def check_model_path(key: str, path: str) -> str | None:
    """A folder must hold a Hugging Face model; a name is left to the job's start."""
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path):
            raise UserError(f"{key} {path}: no such folder, and no name of a model on the hub")
        return f"model {path} is a name on the hub: it is looked up when the job starts"
    config = folder / "config.json"
    if "model_type" not in _json_object(config):
        raise UserError(f"{key} {path} is no Hugging Face model: no config.json with a model_type in it")
    if not any([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        raise UserError(f"{key} {path} has no weights (*.safetensors or *.bin)")
    return None


def check_chat_template(model: ModelConfig, data: DataConfig | PromptDataConfig) -> None:
    if data.chat_template is not None:
        if not Path(data.chat_template).is_file():
            raise UserError(f"data.chat_template {data.chat_template}: no such file")
        return
    folder = Path(model.tokenizer_path or model.path)
    if not folder.is_dir():
        return
    settings = folder / "tokenizer_config.json"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(f"{folder} has no tokenizer; set model.tokenizer_path")
    if not _json_object(settings).get("chat_template") and not any(folder.glob("chat_template.*")):
        raise UserError(f"the tokenizer in {folder} has no chat template; set data.chat_template to a Jinja file")


def check_torchrun_program(program: tuple[str, ...]) -> None:
    """What `submit torchrun -- ...` was given: a script, or -m and a module."""
    if not program:
        raise UserError("no program given: hpc-rl submit torchrun --nodes 2 -- train.py --lr 1e-4")
    if program[0] == "-m":
        if len(program) < 2:
            raise UserError("-m needs the name of a module: hpc-rl submit torchrun -- -m my.module")
        return
    if re.fullmatch(r"(.*/)?(python[\d.]*|torchrun|accelerate)", program[0]):
        raise UserError(f"leave out {program[0]}: the job starts torchrun itself; write -- train.py --lr 1e-4")
    if not Path(program[0]).is_file():
        raise UserError(f"program {program[0]}: no such file in {Path.cwd()}")


def check_ray_program(program: tuple[str, ...]) -> str | None:
    """What `submit ray -- ...` was given: any command, such as python and a script."""
    if not program:
        raise UserError("no program given: hpc-rl submit ray --nodes 2 -- python my_driver.py")
    command = Path(program[0])
    if program[0].endswith(".py") and not os.access(command, os.X_OK):
        raise UserError(f"program {program[0]} cannot be started by itself: write -- python {shlex.join(program)}")
    if re.fullmatch(r"(.*/)?python[\d.]*", program[0]):
        script = next((word for word in program[1:] if not word.startswith("-")), None)
        if script == program[1] and not Path(script).exists():
            raise UserError(f"program {script}: no such file in {Path.cwd()}")
        return None
    if "/" in program[0] and not command.is_file():
        raise UserError(f"program {program[0]}: no such file")
    if "/" not in program[0] and shutil.which(program[0]) is None:
        return f"program {program[0]} is looked up when the job starts: it is not on PATH here"
    return None


PROGRAM_CHECKS: dict[str, Callable[[tuple[str, ...]], str | None]] = {
    "torchrun": check_torchrun_program,
    "ray": check_ray_program,
}
"""Job kinds that run the user's own program."""


def _json_object(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
