"""Options of conversations, and what is refused."""

from __future__ import annotations

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import UserError
from tests.rl.ppo_config import REQUIRED, ppo_config

NAME = "environment.name=my/env.py:Own"


def test_without_an_environment_nothing_changes() -> None:
    for config in (ppo_config(), ppo_config(NAME, "environment=null")):
        assert not config.environment.is_used and config.scores


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["environment.max_turns=3"], "environment.max_turns has no effect without an environment: set environment.na"),
        (
            ["environment.tools=[python]", "environment.kwargs.a=1"],
            "environment.kwargs are arguments of an environment",
        ),
        (["environment.tools=[bash,bash]"], r"environment.tools \[bash, bash\] has a name twice"),
        ([NAME, "environment.tool_format=yaml"], "yaml: choose one of auto, hermes, json, xml or vllm:NAME"),
        (["environment.tools=[python]", "environment.sandbox=docker"], "docker: choose one of auto, apptainer, bwrap"),
        (["environment.tools=[python]", "environment.sandbox='bwrap:'"], "as in apptainer:/images/python.sif"),
        ([NAME, "environment.sandbox=bwrap"], "environment.sandbox is for the tools python and bash"),
    ],
)
def test_what_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ppo_config(*overrides)


@pytest.mark.parametrize("sandbox", ["auto", "apptainer", "bwrap", "'apptainer:/images/python.sif'", "'bwrap:/root'"])
def test_sandboxes(sandbox: str) -> None:
    config = ppo_config("environment.tools=[bash]", f"environment.sandbox={sandbox}")
    assert config.environment.sandbox == sandbox.strip("'")


def test_formats_of_vllm_are_checked_at_the_start() -> None:
    assert ppo_config(NAME, "environment.tool_format='vllm:pythonic'").environment.is_used


def test_an_environment_may_give_the_reward_and_functions_do_not() -> None:
    required = [option for option in REQUIRED if not option.startswith("reward")]
    config = compose("ppo", [*required, NAME])
    assert isinstance(config, PpoConfig) and config.scores and not config.reward.sources
    with pytest.raises(UserError, match=r"^reward\.function: required, but not given"):
        compose("ppo", [*required, "environment.tools=[python]"])


def test_an_evaluation_needs_a_reward_or_an_environment_and_generation_neither() -> None:
    required = ["model.path=/model", "data.files=a.jsonl", "trainer.device=cpu"]
    for kind in ("generate", "eval"):
        for reward in ([NAME], ["environment.tools=[python]", "reward.function=exact"]):
            config = compose(kind, [*required, *reward])
            assert isinstance(config, GenerateConfig) and config.scores and config.environment.is_used
    assert not compose("generate", [*required, "environment.tools=[python]"]).scores  # type: ignore[attr-defined]
    for lacking in ([], ["environment.tools=[python]"]):
        with pytest.raises(UserError, match=r"^reward\.function: required, but not given"):
            compose("eval", [*required, *lacking])
    with pytest.raises(UserError, match=r"environment.max_turns has no effect without an environment"):
        compose("generate", [*required, "environment.max_turns=3"])
