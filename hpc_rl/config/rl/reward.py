"""The section `reward` of reinforcement learning, `generate` and `eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from hpc_rl.config.base import REPLACES_VARIABLES, Path, Section, Table, possible_path
from hpc_rl.config.rl.environment import EnvironmentConfig

ONE_REWARD = "set exactly one of reward.function, reward.functions, reward.model and reward.url"


class OptionalRewardConfig(Section):
    """Options of a reward, which may be left out."""

    function: Annotated[str, REPLACES_VARIABLES] | None = None
    """Reward function: gsm8k, math, exact, format, or your own as package.module:function or path/file.py:function."""
    functions: list[Annotated[str, REPLACES_VARIABLES, Field(min_length=1)]] = []
    """Several reward functions instead of one, such as [gsm8k, format]. The score is the weighted sum of their
    scores."""
    weights: list[Annotated[float, Field(allow_inf_nan=False)]] = []
    """Weight of each of reward.functions (empty: all weights are 1), or of each output of a reward.model that has
    several."""
    kwargs: Table = {}
    """Additional keyword arguments of the reward function. With reward.functions: one table of arguments for each
    function's name."""
    model: Path | None = None
    """Folder or hub name of a reward model (a sequence classifier), instead of a function. If it has several outputs,
    the score is their sum with reward.weights."""
    url: str | None = None
    """URL of an HTTP server that computes scores, instead of a function."""
    timeout_s: float = Field(30, gt=0)
    """Longest time in seconds to score one response."""
    on_error: float | None = None
    """Score of a response for which the reward raised an error, took too long, or did not return a number. null: it has
    no score, and is left out of means, deviations, filters and the loss."""
    clip: tuple[float, float] | None = None
    """Lowest and highest score, as [low, high]. Scores beyond are set to the nearer limit, except on_error. null: no
    limits."""
    workers: int = Field(4, ge=1)
    """Number of calls of reward functions, or of requests, at the same time."""

    @field_validator("function")
    @classmethod
    def _possible_path(cls, value: str | None) -> str | None:
        if value is not None:
            possible_path(value)
        return value

    @property
    def sources(self) -> list[str]:
        """The options that are set of those that name a reward: one, or none for on-policy distillation."""
        return [name for name in ("function", "functions", "model", "url") if getattr(self, name) not in (None, [])]

    @property
    def outputs(self) -> int:
        """Outputs that the reward model has to have."""
        return max(1, len(self.weights))

    @property
    def described(self) -> str:
        """What scores, in a few words: a name of a function, a model or a URL."""
        return self.function or self.model or self.url or ", ".join(self.functions)

    def alone(self, function: str) -> Self:
        """Return the configuration of one of `functions` by itself. reward.clip is for their sum only."""
        own = {"function": function, "kwargs": self.kwargs.get(function, {})}
        return self.model_copy(update={**own, "functions": [], "weights": [], "clip": None})

    def each_function(self) -> list[Self]:
        """Return the configuration of each reward function by itself; none for a model or a URL."""
        return [self] if self.function is not None else [self.alone(name) for name in self.functions]

    def problems(self) -> Iterator[str]:
        if len(self.sources) > 1:
            yield f"{ONE_REWARD}, found {' and '.join(self.sources)}"
        yield from self._several_problems()
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"reward.clip is [{self.clip[0]:g}, {self.clip[1]:g}]: put the lower number first"

    def _several_problems(self) -> Iterator[str]:
        names = self.functions
        if self.model is not None and len(self.weights) == 1:
            yield "reward.weights has one number, and a reward.model with one output needs no weight: remove it"
        if self.weights and self.model is None and len(self.weights) != len(names):
            yield f"reward.weights has {len(self.weights)} numbers for {len(names)} reward.functions: give one for each"
        if len({*names}) < len(names):
            yield f"reward.functions [{', '.join(names)}] has a name twice: name each function once"
        tables = ", ".join(name.replace(":", r"\:") + ": {NAME: VALUE}" for name in names)  # Hydra reads \: as a colon
        for name, arguments in self.kwargs.items() if names else ():
            if name not in names or not isinstance(arguments, dict):
                yield (
                    f"reward.kwargs.{name}: with reward.functions, write a table for each function, such as "
                    f"'reward.kwargs={{{tables}}}'"
                )


def require_reward(reward: OptionalRewardConfig, environment: EnvironmentConfig | None) -> OptionalRewardConfig:
    """Return the section of a job that needs scores, unless nothing can give them.

    Args:
        environment: may give the reward; None if it is not valid itself.
    """
    if environment is not None and environment.name is None and not reward.sources:
        raise PydanticCustomError("missing", ONE_REWARD)
    return reward
