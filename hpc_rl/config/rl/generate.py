"""Options of generation as a job (`submit generate`) and of evaluation (`submit eval`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from hpc_rl.config.base import Path, Section, SomeFiles
from hpc_rl.config.lend import WaitSection
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.rl.environment import EnvironmentConfig
from hpc_rl.config.rl.pools import PoolsConfig, Role, pool_problems
from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.config.rl.reward import OptionalRewardConfig, require_reward
from hpc_rl.config.rl.rollout import EngineConfig, engine_problems, sync_problems
from hpc_rl.config.training.common import MicroTokens, ModelSource, Offload, RecordedConfig, Sharding


class GenerateDataConfig(PromptConfig):
    files: SomeFiles
    """Prompts: one or more data files (jsonl, json, csv, tsv or parquet), or the name of one data set on the hub (its
    train split in generate, its test split in eval)."""
    max_prompts: int | None = Field(None, ge=1)
    """Number of prompts to use, from the beginning of each file. null: all."""

    def problems(self) -> Iterator[str]:
        if twice := [file for number, file in enumerate(self.files) if file in self.files[:number]]:
            yield f"data.files names {twice[0]} twice: name each file once"


class OpenaiConfig(Section):
    """Options of rollout.name=openai."""

    base_url: str | None = None
    """Address of a server with the API of OpenAI, with its version, such as https://llm.example.org/v1."""
    model: str | None = None
    """Name of the model on the server. null: model.path."""
    key_variable: str | None = None
    """Name of the environment variable with the key for the server. null: the server needs no key."""
    timeout_s: float = Field(600, gt=0)
    """Longest time in seconds for one response."""
    retries: int = Field(8, ge=0)
    """Number of times that a request is repeated after an error that may pass: no answer, 429 or 5xx. The pauses double
    from 1 to at most 60 s."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not (
            value.isascii() and re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[^\s/@:#?]+)(:\d{1,5})?(/[^\s?#]*)?", value)
        ):
            raise ValueError(  # what was found may contain a password or a key
                "expected an address such as https://llm.example.org/v1, without a user, a password or parameters; "
                "rollout.openai.key_variable is for the key"
            )
        return value

    @field_validator("key_variable")
    @classmethod
    def _is_variable(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise ValueError(  # what was found may be the key itself
                "expected the name of an environment variable, such as LLM_API_KEY; export the key itself in this "
                "variable before you submit"
            )
        return value


class GenerateRolloutConfig(EngineConfig):
    openai: OpenaiConfig = OpenaiConfig()
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
    micro_tokens: MicroTokens = "auto"
    """Largest number of tokens in one forward pass of the reward model on one GPU. auto: as in reinforcement learning,
    without the correction after the first step."""
    packing: bool = True
    """Compute several samples in one row. false: the engine `hf` and the reward model compute one sample at a time, as
    transformers does. This is slower, and also exact for models whose packed rows would not be."""
    sharding: ClassVar[Literal["auto", Sharding]] = "auto"
    """Of the reward model, as in reinforcement learning."""
    offload: ClassVar[Offload] = "none"
    reduce_dtype: ClassVar[Literal["float32", "bfloat16"]] = "float32"
    """Without effect: nothing is trained, so there are no gradients."""
    sequence_parallel: ClassVar[int] = 1
    """Each rank of the reward model computes rows of its own."""

    @property
    def row_tokens(self) -> int:
        """The largest number of tokens of a packed row. A job replaces auto by a number first."""
        assert self.micro_tokens != "auto"
        return self.micro_tokens


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
        yield from self._openai_problems()
        limit = self.trainer.micro_tokens
        if self.reward.model is not None and limit != "auto" and self.data.longest > limit:
            yield (
                f"data.max_prompt_length {self.data.max_prompt_length} + data.max_response_length "
                f"{self.data.max_response_length} exceeds trainer.micro_tokens {limit}: the reward model reads whole "
                "samples, so raise micro_tokens or lower the lengths"
            )

    def _openai_problems(self) -> Iterator[str]:
        url = self.rollout.openai.base_url
        if self.rollout.name == "openai" and url is None:
            yield "rollout.name=openai generates with a server that others operate: set rollout.openai.base_url"
        if self.rollout.name != "openai" and url is not None:
            yield (
                f"rollout.openai.base_url has no effect with rollout.name={self.rollout.name}: set rollout.name=openai "
                "and trainer.device=cpu, or remove it"
            )
        if self.rollout.name == "openai" and self.rollout.engine_kwargs:
            yield "rollout.engine_kwargs has no effect with rollout.name=openai, which starts no program: remove it"


class EvalRolloutConfig(GenerateRolloutConfig):
    n: int = Field(8, ge=1)
    """Responses per prompt."""


class EvalScoreConfig(Section):
    correct: float = 1.0
    """Lowest score of a correct response, for pass@k and maj@k."""
    follow: Path | None = None
    """Directory of a run whose checkpoints are scored while it trains; model.path is then the model from which it
    started. `hpc-rl lend --role eval` sets it. null: model.path is scored."""


_OF_SPEED = {"workers", "timeout_s"}


class EvalConfig(GenerateConfig):
    rollout: EvalRolloutConfig = EvalRolloutConfig()
    eval: EvalScoreConfig = EvalScoreConfig()
    lend: WaitSection = WaitSection()

    @property
    def identity(self) -> str:
        """A few digits for what is scored and how: scores of other data, sampling or rewards have others."""
        sampling = ("n", "temperature", "top_p", "top_k")
        parts = (
            self.data.model_dump_json(),
            self.rollout.model_dump_json(include={*sampling}),
            self.reward.model_dump_json(exclude=_OF_SPEED),
            self.environment.model_dump_json(exclude=_OF_SPEED),
            f"{self.eval.correct} {self.trainer.seed}",
        )
        return blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.eval.follow is not None:
            yield from sync_problems(self)
        elif self.lend != WaitSection():
            yield "lend.wait_s is for an evaluation during training: set eval.follow, or remove it"

    @property
    def needs_scores(self) -> bool:
        return True

    @field_validator("reward")
    @classmethod
    def _is_needed(cls, value: OptionalRewardConfig, info: ValidationInfo) -> OptionalRewardConfig:
        return require_reward(value, info.data.get("environment"))
