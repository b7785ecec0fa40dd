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

from hpc_rl.config.ppo import PpoConfig, PromptDataConfig, engine_name
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.sft import DataConfig, SftConfig
from hpc_rl.config.training import ModelConfig
from hpc_rl.data.rows import CannotCheck, check_file, check_prompts, is_file
from hpc_rl.errors import UserError
from hpc_rl.host.ray_version import check_ray, installed_ray
from hpc_rl.images.run_options import image_preflight
from hpc_rl.rewards.check import check_function, check_url
from hpc_rl.submit.hub import HubCache, hub_cache
from hpc_rl.submit.partition import partition_checks
from hpc_rl.submit.script import Job

_OTHER_DATA = (".arrow", ".csv", ".gz", ".tsv", ".txt", ".zip", ".zst")
MAX_ROWS = 10_000
"""Rows of a data file that are looked at here; the job itself looks at all of them."""


def check(*jobs: Job, local: bool = False) -> list[str]:
    """Check all that the jobs need; what several of them need, once.

    Args:
        local: it runs on this machine, so that Slurm plays no part.

    Returns:
        Notes: what could not be checked here and will be at the start of the job.

    Raises:
        UserError: all problems, a line each.
    """
    checks = {repr(one): one for job in jobs for one in _checks(job, local)}
    problems, notes = [], []
    for one in checks.values():
        try:
            if note := one():
                notes.append(note)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return notes


def _checks(job: Job, local: bool) -> list[Callable[[], str | None]]:
    checks: list[Callable[[], str | None]] = [partial(check_run_dir, job.run_dir.path)]
    config = job.config
    if not local:
        checks += partition_checks(config)
    checks += image_preflight(config)
    same_python = config.slurm.python is None and config.container.image is None
    if isinstance(config, RayJobConfig) and same_python:
        checks.append(partial(check_ray, installed_ray(), sys.executable))
    if isinstance(config, SftConfig | PpoConfig):
        checks += _model_checks(config, job.after.model if job.after else None)
    if isinstance(config, PpoConfig):
        checks += _ppo_checks(config, same_python)
    if job.kind in PROGRAM_CHECKS:
        checks.append(partial(PROGRAM_CHECKS[job.kind], job.program))
    return checks


def _model_checks(config: SftConfig | PpoConfig, coming: Path | None) -> list[Callable[[], str | None]]:
    model, data, cache = config.model, config.data, hub_cache(config)
    checks: list[Callable[[], str | None]] = [
        partial(check_model, model, coming, cache),
        partial(check_chat_template, model, data, cache),
    ]
    return checks + [partial(check_data, file, data, cache) for file in [*data.train_files, *data.val_files]]


def _ppo_checks(config: PpoConfig, same_python: bool) -> list[Callable[[], str | None]]:
    checks: list[Callable[[], str | None]] = []
    reward = config.reward
    if reward.function is not None:
        checks.append(partial(check_function, reward.function, reward.kwargs, same_python=same_python))
    if reward.url is not None:
        checks.append(partial(check_url, reward.url))
    for key, path in {"reward.model": reward.model, "critic.path": config.critic.path}.items():
        if path is not None:
            checks.append(partial(check_model_path, key, path, hub_cache(config)))
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


def check_data(file: str, data: DataConfig | PromptDataConfig, cache: HubCache) -> str | None:
    if not is_file(file):
        if Path(file).is_dir():
            return f"data folder {file} is read when the job starts"
        if file.startswith(("/", ".")) or Path(file).suffix in _OTHER_DATA:
            raise UserError(f"{file}: no such folder, and no .jsonl or .parquet file")
        if not cache.offline:
            return f"data set {file} is a name on the hub: it is looked up when the job starts"
        if not cache.has_dataset(file):
            raise UserError(_not_cached(f"data set {file}", file, cache.datasets))
        return None
    try:
        if isinstance(data, PromptDataConfig):
            check_prompts(file, data, MAX_ROWS)
        else:
            check_file(file, data, MAX_ROWS)
    except CannotCheck as error:
        return f"{file} is checked when the job starts ({error})"
    return None


def check_model(model: ModelConfig, coming: Path | None, cache: HubCache) -> str | None:
    """A folder or a name on the hub.

    Args:
        coming: the model of a job that this one waits for, which need not be there yet.
    """
    if coming is not None and Path(model.path).absolute() == coming and not coming.exists():
        return f"model {model.path} is what the job before this one exports"
    return check_model_path("model.path", model.path, cache)


def check_model_path(key: str, path: str, cache: HubCache) -> str | None:
    """A folder must hold a Hugging Face model, and so must the cache where it is all that the job has."""
    folder = _model_folder(path, cache)
    if folder is None:
        if Path(path).exists() or not _HUB_NAME.fullmatch(path):
            raise UserError(f"{key} {path}: no such folder, and no name of a model on the hub")
        if cache.offline:
            raise UserError(_not_cached(f"{key} {path}", path, cache.models))
        return f"model {path} is a name on the hub: it is looked up when the job starts"
    remedy = "" if Path(path).is_dir() else f": hpc-rl fetch {path}"
    if "model_type" not in _json_object(folder / "config.json"):
        raise UserError(f"{key} {path} is no Hugging Face model: no config.json with a model_type in it")
    weights = {file.name for kind in ("safetensors", "bin") for file in folder.glob(f"*.{kind}") if file.is_file()}
    if not weights:
        raise UserError(f"{key} {path} has no weights (*.safetensors or *.bin){remedy}")
    named = _json_object(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(named, dict) and (missing := sorted(set(named.values()) - weights)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{key} {path} is incomplete: no {missing[0]}{more} in {folder}{remedy}")
    return None


_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def _model_folder(path: str, cache: HubCache) -> Path | None:
    """The folder that a path or, offline, a name on the hub stands for; None where there is none (yet)."""
    if Path(path).is_dir():
        return Path(path)
    return cache.model_folder(path) if cache.offline and _HUB_NAME.fullmatch(path) else None


def _not_cached(what: str, name: str, where: Path) -> str:
    return f"{what} is not in the cache {where}, and compute nodes are offline (cache.offline): hpc-rl fetch {name}"


def check_chat_template(model: ModelConfig, data: DataConfig | PromptDataConfig, cache: HubCache) -> None:
    if data.chat_template is not None:
        if not Path(data.chat_template).is_file():
            raise UserError(f"data.chat_template {data.chat_template}: no such file")
        return
    name = model.tokenizer_path or model.path
    folder = _model_folder(name, cache)
    if folder is None:
        if cache.offline and model.tokenizer_path is not None:
            raise UserError(_not_cached(f"model.tokenizer_path {name}", name, cache.models))
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
