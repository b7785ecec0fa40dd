"""From a configuration to a run that is ready to go: pools, workers, engine, data, and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.algorithms.kl import AdaptiveKl
from hpc_rl.config.ppo import PpoConfig, engine_spec, pool_of, pool_spec, roles_in_use
from hpc_rl.data.chat import chat_template
from hpc_rl.data.prompts import Prompt, load_prompts
from hpc_rl.errors import UserError
from hpc_rl.rewards.scorer import open_scorer
from hpc_rl.rl import checkpoints, plan
from hpc_rl.rl.batches import Sampler
from hpc_rl.rl.pools import Pool, create_pools
from hpc_rl.rl.rollout.rollout import InProcessRollout, Rollout, SeparateRollout
from hpc_rl.rl.scoring import FunctionScoring, ModelScoring, Scoring
from hpc_rl.rl.state import State
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.tracker import open_tracker
from hpc_rl.training.checkpoint import refuse_other_data
from hpc_rl.training.model import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def set_up(config: PpoConfig, run: RunDir, logs: Path) -> State:
    """Start everything at once, then wait for it.

    Args:
        logs: folder for the workers' logs.

    Raises:
        UserError: what the user asked for cannot work.
        RunError: workers did not start in time, or died.
    """
    timeout_s = config.ray.start_timeout_s
    print(plan.describe(config), flush=True)
    pools = create_pools(pool_spec(config), config.trainer.device, timeout_s, str(logs), config.pools.strategy)
    groups, rollout = start_workers(config, pools, logs)
    tokenizer = load_tokenizer(config.model)
    tokenizer.chat_template = chat_template(tokenizer, config.data)  # the exported model has it too
    train, val = load_data(config, tokenizer)
    rollout.wait_before_workers(timeout_s)
    starting = [group.start() for group in groups.values()]
    of_role = {role: groups[pool_of(config, role)] for role in roles_in_use(config) if role != "rollout"}
    scoring = open_scoring(config, of_role, tokenizer)
    for pending in starting:
        pending.wait(timeout_s)
    rollout.wait_until_ready(timeout_s)

    actor, critic = of_role["actor"], of_role.get("critic")
    progress = checkpoints.load_latest(run, actor, critic)
    if progress is not None:
        refuse_other_data(run.checkpoints, progress, len(train))
        rollout.sync()
    flops, peak = actor.flops().wait()
    kl = config.algorithm.kl
    steps = config.trainer.total_epochs * (len(train) // config.data.train_batch_size)
    total_steps = config.trainer.total_training_steps or steps
    if progress is not None:
        left = "" if progress.step < total_steps else f", the last of {total_steps}: only the export is left"
        print(f"going on after step {progress.step}{left}; from {run.checkpoints}", flush=True)
    coef = progress.kl_coef if progress and progress.kl_coef is not None else kl.coef
    return State(
        config=config,
        run=run,
        tokenizer=tokenizer,
        train=train,
        val=val,
        groups=list(dict.fromkeys(of_role[role] for role in ("actor", "critic", "ref") if role in of_role)),
        actor=actor,
        critic=critic,
        reference=of_role.get("ref"),
        rollout=rollout,
        scoring=scoring,
        sampler=Sampler(config, train, rollout, scoring, checkpoints.position_of(progress)),
        old_logprobs=plan.old_logprobs(config),
        gpus=sum(len(pool.slots) for pool in pools.values()),
        flops=flops,
        peak=peak,
        total_steps=total_steps,
        tracker=open_tracker(config, run, progress.wandb_id if progress else None, is_main=True),
        kl=AdaptiveKl(coef, kl.target, kl.horizon),
        step=progress.step if progress else 0,
        total_tokens=progress.total_tokens if progress else 0,
    )


def start_workers(config: PpoConfig, pools: Mapping[str, Pool], logs: Path) -> tuple[dict[str, WorkerGroup], Rollout]:
    """Begin to start the processes of every pool; groups by pool, and the engine."""
    engine_pool = pool_of(config, "rollout")
    in_process = engine_spec(config).in_process and engine_pool == pool_of(config, "actor")
    groups = {}
    for name, pool in pools.items():
        roles = frozenset(role for role in roles_in_use(config) if pool_of(config, role) == name)
        if name == engine_pool and not in_process:
            roles -= {"rollout"}
        if roles:
            share = 0.5 if name == engine_pool and not in_process else 1.0
            groups[name] = WorkerGroup(config, pool, roles, share, logs)
    if in_process:
        return groups, InProcessRollout(groups[engine_pool], frees_memory=config.trainer.device == "cuda")
    neighbours = groups.get(engine_pool)
    share = 0.5 if neighbours else 1.0
    policy = groups[pool_of(config, "actor")]
    return groups, SeparateRollout(config, pools[engine_pool], share, policy, neighbours, logs)


def load_data(config: PpoConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], list[Prompt]]:
    """Training and validation prompts; prints their counts."""
    train, counts = load_prompts(config.data.train_files, config.data, tokenizer, "train")
    print(f"training data: {counts}", flush=True)
    if len(train) < config.data.train_batch_size:
        raise UserError(
            f"data.train_batch_size is {config.data.train_batch_size}, and the training data has {len(train)} prompts: "
            "lower it, or give more data"
        )
    if not config.data.val_files:
        return train, []
    val, counts = load_prompts(config.data.val_files, config.data, tokenizer, "test")
    print(f"validation data: {counts}", flush=True)
    return train, val


def open_scoring(config: PpoConfig, of_role: Mapping[str, WorkerGroup], tokenizer: PreTrainedTokenizerBase) -> Scoring:
    if config.reward.model is not None:
        return ModelScoring(of_role["reward"], config.reward)
    return FunctionScoring(open_scorer(config.reward), tokenizer)
