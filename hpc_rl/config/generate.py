"""Options of generation as a job (`submit generate`) and of evaluation (`submit eval`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from hpc_rl.config.base import Section, SomeFiles
from hpc_rl.config.environment import EnvironmentConfig
from hpc_rl.config.pools import PoolsConfig, Role, pool_problems
from hpc_rl.config.prompts import PromptConfig
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.reward import OptionalRewardConfig, require_reward
from hpc_rl.config.rollout import EngineConfig, engine_problems
from hpc_rl.config.training import ModelSource, RecordedConfig, Sharding


class GenerateDataConfig(PromptConfig):
    files: SomeFiles
    """Prompts: one or more data files (jsonl, json, csv, tsv or parquet), or the name of one data set on the hub (its
    train split in generate, its test split in eval)."""
    max_prompts: int | None = Field(None, ge=1)
    """Number of prompts to use, from the beginning of each file. null: all."""

    def problems(self) -> Iterator[str]:
        if twice := [file for number, file in enumerate(self.files) if file in self.files[:number]]:
            yield f"data.files names {twice[0]} twice: name each file once"


class GenerateRolloutConfig(EngineConfig):
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. Log-probabilities are those of the distribution at this temperature. 0: always the most
    probable token."""
    logprobs: bool = False
    """Also write the log-probability of each token, as the column logprobs. The sum over a response, logprob, is always
    written."""

    def problems(self) -> Iterator[str]:
        if self.n > 1 and self.temperature == 0:
            yield (
                f"rollout.n is {self.n}, but at rollout.temperature=0 all responses are the same: raise the "
                "temperature, or set rollout.n=1"
            )


class GenerateTrainerConfig(RecordedConfig):
    model_timeout_s: int = Field(1800, ge=1)
    """Deadline in seconds for the engines to load the model, and again for the reward model. The nodes and Ray have a
    limit of their own (ray.start_timeout_s)."""
    micro_tokens: int = Field(4096, ge=2)
    """Largest number of tokens in one forward pass of the reward model on one GPU."""
    sharding: ClassVar[Literal["auto", Sharding]] = "auto"
    """Of the reward model, as in reinforcement learning."""
    reduce_dtype: ClassVar[Literal["float32", "bfloat16"]] = "float32"
    """Without effect: nothing is trained, so there are no gradients."""


class GenerateConfig(RayJobConfig):
    model: ModelSource
    data: GenerateDataConfig
    rollout: GenerateRolloutConfig = GenerateRolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: OptionalRewardConfig = OptionalRewardConfig()
    pools: PoolsConfig = PoolsConfig()
    trainer: GenerateTrainerConfig = GenerateTrainerConfig()

    @property
    def roles(self) -> list[Role]:
        """The roles that the job needs."""
        return ["rollout"] if self.reward.model is None else ["reward", "rollout"]

    @property
    def truncates_logprobs(self) -> bool:
        """Whether the engine's log-probabilities are those of the distribution after top_p and top_k: they are not."""
        return False

    @property
    def scores(self) -> bool:
        """Whether responses are scored; an environment may give no reward."""
        return bool(self.reward.sources) or self.environment.name is not None

    @property
    def needs_scores(self) -> bool:
        """Whether every response needs a score."""
        return False

    @property
    def hang_timeout_s(self) -> float:
        limit_s = self.trainer.hang_timeout_s
        return max(limit_s, 2 * self.reward.timeout_s) if limit_s else 0.0  # nothing happens while one reward is slow

    def problems(self) -> Iterator[str]:
        yield from (
            f"pools.roles.{role}: this job trains nothing and has only the roles reward and rollout; remove it"
            for role in self.pools.roles
            if role not in ("reward", "rollout")
        )
        yield from pool_problems(self)
        yield from engine_problems(self)
        longest, limit = self.data.max_prompt_length + self.data.max_response_length, self.trainer.micro_tokens
        if self.reward.model is not None and longest > limit:
            yield (
                f"data.max_prompt_length {self.data.max_prompt_length} + data.max_response_length "
                f"{self.data.max_response_length} exceeds trainer.micro_tokens {limit}: the reward model reads whole "
                "samples, so raise micro_tokens or lower the lengths"
            )


class EvalRolloutConfig(GenerateRolloutConfig):
    n: int = Field(8, ge=1)
    """Responses per prompt."""


class EvalScoreConfig(Section):
    correct: float = 1.0
    """Lowest score of a correct response, for pass@k and maj@k."""


class EvalConfig(GenerateConfig):
    rollout: EvalRolloutConfig = EvalRolloutConfig()
    eval: EvalScoreConfig = EvalScoreConfig()

    @property
    def needs_scores(self) -> bool:
        return True

    @field_validator("reward")
    @classmethod
    def _is_needed(cls, value: OptionalRewardConfig, info: ValidationInfo) -> OptionalRewardConfig:
        return require_reward(value, info.data.get("environment"))
