"""What the Hugging Face cache holds, seen from the login node with the standard library alone.

The layout is that of huggingface_hub ("Understand caching" of its documentation) and of `datasets`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.config.schema import JobConfig
from hpc_rl.launch.environment import job_environment


@dataclass(frozen=True)
class HubCache:
    """The cache that a job will read."""

    models: Path
    datasets: Path
    offline: bool
    """Whether the cache is all that the job has."""

    def model_folder(self, name: str) -> Path | None:
        """The snapshot that the name stands for (its branch main); None where it was never downloaded."""
        repository = self.models / f"models--{name.replace('/', '--')}"
        try:
            commit = (repository / "refs" / "main").read_text().strip()
        except OSError:
            return None
        snapshot = repository / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None

    def has_dataset(self, name: str) -> bool:
        """Whether `datasets` has prepared it: a name, or name:configuration."""
        path, _, configuration = name.partition(":")
        *owner, last = path.split("/")
        folder = self.datasets / "___".join([*owner, _snake_case(last)])
        return any(folder.glob(f"{configuration or '*'}/*/*/dataset_info.json"))


def hub_cache(config: JobConfig, environ: Mapping[str, str] = os.environ) -> HubCache:
    """The cache of a job that is submitted from this environment."""
    found = {**environ, **job_environment(config)}
    user = found.get("XDG_CACHE_HOME", "~/.cache")
    home = found.get("HF_HOME", f"{user}/huggingface")
    models = found.get("HF_HUB_CACHE", found.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub"))
    datasets = found.get("HF_DATASETS_CACHE", f"{home}/datasets")
    return HubCache(_path(models), _path(datasets), offline=config.cache.offline)


def _path(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _snake_case(name: str) -> str:
    """GSM8kHard -> gsm8k_hard, as `datasets` names its folders."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()
