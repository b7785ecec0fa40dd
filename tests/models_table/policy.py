"""Steps of GRPO with the engine `hf` in this process: what the driver and the workers of a run compute, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hpc_rl.rl.loop import experience as columns
from hpc_rl.rl.loop.trainer import actor_columns
from hpc_rl.rl.rollout.engine import Sampling, complete
from hpc_rl.rl.rollout.hf.engine import HfEngine
from hpc_rl.rl.workers.actor import Actor
from hpc_rl.rl.workers.logprobs import shard_logprobs
from hpc_rl.rl.workers.packed_shard import pack_shard
from tests.finetune.jobs import ALONE
from tests.rl.ppo_config import ppo_config
from tests.rl.test_observations import group_of

OPTIONS = (
    *(
        "algorithm.advantage=grpo",
        "actor.optim.lr=1e-3",
        "actor.optim.lr_scheduler=constant",
        "actor.mini_batch_size=4",
    ),
    *("actor.optim.warmup_ratio=0", "data.train_batch_size=2", "rollout.n=4", "data.max_prompt_length=32"),
)
PROMPTS = (5, 23)
SIBLINGS = 4


class GrpoStep(NamedTuple):
    """What a step shows."""

    difference: float
    """The largest one between the log-probabilities of engine and trainer."""
    norm: float
    """Mean norm of the gradients."""


def grpo_steps(path: Path, *options: str, count: int = 2) -> list[GrpoStep]:
    """Sample responses, give a reward for small token ids, and update the policy, which is the engine's model."""
    config = ppo_config(f"model.path={path}", *OPTIONS, *options)
    actor = Actor(config, ALONE)
    engine = HfEngine(actor.model.hf, ())
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, length).astype(np.int32) for length in PROMPTS for _ in range(SIBLINGS)]
    found = []
    for step in range(count):
        seeds = range(step * len(prompts), (step + 1) * len(prompts))
        completions = complete(engine, prompts, seeds, Sampling(8))
        experience = columns.new_experience(prompts, [index // SIBLINGS for index in range(len(prompts))], completions)
        rewards_B = torch.tensor([float((one.token_ids < 100).mean()) for one in completions])
        columns.add_scores(experience, rewards_B, config)
        group, (shard,) = group_of(experience, 256)
        held, (assignment, _) = pack_shard(shard, ALONE.device), group._assigned
        logprobs_N = assignment.join([shard_logprobs(actor.model, held, 1.0)])
        rollout_N = columns.flat(experience, "rollout_logprobs").numpy()
        experience["old_logprobs"] = columns.jagged(torch.from_numpy(logprobs_N), columns.lengths(experience))
        columns.add_rewards(experience, config.algorithm, 0.0)
        columns.add_advantages(experience, config.algorithm, None)
        own = {
            name: torch.from_numpy(np.concatenate(assignment.split(column.values().numpy())[0]))
            for name, column in actor_columns(experience, config, None).items()
        }
        sums = actor.update(held, own, step, count, epochs=1)
        difference = float(np.abs(logprobs_N - rollout_N).max())
        found.append(GrpoStep(difference, sums["grad_norm"] / sums["updates"]))
    return found
