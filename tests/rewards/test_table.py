from __future__ import annotations

import importlib

import pytest

from hpc_rl import rewards
from hpc_rl.config.compose import documented_keys
from hpc_rl.config.rl.reward import OptionalRewardConfig
from hpc_rl.rewards.check import check_function
from hpc_rl.rewards.scorer import InDriverScorer, ProcessScorer, open_scorer
from hpc_rl.rewards.table import REWARDS, BuiltIn
from tests.rewards.conftest import prompts


@pytest.mark.parametrize("name", REWARDS)
def test_every_row_is_a_function_that_the_docs_name(name: str) -> None:
    assert callable(importlib.import_module(REWARDS[name].module).score)
    assert rewards.__doc__ is not None and name in rewards.__doc__
    (help_text,) = (text for key, *_, text in documented_keys(OptionalRewardConfig) if key == "function")
    assert name in help_text


def test_a_new_row_is_all_that_a_new_function_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARDS, "equal", BuiltIn("hpc_rl.rewards.exact", in_driver=True))
    assert check_function("equal", {}, same_python=True) is None
    scorer = open_scorer(OptionalRewardConfig(function="equal"))
    assert scorer.score(prompts("a", "b"), ["a", "c"]).values.tolist() == [1, 0]


def test_a_function_runs_in_the_driver_only_if_its_row_allows_it() -> None:
    kinds = {}
    for name in REWARDS:
        scorer = open_scorer(
            OptionalRewardConfig(function=name, kwargs={"pattern": "a"} if name == "format" else {}, workers=1)
        )
        kinds[name] = type(scorer)
        scorer.close()
    assert kinds == {
        "exact": InDriverScorer,
        "format": ProcessScorer,
        "gsm8k": InDriverScorer,
        "math": ProcessScorer,
    }
