"""The section `algorithm` of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from hpc_rl.config.base import Section


class KlConfig(Section):
    where: Literal["none", "reward", "loss"] = "none"
    """Where to penalise divergence from the reference policy: in the reward, in the loss, or not at all."""
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k1"
    """Estimator of the KL divergence (http://joschu.net/blog/kl-approx.html). k3 is the usual choice in the loss. k3+
    has the value of k3 and, in the loss, an unbiased gradient (https://arxiv.org/abs/2506.09477)."""
    coef: float = Field(0.001, ge=0)
    """Coefficient of the KL divergence. If target is set, its initial value."""
    target: float | None = Field(None, gt=0)
    """KL divergence per response that an adaptive coefficient aims at (where=reward only). null: the coefficient is
    fixed."""
    horizon: int = Field(10_000, ge=1)
    """Number of responses over which an adaptive coefficient changes."""

    def problems(self) -> Iterator[str]:
        if self.target is not None and self.where != "reward":
            yield "algorithm.kl.target adapts the KL penalty in the reward: set algorithm.kl.where=reward"
        if self.where == "loss" and self.estimator == "k1":
            yield "algorithm.kl.estimator=k1 has no gradient on average: with kl.where=loss use k2, k3 or k3+"


class AlgorithmConfig(Section):
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opd"] = (
        "gae"
    )
    """Estimator of advantages. Only gae trains a critic. opd (on-policy distillation) learns from teacher.path alone
    and needs no reward."""
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Objective of the policy: ppo (clipped ratio per token), gspo (clipped ratio per response) or cispo (REINFORCE
    with capped ratios as weights)."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses are combined: the mean over all tokens; the mean over responses of each response's mean, of its
    sum, or of its sum divided by max_response_length (Dr. GRPO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation by which grpo divides advantages. group: of the scores of a prompt's responses. batch: of all
    scores of the step. none: no division."""
    mask_truncated: bool = False
    """Leave responses that were cut at max_response_length out of the loss (DAPO's overlong filtering)."""
    clip_ratio_low: float = Field(0.2, gt=0)
    """Lower clip: how far the probability ratio may fall below 1. With loss=gspo, whose ratios are of whole responses,
    about 3e-4 is usual. With loss=cispo, which has no lower bound, set it to 1."""
    clip_ratio_high: float = Field(0.2, gt=0)
    """Upper clip: how far the probability ratio may exceed 1 (0.28 in DAPO). With loss=cispo, ratios are capped at 1
    plus this value."""
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """Dual clip: upper bound of the probability ratio of tokens with a negative advantage. null: no bound."""
    entropy_coeff: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount factor per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation (advantage=gae)."""
    kl: KlConfig = KlConfig()
    filter_groups: bool = False
    """Replace prompts whose responses all have the same score by newly sampled ones (DAPO's dynamic sampling)."""
    max_gen_batches: int = Field(10, ge=1)
    """Largest number of prompt batches that filter_groups samples for one step. If they do not suffice, the run
    fails."""
    overlong_buffer: int = Field(0, ge=0)
    """Number of tokens before max_response_length over which a length penalty rises linearly (DAPO's soft overlong
    punishment). 0: no penalty."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Largest length penalty, for responses of max_response_length tokens (see overlong_buffer)."""
    tis_cap: float | None = Field(None, gt=0)
    """Truncated importance sampling: weight each token's loss by the ratio of the trainer's to the rollout engine's
    probability, capped at this value. null: no weighting."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio that tis_cap and tis_bounds apply to. token: that of each token. sequence: the product over the response.
    geometric: the geometric mean over the response."""
    tis_bounds: tuple[float, float] | None = None
    """Lowest and highest ratio of the trainer's to the rollout engine's probability, as [low, high]. Tokens with other
    ratios are left out of the loss. null: no bounds."""

    @property
    def corrects(self) -> bool:
        """Whether losses are weighted by the difference between trainer and engine."""
        return self.tis_cap is not None or self.tis_bounds is not None

    def problems(self) -> Iterator[str]:
        if self.loss == "cispo" and self.clip_ratio_low < 1:
            yield (
                f"algorithm.clip_ratio_low is {self.clip_ratio_low:g}, but algorithm.loss=cispo has no lower bound: "
                "use the preset algorithm=cispo, or set algorithm.clip_ratio_low=1"
            )
        if self.scale_rewards != "group" and self.advantage != "grpo":
            yield (
                f"algorithm.scale_rewards has no effect with algorithm.advantage={self.advantage}: use "
                "algorithm.advantage=grpo, or remove it"
            )
        if self.tis_bounds is not None and not 0 <= self.tis_bounds[0] < self.tis_bounds[1]:
            low, high = self.tis_bounds
            yield f"algorithm.tis_bounds is [{low:g}, {high:g}]: give two ratios of at least 0, the lower one first"
        if self.tis_level != "token" and not self.corrects:
            yield (
                f"algorithm.tis_level={self.tis_level} has no effect without a correction: set algorithm.tis_cap or "
                "algorithm.tis_bounds, or remove it"
            )
        if self.filter_groups and self.advantage == "remax":
            yield (
                "algorithm.filter_groups needs several responses per prompt, and algorithm.advantage=remax uses one "
                "and a greedy one: choose another estimator, or set filter_groups=false"
            )
