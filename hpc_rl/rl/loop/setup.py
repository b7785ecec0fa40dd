"""From a configuration to a run that is ready to train: pools, workers, engine, data, and the newest checkpoint."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from hpc_rl.algorithms.kl import AdaptiveKl
from hpc_rl.config.rl.pools import Role, pool_of, pool_spec
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_dtype, engine_spec
from hpc_rl.data.lazy import Joined
from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.data.reading.shares import whole_batches
from hpc_rl.data.templates.chat import chat_template, template_remarks
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.rewards.scorer import open_scorer
from hpc_rl.rl.actors.calls import MODEL_LIMIT, wait_for_all
from hpc_rl.rl.actors.pools import Pool, create_pools
from hpc_rl.rl.carriers.base import Carrier
from hpc_rl.rl.converse.conversations import Conversations
from hpc_rl.rl.converse.environment import Environment
from hpc_rl.rl.converse.environment_hosts import open_environments
from hpc_rl.rl.endpoint.agents import Agents
from hpc_rl.rl.loop.assignment import mini_batches
from hpc_rl.rl.loop.async_batches import AsynchronousBatches
from hpc_rl.rl.loop.batches import BatchSource, SynchronousBatches
from hpc_rl.rl.loop.computed import Computation, ComputedColumns
from hpc_rl.rl.loop.prompt_data import PromptLoader
from hpc_rl.rl.loop.rows import decide_rows
from hpc_rl.rl.loop.saving import WorkerModels
from hpc_rl.rl.loop.scoring import Converses, EnvironmentScoring, FunctionScoring, ModelScoring, NoScoring, Scoring
from hpc_rl.rl.loop.state import OldLogprobs, PpoState
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.rollout.respondent import Respondent
from hpc_rl.rl.rollout.rollout import InProcessRollout, LentRollout, Rollout, SeparateRollout
from hpc_rl.rl.weights.adapter_check import AdapterCheck
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.metrics import has_validation, read_metrics
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.checkpoints import checkpoint
from hpc_rl.training.checkpoints.folders import Progress
from hpc_rl.training.checkpoints.saver import Saver, TrainedModels
from hpc_rl.training.loop import validation_is_due
from hpc_rl.training.models.causal_lm import load_tokenizer
from hpc_rl.training.parallel.distributed import ONE_PROCESS
from hpc_rl.training.stopping import Stopping, open_stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def set_up(config: PpoConfig, run: RunDir, logs: Path) -> PpoState:
    """Start all parts of the run at once, then wait for them.

    Args:
        logs: folder for the workers' logs.

    Raises:
        UserError: the run cannot work as requested.
        RunError: workers did not start in time, or died.
        Stopped: the run stops before the data is tokenized.
    """
    start_s, model_s = config.ray.start_timeout_s, config.trainer.model_timeout_s
    print(describe_step(config), flush=True)
    pools = create_pools(pool_spec(config), config.trainer.computes_on, start_s, str(logs), config.pools.strategy)
    carrier: Carrier = pkgutil.resolve_name(config.carrier_spec.carrier)(training_nodes(config, pools))
    groups, rollout = start_workers(config, pools, logs, carrier)
    tokenizer = load_tokenizer(config.model)
    tokenizer.chat_template = chat_template(tokenizer, config.data)  # so that the exported model has it too
    for line in template_remarks(tokenizer, learns=False):
        print(line, flush=True)
    environment = None
    if config.environment.is_used:
        environment = Environment(config, tokenizer, open_environments(config, logs))
    stopping = open_stopping(run, config.slurm.warning_s, ())
    tools = environment.schemas if environment else [] if config.agent.is_used else None
    train, val, mixture = load_data(config, tokenizer, tools, run, stopping)
    rollout.wait_before_workers(model_s)
    starting = [group.start() for group in groups.values()]
    of_role = {role: groups[pool_of(config, role)] for role in config.roles if role != "rollout"}
    agents = open_agents(config, rollout.queue, tokenizer, run, logs)
    scoring = open_scoring(config, of_role, tokenizer, environment or agents)
    queue = agents or (Conversations(rollout.queue, environment, config) if environment else rollout.queue)
    wait_for_all(starting, "models", MODEL_LIMIT, model_s)
    rollout.wait_until_ready(model_s)

    actor, critic = of_role["actor"], of_role.get("critic")
    total_steps = config.trainer.total_training_steps or (
        config.trainer.total_epochs * (len(train) // config.data.train_batch_size)
    )
    models = WorkerModels(actor, critic)
    progress = load_progress(config, run, models, len(train), total_steps)
    rows = decide_rows(config, groups.values(), progress)
    lora = config.model.lora
    if progress is not None or lora.is_used:
        rollout.sync()
    rollout.lent.open()
    flops, peak = actor.flops().wait()
    step, records = progress.step if progress else 0, read_metrics(run.metrics)
    stopping.remember(records)
    kl = config.algorithm.kl
    coef = progress.kl_coef if progress and progress.kl_coef is not None else kl.coef
    check = AdapterCheck(progress is None and lora.path is None) if lora.is_used else None
    computed = computed_columns(config, of_role)
    start = Position(progress.epoch, progress.index) if progress else Position()
    batches = open_batches(
        config, train, rollout.queue, queue, scoring, start, step, total_steps, check, computed, mixture
    )
    return PpoState(
        config=config,
        run=run,
        tokenizer=tokenizer,
        train=train,
        val=val,
        groups=list(dict.fromkeys(of_role[role] for role in ("actor", "critic", "ref", "teacher") if role in of_role)),
        actor=actor,
        critic=critic,
        computed=computed,
        carrier=carrier,
        rollout=rollout,
        queue=queue,
        scoring=scoring,
        batches=batches,
        old_logprobs=old_logprobs(config),
        adapter_check=check,
        gpus=sum(len(pool.slots) for pool in pools.values()),
        flops=flops,
        peak=peak,
        total_steps=total_steps,
        tracker=Tracker(config, run, progress.wandb_id if progress else None, is_main=True),
        saver=Saver(
            run.checkpoints, models, ONE_PROCESS, config.trainer.max_ckpt_to_keep, not config.trainer.save_async
        ),
        stopping=stopping,
        rows=rows,
        validates_first=bool(val)
        and (validation_is_due(config.trainer, step, total_steps) if step else config.trainer.val_before_train)
        and not has_validation(records, step),
        kl=AdaptiveKl(coef, kl.target, kl.horizon),
        step=step,
        total_tokens=progress.total_tokens if progress else 0,
        saved_step=step,
    )


def training_nodes(config: PpoConfig, pools: Mapping[str, Pool]) -> list[str]:
    """Return Ray's ids of the nodes of all roles but the rollout's."""
    names = dict.fromkeys(pool_of(config, role) for role in config.roles if role != "rollout")
    return list(dict.fromkeys(slot.node.id for name in names for slot in pools[name].slots))


def start_workers(
    config: PpoConfig, pools: Mapping[str, Pool], logs: Path, carrier: Carrier
) -> tuple[dict[str, WorkerGroup], Rollout]:
    """Start the processes of every pool without waiting for them. Return the groups by pool, and the engine."""
    engine_pool = pool_of(config, "rollout")
    has_own = config.rollout.engines == "own"
    in_process = has_own and engine_spec(config).in_process and engine_pool == pool_of(config, "actor")
    groups = {}
    for name, pool in pools.items():
        roles = frozenset(role for role in config.roles if pool_of(config, role) == name)
        if name == engine_pool and not in_process:
            roles -= {"rollout"}
        if roles:
            share = 0.5 if name == engine_pool and has_own and not in_process else 1.0
            groups[name] = WorkerGroup(config, pool, roles, share, logs, carrier)
    if in_process:
        return groups, InProcessRollout(groups[engine_pool], config, config.trainer.uses_gpus, logs)
    if not has_own:
        return groups, LentRollout(groups[pool_of(config, "actor")], config, logs)
    neighbours = groups.get(engine_pool)
    share = 0.5 if neighbours else 1.0
    policy = groups[pool_of(config, "actor")]
    return groups, SeparateRollout(config, pools[engine_pool], share, policy, neighbours, logs)


def load_data(
    config: PpoConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] | None,
    run: RunDir,
    stopping: Stopping,
) -> tuple[Sequence[Prompt], Sequence[Prompt], Mixture | None]:
    """Load training and validation prompts, and print their counts. The third value is the shares of the files of
    training prompts, if they have weights.

    Args:
        tools: see PromptLoader.

    Raises:
        UserError: the data is not valid.
        Stopped: the run stops before the data is tokenized.
    """
    files, batch_size = config.data.train_files, config.data.train_batch_size
    loader = PromptLoader(config, tokenizer, tools, run, stopping)
    parts = []
    for some in [[file] for file in files] if isinstance(files, dict) else [files]:
        prompts, counts = loader.load(some, "train")
        print(f"training data{f', {some[0]}' if isinstance(files, dict) else ''}: {counts}", flush=True)
        parts.append(prompts)
    train = Joined(*parts)
    if len(train) < batch_size:
        raise UserError(
            f"data.train_batch_size is {batch_size}, but the training data has only {counted(len(train), 'prompt')}: "
            "lower data.train_batch_size, or add data"
        )
    mixture = None
    if isinstance(files, dict):
        mixture = Mixture.of(files, list(map(len, parts)), whole_batches(len(train), batch_size))
        print(mixture.describe(files), flush=True)
    if not config.data.val_files:
        return train, [], mixture
    val, counts = loader.load(config.data.val_files, "test")
    print(f"validation data: {counts}", flush=True)
    return train, val, mixture


def load_progress(
    config: PpoConfig, run: RunDir, models: TrainedModels, prompts: int, total_steps: int
) -> Progress | None:
    """Load the newest checkpoint into the workers, and say what is left; None if the run has no checkpoint.

    Raises:
        UserError: no checkpoint can be used, or the newest one was trained with other data or other quantization.
    """
    progress = checkpoint.load_latest(run.checkpoints, models, ONE_PROCESS)
    if progress is None:
        return None
    checkpoint.refuse_other_data(run.checkpoints, progress, prompts)
    checkpoint.refuse_other_quantize(run.checkpoints, progress, config.model.lora.quantize)
    left = "" if progress.step < total_steps else f", the last of {total_steps}: only the export remains"
    print(f"resuming after step {progress.step}{left}; from {run.checkpoints}", flush=True)
    return progress


def open_agents(
    config: PpoConfig, queue: RequestQueue, tokenizer: PreTrainedTokenizerBase, run: RunDir, logs: Path
) -> Agents | None:
    """Open the endpoint for agents, and start agent.command; None if responses are written without agents."""
    if not config.agent.is_used:
        return None
    address = "127.0.0.1" if config.agent.endpoint == "loopback" else ray.util.get_node_ip_address()
    return Agents(queue, config, tokenizer, address, run, logs)


def open_scoring(
    config: PpoConfig,
    of_role: Mapping[Role, WorkerGroup],
    tokenizer: PreTrainedTokenizerBase,
    environment: Converses | None = None,
) -> Scoring:
    """Open the configured source of rewards. Raises UserError if the reward function cannot be loaded."""
    if environment is not None:
        alone = config.updated("reward.clip", None).updated("reward.on_error", None)
        other = open_scoring(alone, of_role, tokenizer) if config.reward.sources else None
        missing = None if config.needs_scores else 0.0
        return EnvironmentScoring(environment, other, config.reward, tokenizer, missing)
    if config.reward.model is not None:
        return ModelScoring(of_role["reward"], config.reward)
    if not config.reward.sources:
        return NoScoring()
    return FunctionScoring(open_scorer(config.reward), tokenizer)


def open_batches(
    config: PpoConfig,
    train: Sequence[Prompt],
    engines: RequestQueue,
    queue: Respondent,
    scoring: Scoring,
    start: Position,
    step: int,
    total_steps: int,
    adapter_check: AdapterCheck | None,
    computed: ComputedColumns,
    mixture: Mixture | None = None,
) -> BatchSource:
    """Return where the loop gets its batches from; see rollout.staleness.

    Until the checks of adapters have succeeded, steps generate their own responses: others were not sampled with the
    weights that the checks compare.
    """
    if config.rollout.staleness:

        def staleness() -> int:
            return 0 if adapter_check is not None and adapter_check.next is not None else config.rollout.staleness

        return AsynchronousBatches(config, train, engines, queue, scoring, start, step, total_steps, staleness, mixture)
    return SynchronousBatches(config, train, queue, scoring, start, computed, mixture)


def computed_columns(config: PpoConfig, of_role: Mapping[Role, WorkerGroup]) -> ComputedColumns:
    """Return the columns that workers compute for a step.

    They are computed during generation where the engines have other GPUs. Exceptions: with rollout.staleness, another
    batch is trained at this time; some carriers take the responses of a step all at once.
    """
    lora, mini_batch_size = config.model.lora.is_used, config.actor.mini_batch_size
    roles: dict[str, tuple[Role, str]] = {}
    if old_logprobs(config) == "recompute":
        roles["old_logprobs"] = "actor", "logprobs"
    if config.algorithm.kl.where != "none":
        roles["ref_logprobs"] = "actor" if lora else "ref", "ref_logprobs"
    if "teacher" in of_role:
        roles["teacher_logprobs"] = "teacher", "teacher_logprobs"
    if "critic" in of_role:
        roles["values"] = "critic", "values"
    needed, engines = needed_by_driver(config), pool_of(config, "rollout") if config.rollout.engines == "own" else None
    in_parts = mini_batch_size is not None and config.carrier_spec.in_parts and not config.rollout.staleness
    computations = {
        name: Computation(
            of_role[role],
            method,
            is_early=in_parts and pool_of(config, role) != engines,
            stays=name not in needed,
        )
        for name, (role, method) in roles.items()
    }
    return ComputedColumns(computations, responses_per_step(config), mini_batch_size)


def needed_by_driver(config: PpoConfig) -> frozenset[str]:
    """Return the columns from the ranks with which the driver computes. The others may stay with the carrier.

    The loop needs them for advantages (see `hpc_rl.rl.loop.experience`), for the correction, and for metrics.
    """
    algorithm = config.algorithm
    needed = {"teacher_logprobs", "values"}
    if algorithm.kl.where == "reward":
        needed |= {"old_logprobs", "ref_logprobs"}
    if config.teacher.path is not None or algorithm.corrects or config.rollout.calculate_log_probs:
        needed.add("old_logprobs")
    return frozenset(needed)


def old_logprobs(config: PpoConfig) -> OldLogprobs:
    """Decide where the policy's log-probabilities before a step's updates come from.

    skip: nothing needs them, since the ratios of a step's only update are 1.
    rollout: from the engine, which computed them with the trainer's float32 weights, so they equal the trainer's.
    recompute: from a forward pass.

    If responses may be stale (rollout.staleness), the weights before the step's updates are not those that sampled
    them. With a correction, the loss is that of decoupled PPO (https://arxiv.org/abs/2110.00641): ratios to the weights
    before the updates are clipped, and the ratio of these to the weights that sampled corrects the loss. Without one,
    ratios are those to the weights that sampled.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.staleness and not algorithm.corrects:
        return "rollout"
    if algorithm.corrects or rollout.calculate_log_probs:
        return "recompute"  # they are compared with the engine's
    compares = algorithm.kl.where == "reward" or config.teacher.path is not None
    if updates_per_step(config) == 1 and not compares:
        return "skip"
    device, dtype = config.trainer.computes_on, config.model.dtype
    exact = device in engine_spec(config).exact_on and dtype == engine_dtype(rollout, device) == "float32"
    return "rollout" if exact else "recompute"


def responses_per_step(config: PpoConfig) -> int:
    """Return the number of responses of one step."""
    return config.data.train_batch_size * config.rollout.n


def updates_per_step(config: PpoConfig) -> int:
    """Return the number of optimizer steps of one step."""
    batches = len(mini_batches(responses_per_step(config), config.actor.mini_batch_size))
    return batches * config.actor.ppo_epochs


def describe_step(config: PpoConfig) -> str:
    """Return a line such as `64 prompts x 8 = 512 responses = 4 mini-batches of 128, x 1 epoch = 4 updates`."""
    prompts, n, epochs = config.data.train_batch_size, config.rollout.n, config.actor.ppo_epochs
    responses = responses_per_step(config)
    size = config.actor.mini_batch_size or responses
    count = len(mini_batches(responses, size))
    batches = f"{count} mini-batches of {size:,}" if count > 1 else "1 mini-batch"
    updates = updates_per_step(config)
    return (
        f"each step: {counted(prompts, 'prompt')} x {n} = {counted(responses, 'response')} = {batches}, "
        f"x {counted(epochs, 'epoch')} = {counted(updates, 'update')}"
    )
