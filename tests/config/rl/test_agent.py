"""Options of the endpoint for agents, and what is refused."""

from __future__ import annotations

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import UserError
from tests.rl.ppo_config import REQUIRED, ppo_config

ENDPOINT = "agent.endpoint=loopback"


def test_without_an_endpoint_nothing_changes() -> None:
    for config in (ppo_config(), ppo_config("agent=null")):
        assert not config.agent.is_used and config.scores


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["agent.command=[python,agent.py]"], "agent.command has no effect without an endpoint: set agent.endpoint="),
        (["agent.tool_format=xml"], "agent.tool_format has no effect without an endpoint"),
        (["agent.endpoint=public"], r"agent.endpoint: .*'loopback' or 'network'"),
        ([ENDPOINT, "agent.processes=2"], "agent.processes is 2, but there is no agent.command to start"),
        ([ENDPOINT, "agent.tool_format=yaml"], "agent.tool_format yaml: choose one of auto, hermes, json, xml or vllm"),
        ([ENDPOINT, "agent.command=[python,'']"], "agent.command"),
        ([ENDPOINT, "environment.name=my/env.py:Own"], "agent.endpoint and environment.name are both set, but only"),
        ([ENDPOINT, "environment.tools=[python]"], "agent.endpoint and environment.tools are both set, .* itself"),
    ],
)
def test_what_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ppo_config(*overrides)


def test_the_agent_may_give_the_reward() -> None:
    required = [option for option in REQUIRED if not option.startswith("reward")]
    config = compose("ppo", [*required, ENDPOINT, "agent.command=[python,my/agent.py]", "agent.processes=8"])
    assert isinstance(config, PpoConfig) and config.scores and not config.reward.sources
    assert config.agent.command == ["python", "my/agent.py"]
    assert ppo_config(ENDPOINT).reward.sources, "its reward and that of a function are added"


def test_generation_has_no_agents() -> None:
    with pytest.raises(UserError, match=r"agent(\.endpoint)?: unknown key"):
        compose("generate", ["model.path=/model", "data.files=a.jsonl", ENDPOINT])
