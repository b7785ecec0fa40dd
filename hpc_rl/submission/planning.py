"""The plan of a job that is about to be submitted: find the shapes of its models, and refuse a job that cannot fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hpc_rl.config.compose import FillIn, compose
from hpc_rl.config.finetune import FinetuneConfig
from hpc_rl.config.generate import GenerateConfig
from hpc_rl.config.job import JobConfig
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.config.tree import flat
from hpc_rl.errors import UserError
from hpc_rl.host.files import read_json
from hpc_rl.host.hub import hub_config
from hpc_rl.plan.advice import MOST_NODES, advise, fewest, more_nodes, words
from hpc_rl.plan.hardware import USABLE, gpu_bytes
from hpc_rl.plan.memory import Planned, models_of
from hpc_rl.plan.plan import Plan, plan_of
from hpc_rl.plan.shape import Shape, shape_of
from hpc_rl.plan.text import arithmetic, problem, remedies
from hpc_rl.sites.profile import load_profile
from hpc_rl.submission.devices import Devices
from hpc_rl.submission.hub import hub_cache
from hpc_rl.submission.job import Job
from hpc_rl.submission.request import Request
from hpc_rl.submission.request import plan as plan_request
from hpc_rl.tracking.planned import KEY, Expected

_LESS = 0.85
"""Part of a job's peak that the settings recorded with a run need at most."""
_PLACEHOLDERS = {"data.train_files": ["data.jsonl"], "data.files": ["data.jsonl"], "reward.function": "exact"}
"""Required key -> a value that stands for any other in a plan."""


def is_planned(config: JobConfig) -> bool:
    """Return whether a job has models whose memory can be planned: not a user's own program, and not on CPUs."""
    return isinstance(config, FinetuneConfig | PpoConfig | GenerateConfig) and config.trainer.computes_on != "cpu"


def planned_config(request: Request) -> JobConfig:
    """Compose the configuration of a request that is planned and not submitted: data and rewards may be missing.

    Raises:
        UserError: the configuration is invalid.
    """
    site = load_profile(request.site).values
    fill_in = [_placeholders(request.kind), Devices().fill_in]
    return compose(request.kind, request.overrides, request.settings, site, fill_in)


def shapes_of(config: Planned, ask_hub: bool) -> dict[str, Shape]:
    """Return the shapes of a job's models by their paths.

    Args:
        ask_hub: whether to read from the hub what neither a folder nor the cache has.

    Raises:
        UserError: there is no config.json of a model, or it is of a kind that is not counted.
    """
    return {
        path: shape_of(_config_of(key, path, config, ask_hub), f"{key} {path}")
        for key, path in models_of(config).items()
    }


def check_fit(job: Job) -> str | None:
    """Check that a job fits into the memory of its GPUs, as far as model and GPUs are known here.

    Returns:
        A sentence for the user if it fits only just.

    Raises:
        UserError: it does not fit; the message has the arithmetic, and settings with which it does.
    """
    found = _plan_of_job(job)
    if found is None or found.plan.verdict == "fits":
        return None
    config, shapes, plan = found
    if plan.verdict == "is tight":
        return f"the job only just fits: {arithmetic(plan)}; `hpc-rl plan` shows the phases"
    ways = remedies(advise(config, shapes, plan.gpu), more_nodes(config, shapes, plan.gpu))
    raise UserError(
        f"{job.size} cannot hold this job: {problem(plan)}; use {', or '.join(ways)}. `hpc-rl plan` shows the phases, "
        "and `submit --force` submits the job anyway"
    )


def expected(job: Job) -> dict[str, Any]:
    """Return what the plan of a job expects, for job.json; empty if the job cannot be planned here."""
    found = _plan_of_job(job)
    if found is None:
        return {}
    config, shapes, plan = found
    less = advise(config, shapes, _LESS * plan.fullest.peak / USABLE)
    facts = Expected(
        phase=plan.fullest.name,
        peak_gb=round(plan.fullest.peak / 1e9, 3),
        usable_gb=round(plan.usable / 1e9, 3),
        training_gb=round(plan.training / 1e9, 3),
        less=[] if less is None else words(less.settings),
    )
    return {KEY: facts.as_dict()}


class _JobPlan(NamedTuple):
    config: Planned
    shapes: dict[str, Shape]
    plan: Plan


def _plan_of_job(job: Job) -> _JobPlan | None:
    """Return the plan of a job; None if the memory of its GPUs or a model is unknown here."""
    config = job.config
    gpu = gpu_bytes(config.slurm)
    if gpu is None or not isinstance(config, FinetuneConfig | PpoConfig | GenerateConfig) or not is_planned(config):
        return None
    try:
        shapes = shapes_of(config, ask_hub=False)
    except UserError:
        return None  # `hpc-rl plan` explains it; the checks before submission report a model that is missing
    return _JobPlan(config, shapes, plan_of(config, shapes, gpu))


def on_fewest_nodes(request: Request) -> tuple[Request, str]:
    """Choose the number of nodes of a job: the fewest on which it fits, with the settings that it needs there.

    Returns:
        the request with these settings, and a sentence about them for the user.

    Raises:
        UserError: the job does not fit on any number of nodes, or its memory cannot be planned.
    """
    config = plan_request(request).config
    if not isinstance(config, FinetuneConfig | PpoConfig | GenerateConfig) or not is_planned(config) or request.local:
        raise UserError(f"--nodes auto: the memory of this job ({request.kind}) is not planned; give a number of nodes")
    gpu = gpu_bytes(config.slurm)
    if gpu is None:
        raise UserError(
            "--nodes auto: the memory of the GPUs is unknown; set slurm.node.gpu_gb in the site profile, or give a "
            "number of nodes"
        )
    if isinstance(config, PpoConfig | GenerateConfig) and config.pools.spec:
        raise UserError("--nodes auto: pools.spec states the nodes of the job; give their number")
    shapes = shapes_of(config, ask_hub=False)
    found = fewest(config, shapes, gpu, first=1, may_change=True)
    if found is None:
        raise UserError(
            f"--nodes auto: the job does not fit on {MOST_NODES} nodes: {problem(plan_of(config, shapes, gpu))}"
        )
    note = f"--nodes auto: {' '.join(words(found.settings))}"
    return replace(request, settings={**request.settings, **found.settings}, fewest_nodes=False), note


def _config_of(key: str, path: str, config: Planned, ask_hub: bool) -> dict[str, Any]:
    """Return the contents of a model's config.json: from a folder, the hub's cache, or the hub.

    Raises:
        UserError: there is none.
    """
    cache = hub_cache(config)
    folder = Path(path) if Path(path).is_dir() else cache.model_folder(path)
    if folder is not None:
        if found := read_json(folder / "config.json"):
            return found
        raise UserError(f"{key} {path}: {folder} has no config.json, or it is not JSON")
    if ask_hub and not cache.offline and (found := hub_config(path)):
        return found
    raise UserError(
        f"{key} {path}: there is no such folder, and neither the hub's cache nor the hub has its config.json; run "
        f"`hpc-rl fetch {path}`, or give the folder of a model"
    )


def _placeholders(kind: str) -> FillIn:
    """Return what completes a configuration in which the user left out data and reward: plans do not depend on them."""

    def fill_in(tree: Mapping[str, Any]) -> dict[str, Any]:
        open_keys = {key for key in _PLACEHOLDERS if key in KINDS[kind].examples and flat(tree).get(key) is None}
        if any(tree.get(section) for section in ("reward", "environment", "agent")):
            open_keys.discard("reward.function")
        return {key: _PLACEHOLDERS[key] for key in open_keys}

    return fill_in
