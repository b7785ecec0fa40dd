"""The losses of actor and critic on responses with observations, against plain loops over single samples."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import nn

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.loop import experience as columns
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.workers.actor import Actor
from hpc_rl.rl.workers.critic import Critic
from hpc_rl.rl.workers.group import _joining
from hpc_rl.rl.workers.learner import Learner, Parts
from hpc_rl.rl.workers.logprobs import shard_logprobs
from hpc_rl.rl.workers.packed_shard import pack_shard
from hpc_rl.training.models.causal_lm import CausalLM
from hpc_rl.training.parallel.distributed import World
from tests.helpers import make_tiny_model
from tests.rl.ppo_config import ppo_config
from tests.rl.test_observations import group_of

ALONE = World(0, 1, torch.device("cpu"))
TEMPERATURE, GAMMA, LAM = 0.7, 0.9, 0.8
SCORES = [1.0, -0.5, 2.0, 0.25]
MASKS = [[1, 1, 0, 0, 0, 1, 1], [1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 1, 0, 1]]
"""Whether the policy sampled the token: several turns, one turn, an observation at the end, one at the beginning."""
PROMPTS = [4, 2, 3, 5]
SPLITS = {"one row": (1, 200), "single samples": (1, 12), "two ranks": (2, 200)}
"""Number of ranks, and tokens of a micro-batch."""


class Sample(NamedTuple):
    """A prompt and its response, and one number per sampled token."""

    ids: NDArray[np.int64]
    places: list[int]
    """Where its sampled tokens are."""
    old: list[float]
    ref: list[float]
    rollout: list[float]
    values: list[float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def config_of(model: Path, *overrides: str) -> PpoConfig:
    discounts = (f"algorithm.gamma={GAMMA}", f"algorithm.lam={LAM}", f"rollout.temperature={TEMPERATURE}")
    return ppo_config(f"model.path={model}", *discounts, "trainer.sharding=none", *overrides)


def samples() -> list[Sample]:
    rng = np.random.default_rng(5)
    found = []
    for prompt, mask in zip(PROMPTS, MASKS, strict=True):
        places = [prompt + token for token, sampled in enumerate(mask) if sampled]
        numbers = [rng.normal(-5.5, 0.3, len(places)).astype(np.float32).tolist() for _ in range(3)]
        values = rng.normal(size=len(places)).astype(np.float32).tolist()
        found.append(Sample(rng.integers(5, 250, prompt + len(mask)), places, *numbers, values))
    return found


def experience_of(config: PpoConfig) -> TensorDict:
    """The same samples after the driver's part of a step."""
    completions = []
    for sample, prompt, mask in zip(samples(), PROMPTS, MASKS, strict=True):
        logprobs = np.zeros(len(sample.ids), np.float32)
        logprobs[sample.places] = sample.rollout
        own = None if all(mask) else np.array(mask, np.bool_)
        completions.append(Completion(sample.ids[prompt:].astype(np.int32), logprobs[prompt:], True, mask=own))
    prompts = [sample.ids[:prompt].astype(np.int32) for sample, prompt in zip(samples(), PROMPTS, strict=True)]
    experience = columns.new_experience(prompts, range(4), completions)
    for name, of in {"old_logprobs": "old", "ref_logprobs": "ref", "values": "values"}.items():
        numbers = [number for sample in samples() for number in getattr(sample, of)]
        experience[name] = columns.jagged(torch.tensor(numbers), columns.lengths(experience))
    columns.add_scores(experience, torch.tensor(SCORES), config)
    columns.add_rewards(experience, config.algorithm, 0.0)
    columns.add_advantages(experience, config.algorithm, None)
    return experience


def trained(
    learner: Learner, experience: TensorDict, split: str, token_columns: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradients that the ranks add up to, and the sums of the metrics."""
    ranks, micro_tokens = SPLITS[split]
    group, shards = group_of(experience, micro_tokens, ranks)
    assignment, _ = group._assigned
    parts: Parts = {}
    for rank, shard in enumerate(shards):
        own_parts = {name: assignment.split(one.values().numpy())[rank] for name, one in token_columns.items()}
        none = np.zeros(0, np.float32)
        mine = {name: torch.from_numpy(np.concatenate([none, *own])) for name, own in own_parts.items()}
        for micro in pack_shard(shard, ALONE.device).micro_batches():
            here = {name: column[micro.tokens] for name, column in mine.items()}
            learner.loss(micro, here, parts).backward()
    found = {name: p.grad.clone() for name, p in learner.model.hf.named_parameters() if p.grad is not None}
    return found, {name: float(torch.stack(values).sum()) for name, values in parts.items()}


def plain_advantages() -> tuple[list[list[float]], list[list[float]]]:
    """GAE, whitened, and returns: backwards over all tokens, of which observations change nothing."""
    advantages, returns = [], []
    for sample, score in zip(samples(), SCORES, strict=True):
        values = dict(zip(sample.places, sample.values, strict=True))
        after = advantage = 0.0
        own, targets, reward = [], [], score
        for place in reversed(range(len(sample.ids))):
            if place in values:
                error = reward + GAMMA * after - values[place]
                advantage = error + GAMMA * LAM * advantage
                own.insert(0, advantage)
                targets.insert(0, advantage + values[place])
                after, reward = values[place], 0.0
        advantages.append(own)
        returns.append(targets)
    every = np.concatenate(advantages)
    return [((np.array(row) - every.mean()) / (every.var() + 1e-8) ** 0.5).tolist() for row in advantages], returns


def plain_logprobs(model: nn.Module, sample: Sample) -> torch.Tensor:
    """Log-probabilities of the tokens after each position, under a model without packing: [P, V]."""
    logits = model(input_ids=torch.from_numpy(sample.ids)[None]).logits[0]
    logprobs: torch.Tensor = (logits / TEMPERATURE).log_softmax(dim=-1)
    return logprobs


def objective(name: str, log_ratio: torch.Tensor, logprob: torch.Tensor, advantage: float) -> torch.Tensor:
    """The loss of one token, with the bounds 0.8 and 1.2, and 3 for a negative advantage; cispo has no lower bound."""
    ratio = log_ratio.exp()
    if name == "cispo":
        return -ratio.detach().clamp(max=1.2) * advantage * logprob
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
    return torch.minimum(loss, torch.tensor(-3.0 * advantage)) if name == "ppo" and advantage < 0 else loss


def plain_gradients(model: nn.Module, config: PpoConfig) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients and sums of the actor, token by token."""
    algorithm, total = config.algorithm, torch.zeros(())
    sums = dict.fromkeys(("tokens", "entropy", "kl", "kl_loss", "pg_loss"), 0.0)
    tokens = sum(map(sum, MASKS))
    for sample, advantages in zip(samples(), plain_advantages()[0], strict=True):
        logprobs_PV = plain_logprobs(model, sample)
        new = [logprobs_PV[place - 1, sample.ids[place]] for place in sample.places]
        log_ratios = [n - o for n, o in zip(new, sample.old, strict=True)]
        corrections = [o - r for o, r in zip(sample.old, sample.rollout, strict=True)]
        for i, place in enumerate(sample.places):
            log_ratio = log_ratios[i]
            if algorithm.loss == "gspo":  # the value of the mean, the gradient of the token
                mean = sum(log_ratios) / len(log_ratios)  # type: ignore[arg-type]
                log_ratio = mean.detach() + log_ratio - log_ratio.detach()
            correction = {
                "token": corrections[i],
                "sequence": sum(corrections),
                "geometric": sum(corrections) / len(corrections),
            }[algorithm.tis_level]
            weight = {"token-mean": 1 / tokens, "seq-mean-token-mean": 1 / len(new) / 4}[algorithm.loss_agg]
            loss = objective(algorithm.loss, log_ratio, new[i], advantages[i]) * min(np.exp(correction), 1.1)
            sums["pg_loss"] += loss.item() * weight
            entropy = -(logprobs_PV[place - 1].exp() * logprobs_PV[place - 1]).sum()
            kl = (sample.ref[i] - new[i]).exp() - 1 - (sample.ref[i] - new[i])
            total = total + weight * (loss + algorithm.kl.coef * kl - algorithm.entropy_coeff * entropy)
            sums["tokens"] += 1
            sums["entropy"] += entropy.item()
            sums["kl"] += sample.old[i] - new[i].item()
            sums["kl_loss"] += kl.item()
    model.zero_grad()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sums


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("loss", "aggregation", "level"),
    [
        ("ppo", "token-mean", "token"),
        ("gspo", "seq-mean-token-mean", "sequence"),
        ("cispo", "token-mean", "geometric"),
    ],
)
def test_the_actors_gradient_is_that_of_its_own_tokens(
    model: Path, loss: str, aggregation: str, level: str, split: str
) -> None:
    config = config_of(
        model,
        *(f"algorithm.loss={loss}", f"algorithm.loss_agg={aggregation}", f"algorithm.tis_level={level}"),
        *("algorithm.tis_cap=1.1", "algorithm.kl={where: loss, coef: 0.3, estimator: k3}"),
        *("algorithm.entropy_coeff=0.05", f"algorithm.clip_ratio_low={1 if loss == 'cispo' else 0.2}"),
        "algorithm.clip_ratio_high=0.2",
        *(["algorithm.clip_ratio_c=3"] if loss == "ppo" else []),
    )
    actor, experience = Actor(config, ALONE), experience_of(config)
    gradients, sums = trained(actor, experience, split, trainer.actor_columns(experience, config, None))
    expected, expected_sums = plain_gradients(plain_model(model), config)
    close(gradients, expected)
    for name, value in expected_sums.items():
        assert sums[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def plain_model(model: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    found: nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_the_critics_gradient_is_that_of_the_policys_tokens(model: Path, split: str) -> None:
    config = config_of(model, "critic.cliprange_value=null")
    critic, experience = Critic(config, ALONE), experience_of(config)
    torch.nn.init.normal_(critic.model.head.weight, generator=torch.Generator().manual_seed(1))
    gradients, sums = trained(critic, experience, split, trainer.critic_columns(experience, config, None))
    backbone, head = plain_model(model).model, critic.model.head.weight.detach().clone().requires_grad_()
    total = torch.zeros(())
    for sample, returns in zip(samples(), plain_advantages()[1], strict=True):
        hidden_PH = backbone(input_ids=torch.from_numpy(sample.ids)[None]).last_hidden_state[0]
        for place, target in zip(sample.places, returns, strict=True):
            total = total + 0.5 * (hidden_PH[place - 1] @ head[0] - target).square() / sum(map(sum, MASKS))
    total.backward()
    expected = {f"model.{name}": p.grad for name, p in backbone.named_parameters() if p.grad is not None}
    close(gradients, {**expected, "score.weight": head.grad})
    assert sums["tokens"] == sum(map(sum, MASKS))


@pytest.mark.parametrize("split", SPLITS)
def test_observations_are_context(model: Path, split: str) -> None:
    """Log-probabilities are those of a model that reads the whole response; another observation changes them."""
    config = config_of(model)
    policy, experience = Actor(config, ALONE).model, experience_of(config)
    expected = [plain_logprobs(plain_model(model), sample) for sample in samples()]
    wanted = [
        logprobs_PV[place - 1, sample.ids[place]].item()
        for sample, logprobs_PV in zip(samples(), expected, strict=True)
        for place in sample.places
    ]
    found = found_logprobs(policy, experience, split)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    columns.flat(experience, "response_ids")[3] += 1  # the second token of the observation in the first response
    other = found_logprobs(policy, experience, split)
    assert (np.flatnonzero(np.abs(other - found) > 1e-7)).tolist() == [2, 3]  # the first response's second turn


def found_logprobs(policy: CausalLM, experience: TensorDict, split: str) -> NDArray[np.float32]:
    """A token column, flat, as the ranks of `split` compute it."""
    ranks, micro_tokens = SPLITS[split]
    group, shards = group_of(experience, micro_tokens, ranks)
    parts = [shard_logprobs(policy, pack_shard(shard, ALONE.device), TEMPERATURE) for shard in shards]
    column = _joining(*group._assigned)(parts)
    assert torch.equal(column.offsets(), experience["rollout_logprobs"].offsets())
    found: NDArray[np.float32] = column.values().numpy()
    return found
