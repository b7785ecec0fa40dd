"""The plan of a job that is about to be submitted: find the shapes of its models, and refuse a job that cannot fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpc_rl.config.compose import FillIn, compose
from hpc_rl.config.job import JobConfig
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.config.tree import flat
from hpc_rl.errors import UserError
from hpc_rl.formats.hub import hub_config
from hpc_rl.plan.advice import MOST_NODES, advise, fewest, more_nodes, words
from hpc_rl.plan.duration import Duration, gpus_of, items_of
from hpc_rl.plan.hardware import gpu_bytes
from hpc_rl.plan.memory import Planned, models_of
from hpc_rl.plan.plan import Plan, plan_of, plan_of_lent
from hpc_rl.plan.rows import MICRO_TOKENS, is_auto
from hpc_rl.plan.shape import Shape, shape_of
from hpc_rl.plan.text import arithmetic, gigabytes, problem, remedies, rows_text
from hpc_rl.runs.earlier import GpuMemory, gpus_like
from hpc_rl.runs.models import models_of_runs
from hpc_rl.sites.profile import load_profile
from hpc_rl.submission.devices import Devices
from hpc_rl.submission.duration import duration_of, gpu_kind, measured_like
from hpc_rl.submission.hub import hub_cache
from hpc_rl.submission.job import Job
from hpc_rl.submission.preflight.model_rules import rules_for
from hpc_rl.submission.request import JobRequest
from hpc_rl.submission.request import plan as plan_request
from hpc_rl.submission.resources import granted_bytes
from hpc_rl.system.files import read_json
from hpc_rl.tracking.planned import KEY, Expected

_LESS = 0.85
"""Part of the training processes' memory that the settings recorded with a run need at most."""
_POOLS = "--nodes auto: pools.spec states the nodes of the job; give their number"
_REWARDS = ("reward.function", "reward.functions", "reward.model", "reward.url")
_INSTEAD = ("environment.name", "agent.endpoint")
"""Keys that name a reward, or what gives it."""
_PLACEHOLDERS = {"data.train_files": ["any"], "data.files": ["any"], "reward.function": "exact"}
"""Required key -> a value that stands for any other in a plan."""


def has_model(kind: str) -> bool:
    """Return whether jobs of a kind have models whose memory can be planned."""
    return issubclass(KINDS[kind].schema, FinetuneConfig | PpoConfig | GenerateConfig)


def planned_part(config: JobConfig) -> Planned | None:
    """Return the configuration of a job whose memory can be planned; None for a user's own program, and on CPUs."""
    is_planned = isinstance(config, FinetuneConfig | PpoConfig | GenerateConfig) and config.trainer.computes_on != "cpu"
    return config if is_planned else None  # type: ignore[return-value]  # mypy does not follow the line above


def planned_config(request: JobRequest) -> JobConfig:
    """Compose the configuration of a request that is planned and not submitted: data and rewards may be missing.

    Raises:
        UserError: the configuration is invalid.
    """
    request.trust_its_group()
    site = load_profile(request.site).values
    fill_in = [models_of_runs(may_come=True), _placeholders(request.kind), _device_with(request), Devices().fill_in]
    return compose(request.kind, request.overrides, request.settings, site, fill_in, request.typed)


def shapes_of(config: Planned, ask_hub: bool) -> dict[str, Shape]:
    """Return the shapes of a job's models by their paths.

    Args:
        ask_hub: whether to read from the hub what neither a folder nor the cache has.

    Raises:
        UserError: there is no config.json of a model, the job cannot use such a model (model_rules), or it is of a kind
            that is not counted.
    """
    found = {}
    for key, path in models_of(config).items():
        settings = _config_of(key, path, config, ask_hub)
        for refuse, more in rules_for(key, config):
            refuse(key, path, settings, *more)
        found[path] = shape_of(settings, f"{key} {path}")
    return found


def gpu_memory(slurm: SlurmConfig) -> GpuMemory | None:
    """Return the memory of a job's GPUs, as the settings state it or an earlier run recorded it; None if neither."""
    if (stated := gpu_bytes(slurm)) is not None:
        return GpuMemory(stated)
    return gpus_like(slurm)


class JobPlan(NamedTuple):
    """The plan of a job that is about to be submitted."""

    config: Planned
    shapes: dict[str, Shape]
    plan: Plan
    gpu: GpuMemory


def plan_of_job(job: Job) -> JobPlan | None:
    """Return the plan of a job; None if the memory of its GPUs or a model is unknown here."""
    config = planned_part(job.config)
    gpu = None if config is None else gpu_memory(job.config.slurm)
    if config is None or gpu is None:
        return None
    try:
        shapes = shapes_of(config, ask_hub=False)
    except UserError:
        return None  # `hpc-rl plan` explains it; the checks before submission report a model that is missing
    return JobPlan(config, shapes, plan_of(config, shapes, gpu.bytes), gpu)


def rows_notes(job: Job, found: JobPlan | None) -> list[str]:
    """Return what trainer.micro_tokens=auto is in a job on GPUs, and why; nothing if it is a number."""
    config = planned_part(job.config)
    if config is None or not is_auto(config):
        return []
    if found is not None and found.plan.rows is not None:
        return [rows_text(found.plan.rows, found.plan.gpu)]
    unknown = "config.json of a model" if gpu_memory(config.slurm) else "memory of the GPUs (slurm.node.gpu_gb)"
    return [f"{MICRO_TOKENS}=auto: the job decides at its start, because the {unknown} is not known here"]


def check_fit(found: JobPlan, size: str, force: bool = False, granted: float | None = None) -> list[str]:
    """Check that a job fits into the memory of its GPUs.

    Args:
        size: of the job, in words.
        force: a job that does not fit is no error.
        granted: memory that the job requests on each node, in bytes; None if it is unknown.

    Returns:
        Sentences for the user about a job that fits only just, or that may not fit.

    Raises:
        UserError: it does not fit; the message has the arithmetic, and settings with which it does.
    """
    config, shapes, plan, gpu = found
    if plan.verdict == "fits":
        return []
    guesses = [note for shape in shapes.values() for note in shape.notes]
    if plan.verdict == "is tight":
        return [f"the job only just fits: {arithmetic(plan)}; `hpc-rl plan` shows the phases", *guesses]
    if force or guesses:
        return [f"the job may not fit: {problem(plan)}", *guesses]
    host = granted or math.inf
    ways = remedies(advise(config, shapes, plan.gpu, host=host), more_nodes(config, shapes, plan.gpu, host))
    lines = [
        f"{size} cannot hold this job: {problem(plan)} (the memory of a GPU is that of {gpu.source})",
        *([] if plan.rows is None else [rows_text(plan.rows, plan.gpu)]),
        *(f"to make it fit: {way}" for way in ways),
        "`hpc-rl plan` shows the phases; --force submits the job anyway",
    ]
    raise UserError("\n".join(lines))


def check_lent(run: str, config: PpoConfig | GenerateConfig, slurm: SlurmConfig) -> str:
    """Check that a GPU of a job that lends nodes to a run can hold an engine of the run.

    Args:
        config: of the run, or of the job if that scores the run's checkpoints.
        slurm: settings of the job.

    Returns:
        A sentence for the user about engines that may not fit; empty if they do, or if nothing is known.

    Raises:
        UserError: they do not fit.
    """
    gpu = gpu_memory(slurm)
    if planned_part(config) is None or gpu is None:
        return ""
    try:
        shape = shapes_of(config, ask_hub=False)[config.model.path]
    except UserError:
        return ""  # as in `plan_of_job`
    plan = plan_of_lent(config, {config.model.path: shape}, gpu.bytes)
    if plan.fits():
        return ""
    if shape.notes:
        return f"engines of run {run} may not fit into these GPUs: {problem(plan)}. {' '.join(shape.notes)}"
    raise UserError(
        f"GPUs of {gigabytes(gpu.bytes)} GB (memory of {gpu.source}) cannot hold an engine of run {run}: "
        f"{problem(plan)}. Choose GPUs with more memory, such as those of another partition (--partition) or type "
        "(slurm.gpu_type)"
    )


def check_host(found: JobPlan, granted: float | None, force: bool = False) -> list[str]:
    """Check that a node's memory holds what trainer.offload and model.enable_activation_offload move there.

    Args:
        granted: memory that the job requests on each node, in bytes; None if it is unknown.
        force: a job that does not fit is no error.

    Returns:
        A sentence for the user about a job that may not fit.

    Raises:
        UserError: it does not fit.
    """
    config, plan = found.config, found.plan
    if not plan.offloaded or granted is None or plan.host <= granted:
        return []
    level = config.trainer.offload
    options = [] if level == "none" else [f"trainer.offload={level}"]
    if not isinstance(config, GenerateConfig) and config.model.enable_activation_offload:
        options.append("model.enable_activation_offload=true")
    needs = (
        f"{' with '.join(options)} keeps {gigabytes(plan.offloaded)} GB in the memory of each node; with processes and "
        f"copies for checkpoints, a node needs about {gigabytes(plan.host)} GB, and the job requests "
        f"{gigabytes(granted)} GB"
    )
    if plan.offloaded < granted or force:  # the rest is assumed
        return [f"the job may not fit: {needs}"]
    remedies = {
        "use more nodes": level != "none",
        "set trainer.offload=optimizer": level == "all",
        "lower trainer.micro_tokens": not isinstance(config, GenerateConfig) and config.model.enable_activation_offload,
    }
    less = "".join(f", or {remedy}" for remedy, helps in remedies.items() if helps)
    raise UserError(f"{needs}: request more memory (--mem){less}; --force submits the job anyway")


def expected(kind: str, found: JobPlan) -> dict[str, Any]:
    """Return what the plan of a job expects, for job.json."""
    config, shapes, plan, _ = found
    used = config if plan.rows is None else config.updated(MICRO_TOKENS, plan.rows.tokens)
    less = advise(used, shapes, plan.gpu, limit=_LESS * plan.training) if plan.training else None
    time = duration_of(config, shapes, plan.gpu, measured_like(kind, config, shapes, plan.gpu))
    facts = Expected(
        phase=plan.fullest.name,
        peak_gb=round(plan.fullest.peak / 1e9, 3),
        usable_gb=round(plan.usable / 1e9, 3),
        training_gb=round(plan.training / 1e9, 3),
        less=[] if less is None else words(less.settings),
        gpu=gpu_kind(config, plan.gpu),
        gpus=gpus_of(config),
        parameters=shapes[config.model.path].total,
        items=items_of(config),
        step_s=[round(seconds, 3) for seconds in time.step] if isinstance(time, Duration) else [],
    )
    return {KEY: asdict(facts)}


def on_fewest_nodes(request: JobRequest) -> tuple[JobRequest, str]:
    """Choose the number of nodes of a job: the fewest on which it fits, with the settings that it needs there.

    Returns:
        the request with these settings, and a sentence about them for the user.

    Raises:
        UserError: the job does not fit on any number of nodes, or its memory cannot be planned.
    """
    if any(word.startswith("pools.spec=") for word in request.overrides):
        raise UserError(_POOLS)
    config = planned_part(plan_request(request).config)
    if config is None or request.local:
        raise UserError(f"--nodes auto: the memory of this job ({request.kind}) is not planned; give a number of nodes")
    memory = gpu_memory(config.slurm)
    if memory is None:
        raise UserError(
            "--nodes auto: the memory of the GPUs is unknown; set slurm.node.gpu_gb in the site profile, or give a "
            "number of nodes"
        )
    if isinstance(config, PpoConfig | GenerateConfig) and config.pools.spec:
        raise UserError(_POOLS)
    shapes = shapes_of(config, ask_hub=False)
    gpu = memory.bytes
    found = fewest(config, shapes, gpu, first=1, may_change=True, host=granted_bytes(config) or math.inf)
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
    if Path(path).is_dir():
        if found := read_json(Path(path) / "config.json", named=True):
            return found
        has_one = (Path(path) / "config.json").exists()
        raise UserError(
            f"{key} {path}: {'config.json in this folder is not JSON' if has_one else 'the folder has no config.json'}"
        )
    cache = hub_cache(config)
    folder = cache.model_folder(path)
    if folder is not None and (found := read_json(folder / "config.json", named=True)):
        return found
    asks = ask_hub and not cache.offline
    if asks and (found := hub_config(path)):
        return found
    places = "neither the hub's cache nor the hub has" if asks else "the hub's cache does not have"
    remedy = "" if path.startswith(("/", ".", "~")) else f": run `hpc-rl fetch {path}`, or give the folder of a model"
    raise UserError(f"{key} {path}: there is no such folder, and {places} its config.json{remedy}")


def _device_with(request: JobRequest) -> FillIn:
    """Return what chooses GPUs where none are seen: who names their memory plans for another machine."""

    def fill_in(tree: Mapping[str, Any]) -> dict[str, Any]:
        is_open = flat(tree).get("trainer.device", "auto") == "auto"
        return {"trainer.device": "cuda"} if is_open and "slurm.node.gpu_gb" in request.settings else {}

    return fill_in


def _placeholders(kind: str) -> FillIn:
    """Return what completes a configuration in which the user left out data and reward: plans do not depend on them."""

    def fill_in(tree: Mapping[str, Any]) -> dict[str, Any]:
        given = {key for key, value in flat(tree).items() if value is not None}
        is_rewarded = any(key.startswith(_REWARDS + _INSTEAD) for key in given)
        left_open = KINDS[kind].examples.keys() & _PLACEHOLDERS.keys() - given
        return {key: _PLACEHOLDERS[key] for key in left_open if not (key in _REWARDS and is_rewarded)}

    return fill_in
