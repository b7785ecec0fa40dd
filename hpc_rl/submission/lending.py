"""From a run to a job that lends it nodes: their engines generate for it, or they score its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.config.compose import IncompleteError, load_config
from hpc_rl.config.job import JobConfig
from hpc_rl.config.rl.generate import EvalConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_spec
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.config.training.sft import SftConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.offer import LENT_ENVIRONMENTS
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.folders import ROOT, newest_runs
from hpc_rl.runs.status import status_of
from hpc_rl.slurm.states import ENDED
from hpc_rl.submission.job import Job
from hpc_rl.submission.planning import check_lent
from hpc_rl.submission.request import JobRequest, free_name, plan
from hpc_rl.tracking.points import scored
from hpc_rl.training.checkpoints.beside import saved_in

KIND = "lend"
_GPUS = "trainer.n_gpus_per_node"
LEAVE_S = 30
"""How long before the end of its walltime a lender leaves: it has nothing to save."""
_SHARED = (
    *("slurm.python", "slurm.modules", "slurm.module_paths", "slurm.setup", "slurm.env", "slurm.login_shell"),
    *("slurm.interface", "trainer.device", "trainer.n_gpus_per_node", "container", "cache", "ray", "ray_kwargs"),
)
"""Options that a lender has from the run: those of software, network and devices. Resources are its own."""
_PROMPTS = ("prompt_key", "answer_key", "max_prompt_length", "overlong_prompts", "max_response_length")
_ENGINES = ("name", "dtype", "tensor_parallel_size", "max_num_seqs", "engine_kwargs")
"""Options of the sections `data` and `rollout` that an evaluation has from a run of reinforcement learning."""
_REWARDS = ("reward.", "environment.")
"""Sections that it has from the run as a whole, or not at all if the user sets one of their options."""
_SCORED = ("sft", "dpo", "distill", "ppo")
"""Kinds of runs whose checkpoints an evaluation can score."""


@dataclass(frozen=True)
class LendRole:
    """What the nodes of a lender do."""

    meaning: str
    """A few words."""
    options: Callable[[RunDir], dict[str, Any]]
    """Returns options of the job that follow from the run, dotted key -> value. It raises UserError if a run has no use
    for such nodes."""
    check: Callable[[RunDir, Job], str] = lambda run, job: ""
    """Returns a remark about the job, or nothing. It raises UserError if the job is of no use to the run."""
    kind: str = KIND
    """A row of KINDS: of the lender's job. Jobs are named after it, as in math-lend-1."""
    takes_gpus: bool = True


def lend_job(
    target: RunDir,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    site: str | None,
    role: str = "engines",
    by_run: bool = False,
) -> Job:
    """Return a job that lends nodes to a run.

    Args:
        role: name of a row of ROLES.
        by_run: whether the run itself queues it, so that it has started before.

    Raises:
        UserError: the run takes no nodes, its engines do not fit into the job's GPUs, the options are wrong, or other
            users could have written those of the run, some of which are commands.
    """
    if role not in ROLES:
        choices = ", ".join(f"{name} ({row.meaning})" for name, row in ROLES.items())
        raise UserError(f"--role {role}: choose one of {choices}")
    row = ROLES[role]
    target.check_owner()
    if (gpus := settings.get(_GPUS)) is not None and (gpus > 0) != row.takes_gpus:
        needs = (
            "needs GPUs; leave the option out" if row.takes_gpus else "uses no GPUs; leave the option out, or give 0"
        )
        raise UserError(f"--gpus-per-node {gpus}: --role {role} {needs}")
    settings = {key: value for key, value in settings.items() if key != _GPUS or row.takes_gpus}
    named = {text.partition("=")[0].lstrip("+") for text in overrides} | settings.keys()
    replaced = tuple(section for section in _REWARDS if any(key.startswith(section) for key in named))
    own: dict[str, Any] = {"slurm.requeue": True, "slurm.warning_s": LEAVE_S, **row.options(target)}
    now = status_of(target)
    if now.state == "PENDING" and now.job_id and not by_run:  # otherwise the lender could wait for it on its nodes
        own["slurm.sbatch.dependency"] = f"after:{now.job_id}"
    folder = Path(str(target.read_job().get("working_dir", Path.cwd())))
    if not folder.is_dir():
        raise UserError(f"{folder}, the folder in which run {target.name} was submitted, is not there: restore it")
    given = {key: value for key, value in own.items() if key not in named and not key.startswith(replaced)}
    given |= settings
    try:
        job = plan(JobRequest(row.kind, overrides, settings=given, site=site))
    except IncompleteError as error:
        needed = " ".join(f"{key}={'NAME' if key == 'reward.function' else 'FILE'}" for key in error.keys)
        raise UserError(f"run {target.name} does not determine how its checkpoints are scored: add {needed}") from None
    with chdir(folder):
        note = row.check(target, job)
    name = free_name(job.config.slurm.job_name or f"{target.name}-{row.kind}")
    return replace(
        job,
        config=job.config.updated("slurm.job_name", None),
        run_dir=RunDir((ROOT / name).absolute()),
        is_named=False,
        program=(str(target.path),) if row.kind == KIND else (),
        facts={"lends_to": str(target.path)},
        note="; ".join(filter(None, (job.note, note))),
        working_dir=folder,
    )


def _for_engines(run: RunDir) -> dict[str, Any]:
    config = borrower(run)
    return {**_shared(config), "lend.engine_package": engine_spec(config).package}


def _check_engines(run: RunDir, job: Job) -> str:
    """Check that whole engines of a run fit into each node."""
    config = borrower(run)
    parallel, slots = config.rollout.tensor_parallel_size, job.config.trainer.n_gpus_per_node
    if slots % parallel:
        raise UserError(
            f"{slots} GPUs per node (trainer.n_gpus_per_node) do not hold whole engines of run {run.name}, which have "
            f"{parallel} GPUs each (rollout.tensor_parallel_size): use a multiple of {parallel}"
        )
    return check_lent(run.name, config, job.config.slurm)


def _for_environments(run: RunDir) -> dict[str, Any]:
    config = borrower(run)
    if not config.environment.is_used:
        raise UserError(
            f"run {run.name} has no environment (environment.name, environment.tools), so nodes with --role "
            "environments have nothing to do: remove --role to lend engines"
        )
    own = {"trainer.device": "cpu", _GPUS: 1, "slurm.cpus_per_task": config.environment.workers}
    package = engine_spec(config).package  # the run compares all versions
    return {**_shared(config), **own, "lend.engine_package": package, "lend.resource": LENT_ENVIRONMENTS}


def _kind_of(run: RunDir) -> str:
    """Return the kind of a run's job. A script of `hpc-rl render` that sbatch starts leaves no record of it."""
    kind = run.read_job().get("kind")
    if kind is None:
        raise UserError(f"run {run.name} was not started by `hpc-rl submit`, and only such runs take lent nodes")
    return str(kind)


def borrower(run: RunDir) -> PpoConfig:
    """Return the options of a run that takes lent nodes.

    Raises:
        UserError: it does not take any.
    """
    kind = _kind_of(run)
    if kind != "ppo":
        scores = "; to score its checkpoints, add --role eval" if kind in _SCORED else ""
        raise UserError(
            f"run {run.name} is of kind {kind}: only runs of `hpc-rl submit ppo` take engines and environments{scores}"
        )
    if (state := status_of(run).state) in {*ENDED, "STOPPED"}:
        raise UserError(
            f"run {run.name} has ended ({state}) and takes no nodes: resume it (hpc-rl requeue {run.name}), or lend to "
            "another run"
        )
    config = load_config(kind, run.latest_settings)
    assert isinstance(config, PpoConfig)
    if not engine_spec(config).transfers:
        raise UserError(
            f"run {run.name} generates on a server (rollout.name=openai) and takes no nodes: submit it with another "
            "engine"
        )
    if config.trainer.nnodes == 1 and config.rollout.engines == "own" and not config.slurm.interface:
        raise UserError(
            f"run {run.name} is on one node, and listens only to itself: submit it with slurm.interface=NAME, the "
            "network interface between the nodes, or without engines of its own (rollout.engines=lent)"
        )
    return config


def _for_eval(run: RunDir) -> dict[str, Any]:
    """Return the options of a job that scores the checkpoints of a run: its model, its chat template, and the prompts,
    rewards and engines that it has."""
    config = followed(run)
    tree = config.model_dump(mode="json")
    found = _shared(config) | {f"model.{key}": tree["model"][key] for key in ("path", "tokenizer_path")}
    found |= {"model.trust_remote_code": config.model.trust_remote_code, "eval.follow": str(run.path.absolute())}
    data: dict[str, Any] = {key: tree["data"][key] for key in ("chat_template", "chat_template_kwargs")}
    if isinstance(config, PpoConfig):
        data |= {key: tree["data"][key] for key in _PROMPTS}
        found |= {f"rollout.{key}": tree["rollout"][key] for key in _ENGINES}
        found |= {f"{section}{key}": value for section in _REWARDS for key, value in tree[section[:-1]].items()}
    elif isinstance(config, SftConfig) and config.data.val_files:
        both = config.data.prompt_key, config.data.response_key
        data |= {"prompt_key": both[0] or config.data.messages_key, **({"answer_key": both[1]} if both[1] else {})}
    if isinstance(config, PpoConfig | SftConfig) and config.data.val_files:
        data["files"] = config.data.val_files
    return found | {f"data.{key}": value for key, value in data.items()}


def followed(run: RunDir) -> PpoConfig | FinetuneConfig:
    """Return the options of a run whose checkpoints can be scored.

    Raises:
        UserError: it has none.
    """
    kind = _kind_of(run)
    if kind not in _SCORED:
        raise UserError(
            f"run {run.name} is of kind {kind}: --role eval scores the checkpoints of runs of `hpc-rl submit sft`, "
            "`dpo`, `distill` and `ppo`"
        )
    config = load_config(kind, run.latest_settings)
    assert isinstance(config, PpoConfig | FinetuneConfig)
    if not (config.trainer.save_freq or config.trainer.save_minutes):
        raise UserError(
            f"run {run.name} saves nothing before its end (trainer.save_freq=0, trainer.save_minutes=0): evaluate its "
            f"model then (hpc-rl eval {run.name}), or submit it with trainer.save_freq=N"
        )
    return config


def _check_scored(run: RunDir, job: Job) -> str:
    """Check that a run has, or will have, checkpoints that no other job scores, and that GPUs can hold its engines."""
    state, found = status_of(run).state, saved_in(run.checkpoints)
    assert isinstance(job.config, EvalConfig)
    has_ended = state in {*ENDED, "STOPPED"}
    if has_ended and {saved.key for saved in found.values()} <= scored(run.path, job.config.identity):
        have = "have scores of this evaluation" if found else "are not there"
        raise UserError(
            f"run {run.name} has ended ({state}), and its checkpoints {have}: resume it (hpc-rl requeue {run.name}), "
            f"or evaluate its model (hpc-rl eval {run.name})"
        )
    if same := next((other for other in newest_runs() if _scores(other, run, job.config.identity)), None):
        raise UserError(
            f"run {same.name} already scores the checkpoints of run {run.name} with these options: cancel it first "
            f"(hpc-rl cancel {same.name})"
        )
    return check_lent(run.name, job.config, job.config.slurm)


def _scores(job: RunDir, run: RunDir, evaluation: str) -> bool:
    """Return whether a run is an active job that scores the checkpoints of another one in a certain way."""
    about = job.read_job()
    if about.get("kind") != "eval" or about.get("lends_to") != str(run.path) or not status_of(job).active:
        return False
    config = load_config("eval", job.latest_settings)
    return isinstance(config, EvalConfig) and config.identity == evaluation


ROLES = {
    "engines": LendRole("generate responses", _for_engines, _check_engines),
    "environments": LendRole("run environments and tools", _for_environments, takes_gpus=False),
    "eval": LendRole("score checkpoints", _for_eval, _check_scored, kind="eval"),
}
"""What the nodes of `hpc-rl lend --role` do for a run."""


def _shared(config: JobConfig) -> dict[str, Any]:
    """Return the options that a lender has from the run, as far as the run has them."""
    tree = config.model_dump(mode="json")
    parts = ((key, *key.partition(".")) for key in _SHARED)
    return {key: tree[name][rest] if rest else tree[name] for key, name, _, rest in parts if name in tree}
