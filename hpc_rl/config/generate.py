"""Options of generation as a job (`submit generate`) and of evaluation (`submit eval`)."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from hpc_rl.config.base import Section, SomeFiles
from hpc_rl.config.ppo import EngineConfig, OptionalRewardConfig, PromptConfig, RewardConfig, engine_problems
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.training import ModelSource, RecordedConfig


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
    """Also write the log-probability of each token (the column logprobs). The sum over a response is always written."""

    def problems(self) -> Iterator[str]:
        if self.n > 1 and self.temperature == 0:
            yield f"rollout.n is {self.n}, but at rollout.temperature=0 all responses are the same: raise it"


class GenerateTrainerConfig(RecordedConfig):
    model_timeout_s: int = Field(1800, ge=1)
    """Deadline in seconds for the engines to load the model. The nodes and Ray have a limit of their own
    (ray.start_timeout_s)."""


class GenerateConfig(RayJobConfig):
    model: ModelSource
    data: GenerateDataConfig
    rollout: GenerateRolloutConfig = GenerateRolloutConfig()
    reward: OptionalRewardConfig = OptionalRewardConfig()
    trainer: GenerateTrainerConfig = GenerateTrainerConfig()

    @property
    def truncates_logprobs(self) -> bool:
        """Whether the engine's log-probabilities are those of the distribution after top_p and top_k: they are not."""
        return False

    @property
    def scores(self) -> bool:
        """Whether responses are scored."""
        return bool(self.reward.sources)

    @property
    def hang_timeout_s(self) -> float:
        limit_s = self.trainer.hang_timeout_s
        return max(limit_s, 2 * self.reward.timeout_s) if limit_s else 0.0  # nothing happens while one reward is slow

    def problems(self) -> Iterator[str]:
        unit = "GPUs" if self.trainer.uses_gpus else "CPU slots"
        yield from engine_problems(self, f"{unit} per node", [self.trainer.n_gpus_per_node])
        if self.reward.model is not None:
            yield (
                f"reward.model is {self.reward.model}, and this job has no workers for a reward model: serve it over "
                "HTTP and set reward.url, or use reward.function"
            )


class EvalRolloutConfig(GenerateRolloutConfig):
    n: int = Field(8, ge=1)
    """Responses per prompt."""


class EvalScoreConfig(Section):
    correct: float = 1.0
    """Lowest score of a correct response, for pass@k and maj@k."""


class EvalConfig(GenerateConfig):
    rollout: EvalRolloutConfig = EvalRolloutConfig()
    reward: RewardConfig
    eval: EvalScoreConfig = EvalScoreConfig()
