"""The model that a user names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.tree import flat, put
from hpc_rl.errors import UserError
from hpc_rl.runs.models import MODEL_KEYS, model_of, models_of_runs


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project with two runs, of which the first has exported a model, and with a model folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("sft-1", "sft-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs" / "sft-1" / "model").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data").mkdir()


def test_what_names_a_model(tmp_path: Path) -> None:
    assert model_of("model") == "model"
    assert model_of("sft-1") == model_of("runs/sft-1") == str((tmp_path / "runs" / "sft-1" / "model").absolute())
    assert model_of("sft-2", may_come=True) == str((tmp_path / "runs" / "sft-2" / "model").absolute())
    for on_the_hub in ("gpt2", "Qwen/Qwen2.5-0.5B", "owner/sft-9", "other-9"):
        assert model_of(on_the_hub) == on_the_hub


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("sft-2", "run sft-2 has no model: "),
        ("data", "data is a folder without config.json, and not a run"),
        ("sft-9", "; did you mean sft-1 or sft-2?"),
        ("stf-1", "; did you mean sft-1?"),
    ],
)
def test_what_names_none(target: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        model_of(target)
    assert expected in str(caught.value)


@pytest.mark.parametrize("key", MODEL_KEYS)
@pytest.mark.parametrize(
    ("name", "may_come", "folder"),
    [
        ("sft-1", False, "runs/sft-1/model"),
        ("runs/sft-1", False, "runs/sft-1/model"),
        ("sft-2", True, "runs/sft-2/model"),
    ],
)
def test_an_option_that_names_a_model_takes_a_run(
    tmp_path: Path, key: str, name: str, may_come: bool, folder: str
) -> None:
    tree: dict[str, Any] = {}
    put(tree, key, name)
    assert models_of_runs(may_come)(tree) == {key: str(tmp_path / folder)}


def test_other_models_stay_as_they_are_and_errors_name_the_option() -> None:
    for name in ("model", "gpt2", "Qwen/Qwen2.5-0.5B", "data", None):
        assert models_of_runs(False)({"model": {"path": name}}) == {}
    with pytest.raises(UserError, match=r"teacher\.path sft-2: run sft-2 has no model: "):
        models_of_runs(False)({"teacher": {"path": "sft-2"}})


def test_the_directory_of_a_run_may_contain_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORK", str(tmp_path))
    words = ["model.path=$WORK/runs/sft-1", "data.train_files=d.jsonl"]
    config = compose("sft", words, fill_in=[models_of_runs(may_come=False)])
    assert flat(config.model_dump())["model.path"] == str(tmp_path / "runs/sft-1/model")
