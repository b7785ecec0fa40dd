"""What the shell suggests: options, their values, and site profiles."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.cli import completion
from tests.helpers import hpc_rl


def words(kind: str, incomplete: str, *before: str) -> list[str]:
    context: Any = SimpleNamespace(params={"kind": kind, "arguments": list(before)})
    return [word for word, _ in completion.options(context, incomplete)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_keys_and_groups_are_suggested_by_their_beginning() -> None:
    assert words("sft", "optim.l") == ["optim.lr=", "optim.lr_scheduler="]
    assert words("sft", "rec") == [], "sft has no recipes"
    assert "recipe=" in words("ppo", "re") and "reward.function=" in words("ppo", "re")
    assert "optim.lr=" not in words("ppo", "") and "actor.optim.lr=" in words("ppo", "")


def test_values_follow_a_single_key_so_that_bash_adds_no_space() -> None:
    values = ("", "auto", "cuda", "npu", "xpu", "cpu")
    assert words("sft", "trainer.dev") == [f"trainer.device={value}" for value in values]
    assert words("sft", "optim.eps") == ["optim.eps=", "optim.eps=1.0e-08"]


@pytest.mark.parametrize(
    ("key", "start", "values"),
    [
        ("trainer.device", "c", ["cuda", "cpu"]),
        ("trainer.packing", "", ["true", "false"]),
        ("trainer.wandb_mode", "", ["online", "offline", "null"]),
        ("model", "qwen2.5-0", ["qwen2.5-0.5b"]),
        ("trainer.nnodes", "", ["1"]),
        ("zzz", "", []),
    ],
)
def test_values_of_a_key(key: str, start: str, values: list[str]) -> None:
    assert words("sft", f"{key}={start}") == [f"{key}={value}" for value in values], "as zsh passes the word"
    assert words("sft", start, key, "=") == values or not values, "as bash splits the word"


def test_files_are_suggested_for_paths(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("")
    (folder / "site-a.yaml").write_text("")
    assert words("sft", "data.train_files=d") == ["data.train_files=data/"]
    assert words("sft", "data.train_files=data/t") == ["data.train_files=data/train.jsonl"]
    assert words("sft", "data/t", "data.train_files", "=") == [], "bash completes files itself"
    assert completion.site_names("site-") == ["site-a.yaml"]


def test_site_profiles_are_suggested_by_name() -> None:
    assert completion.site_names("") == ["shared-nodes", "typed-gres", "whole-nodes"]
    assert completion.site_names("ty") == ["typed-gres"]


def shell(**environ: str) -> str:
    return hpc_rl(environ={**os.environ, **environ}).stdout


def test_bash_completes_a_value() -> None:
    typed = ["hpc-rl", "submit", "sft", "trainer.device", "=", "c"]
    assert shell(_HPC_RL_COMPLETE="complete_bash", COMP_WORDS="\n".join(typed), COMP_CWORD="5").split() == [
        "cuda",
        "cpu",
    ]
    typed = ["hpc-rl", "submit", "sft", "--site", "ty"]
    assert shell(_HPC_RL_COMPLETE="complete_bash", COMP_WORDS="\n".join(typed), COMP_CWORD="4").split() == [
        "typed-gres"
    ]


def test_zsh_completes_a_value() -> None:
    shown = shell(_HPC_RL_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="hpc-rl submit sft trainer.device=c")
    assert '"trainer.device=cuda"' in shown and '"trainer.device=cpu"' in shown and "auto" not in shown
