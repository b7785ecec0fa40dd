"""The Hugging Face cache that jobs read: its contents, and downloads into it on the login node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.config.job import JobConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.hub import data_offline, hub_offline
from hpc_rl.software.installation import install_command
from hpc_rl.submission.script.environment import job_environment
from hpc_rl.system.processes import die_with_parent, python_with, shell_code


@dataclass(frozen=True)
class HubCache:
    """The cache that a job will read."""

    models: Path
    datasets: Path
    offline: str
    """The setting by which the job cannot download what the cache lacks: `cache.offline`. Empty if it can."""
    data_offline: str
    """The same for data sets only."""
    has_own_hub: bool = False
    """Whether the job asks another hub than this machine does (slurm.env.HF_ENDPOINT)."""

    def model_folder(self, name: str) -> Path | None:
        """Return the snapshot of a model's branch main; None if it was never downloaded."""
        repository = self.models / f"models--{name.replace('/', '--')}"
        try:
            commit = (repository / "refs" / "main").read_text().strip()
        except OSError:
            return None
        snapshot = repository / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None

    def has_dataset(self, name: str) -> bool:
        """Return whether `datasets` has prepared a data set, given as name or name:configuration."""
        path, _, configuration = name.partition(":")
        *owner, last = path.split("/")
        folder = self.datasets / "___".join([*owner, _snake_case(last)])
        return any(folder.glob(f"{configuration or '*'}/*/*/dataset_info.json"))


def hub_cache(config: JobConfig, environ: Mapping[str, str] = os.environ) -> HubCache:
    """Return the cache of a job that is submitted from this environment."""
    found = {**environ, **job_environment(config)}
    user = found.get("XDG_CACHE_HOME", "~/.cache")
    home = found.get("HF_HOME", f"{user}/huggingface")
    models = found.get("HF_HUB_CACHE", found.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub"))
    datasets = found.get("HF_DATASETS_CACHE", f"{home}/datasets")
    variable = data_offline(found)
    setting = "cache.offline" if config.cache.offline else f"{variable} is set"
    return HubCache(
        _path(models),
        _path(datasets),
        offline=setting if hub_offline(found) else "",
        data_offline=setting if variable else "",
        has_own_hub=found.get("HF_ENDPOINT") != environ.get("HF_ENDPOINT"),
    )


def _path(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _snake_case(name: str) -> str:
    """Convert GSM8kHard to gsm8k_hard, as `datasets` names its folders."""
    name = re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()


def fetch(names: Sequence[str], config: JobConfig) -> int:
    """Download models and data sets into the cache that jobs will read, and print their locations.

    Returns:
        The exit code of the download.

    Raises:
        UserError: no Python with `datasets` was found, or it cannot be started.
    """
    python = python_with("datasets", config.slurm.python)
    if python is None:
        raise UserError(
            f"{sys.executable} lacks `datasets`: {install_command('train', sys.executable)}, or set slurm.python"
        )
    command = [python, "-P", "-m", "hpc_rl.data.fetch", *names]
    try:
        done = subprocess.run(
            command, env=fetch_environment(config, os.environ), preexec_fn=die_with_parent, check=False
        )
    except OSError as error:
        raise UserError(f"cannot start {python} (slurm.python): {error.strerror}") from error
    return shell_code(done.returncode)


def fetch_environment(config: JobConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of jobs, but online, and with the user's existing login to the hub."""
    found = {**environ, **job_environment(config)}
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        found.pop(name, None)
    home = environ.get("HF_HOME", environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface")
    found.setdefault("HF_TOKEN_PATH", str(Path(home, "token").expanduser()))
    return found
