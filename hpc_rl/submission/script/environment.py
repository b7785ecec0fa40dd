"""Environment variables of a job."""

from __future__ import annotations

from pathlib import Path

from hpc_rl.config.job import JobConfig


def job_environment(config: JobConfig) -> dict[str, str]:
    """Return the variables that the job script exports: those of options, and slurm.env, which takes precedence.

    The first are for huggingface_hub, datasets, transformers and vLLM (HF_*), for wandb, and for a proxy.
    """
    cache, proxy = config.cache, config.slurm.proxy
    found = {}
    if cache.hf_home is not None:
        found["HF_HOME"] = str(Path(cache.hf_home).absolute())
    if cache.wandb_dir is not None:
        folder = Path(cache.wandb_dir).absolute()
        found |= {"WANDB_CACHE_DIR": f"{folder}/cache", "WANDB_DATA_DIR": f"{folder}/data"}
    if cache.offline:
        found |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    if proxy:
        found |= {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": "localhost,127.0.0.1"}
    return {**found, **config.slurm.env}
