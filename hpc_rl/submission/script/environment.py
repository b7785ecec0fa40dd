"""Environment variables of a job."""

from __future__ import annotations

from pathlib import Path

from hpc_rl.config.job import CacheConfig, JobConfig


def job_environment(config: JobConfig) -> dict[str, str]:
    """Return the variables that the job script exports: those of options, and slurm.env, which takes precedence."""
    return {**_cache_environment(config.cache), **_proxy_environment(config.slurm.proxy), **config.slurm.env}


def _cache_environment(cache: CacheConfig) -> dict[str, str]:
    """Return variables for huggingface_hub, datasets, transformers and vLLM (HF_*), and for wandb."""
    found = {}
    if cache.hf_home is not None:
        found["HF_HOME"] = str(Path(cache.hf_home).absolute())
    if cache.wandb_dir is not None:
        found |= _wandb_folders(Path(cache.wandb_dir).absolute())
    if cache.offline:
        found |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return found


def _proxy_environment(proxy: str | None) -> dict[str, str]:
    return {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": "localhost,127.0.0.1"} if proxy else {}


def _wandb_folders(folder: Path) -> dict[str, str]:
    return {"WANDB_CACHE_DIR": f"{folder}/cache", "WANDB_DATA_DIR": f"{folder}/data"}
