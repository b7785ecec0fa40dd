"""Suggestions for unknown keys, and parts of a configuration."""

from __future__ import annotations

import pytest

from hpc_rl.config.base import Section
from hpc_rl.config.keys import documented_keys, nearest, select
from hpc_rl.config.kinds import KINDS
from hpc_rl.errors import UserError


def suggestion(kind: str, key: str) -> str:
    meanings = {name: meaning for name, _, _, meaning in documented_keys(KINDS[kind].schema)}
    return nearest(key, list(meanings), meanings).removeprefix("; did you mean ").removesuffix("?")


@pytest.mark.parametrize(
    ("kind", "key", "meant"),
    [
        ("sft", "optim.learning_rate", "optim.lr"),
        ("sft", "lr", "optim.lr"),
        ("sft", "optim.lrr", "optim.lr"),
        ("sft", "trainer.total_epoch", "trainer.total_epochs"),
        ("sft", "trainer.partition", "slurm.partition"),
        ("sft", "epochs", "trainer.total_epochs"),
        ("sft", "optim.weight_decy", "optim.weight_decay"),
        ("ppo", "optim.lr", "actor.optim.lr or critic.optim.lr"),
        ("ppo", "critic.lr", "critic.optim.lr"),
        ("ppo", "algorithm.kl_coef", "algorithm.kl.coef"),
        ("sft", "qqqqqq", ""),
    ],
)
def test_the_nearest_key(kind: str, key: str, meant: str) -> None:
    assert suggestion(kind, key) == meant


def test_sections_and_keys_are_selected() -> None:
    tables = {"optim": {"lr": 1, "eps": 2}, "trainer": {"seed": 3}}
    assert select(tables, ["optim.lr", "trainer"]) == {"optim": {"lr": 1}, "trainer": {"seed": 3}}
    with pytest.raises(UserError, match=r"optim\.lrr: there is no section or key of .* did you mean optim\.lr\?"):
        select(tables, ["optim.lrr"])


class Base(Section):
    first: int = 1
    """What the base
    says."""
    silent: str = ""
    second: bool = False
    """Of the base."""


class Extended(Base):
    second: bool = True
    """Of the extension."""
    third: float | None = None
    """Last."""


def test_the_meaning_of_an_option_is_the_text_below_it() -> None:
    meanings = {name: meaning for name, _, _, meaning in documented_keys(Extended)}
    assert meanings == {"first": "What the base says.", "silent": "", "second": "Of the extension.", "third": "Last."}
