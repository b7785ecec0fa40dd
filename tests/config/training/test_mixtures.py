"""Data files with weights in job files, on the command line, and in the config.yaml of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose, compose_each, dump, load_config
from hpc_rl.config.tree import flat
from hpc_rl.errors import UserError

SFT = "defaults: [{model: null}, _self_]\nmodel: {path: m}\ndata:\n  train_files: "
MIXED = {"a.jsonl": 0.7, "openai/gsm8k:main": 0.3}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path


def files(text: Any) -> Any:
    return compose("sft", ["model.path=m", f"data.train_files={text}"]).data.train_files  # type: ignore[attr-defined]


def test_weights_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert files("{a.jsonl: 0.7, openai/gsm8k:main: 0.3}") == MIXED
    assert list(files("{b.jsonl:1,a.jsonl:2e-1, 'c d.jsonl': 3,}").items()) == [
        ("b.jsonl", 1.0),
        ("a.jsonl", 0.2),
        ("c d.jsonl", 3.0),
    ]
    monkeypatch.setenv("HOME", "/home/me")
    assert files("{~/a.jsonl: 1}") == {"/home/me/a.jsonl": 1.0}
    assert files("[a.jsonl,b.jsonl]") == ["a.jsonl", "b.jsonl"] and files("a.jsonl") == ["a.jsonl"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a: -1}", "a has the weight '-1'; a weight is a positive number: write {FILE: WEIGHT, FILE: WEIGHT}"),
        ("{a: 0}", "a has the weight '0'; a weight is a positive number"),
        ("{a: 1, b: much}", "b has the weight 'much'; a weight is a positive number"),
        ("{a: nan}", "a has the weight 'nan'"),
        ("{a: inf}", "a has the weight 'inf'"),
        ("{a: 1e308, b: 1e308}", "the sum of the weights is too large"),
        ("{a.jsonl}", "a.jsonl has no weight: write {FILE: WEIGHT, FILE: WEIGHT}"),
        ("{a: 1, a: 2}", "a is named twice: give each file one weight"),
        ("{a: 1", "'{a: 1' has no closing brace"),
        ("{}", "name at least one data file"),
        ("{ : 1}", "the path is empty"),
    ],
)
def test_weights_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        files(text)
    assert str(error.value).startswith(f"data.train_files: {said}")


def test_weights_in_a_job_file_are_replaced_by_the_command_line(project: Path) -> None:
    (project / "configs" / "sft.yaml").write_text(SFT + "{a.jsonl: 0.7, 'openai/gsm8k:main': 0.3}\n")
    read = compose("sft")
    assert read.data.train_files == MIXED  # type: ignore[attr-defined]
    for text, found in {"{c.jsonl: 1}": {"c.jsonl": 1.0}, "[c.jsonl]": ["c.jsonl"], "c.jsonl": ["c.jsonl"]}.items():
        word = f"data.train_files={text}"
        assert compose("sft", [word]).data.train_files == found  # type: ignore[attr-defined]
        points = compose_each("sft", [], [(word,), ("trainer.seed=3",)])
        assert [one.data.train_files for one in points] == [found, MIXED]  # type: ignore[attr-defined]


@pytest.mark.parametrize("included", ["{a.jsonl: 0.7, b.jsonl: 0.3}", "[a.jsonl, b.jsonl]", "a.jsonl"])
@pytest.mark.parametrize(
    ("own", "found"),
    [
        ("{b.jsonl: 1, c.jsonl: 2}", {"b.jsonl": 1.0, "c.jsonl": 2.0}),
        ("[c.jsonl]", ["c.jsonl"]),
        ("c.jsonl", ["c.jsonl"]),
    ],
)
def test_files_of_a_recipe_replace_those_of_the_recipe_that_it_includes(
    project: Path, included: str, own: str, found: Any
) -> None:
    recipes = project / "configs" / "recipe"
    recipes.mkdir()
    (recipes / "included.yaml").write_text(f"# @package _global_\ndata:\n  train_files: {included}\n  shuffle: false\n")
    own_text = "# @package _global_\ndefaults: [included, _self_]\ndata: {max_length: 77}\n"
    (recipes / "own.yaml").write_text(own_text.replace("77", f"77, train_files: {own}"))
    (recipes / "none.yaml").write_text(own_text)
    (project / "configs" / "sft.yaml").write_text(
        "defaults: [{recipe: null}, {model: null}, _self_]\nmodel: {path: m}\n"
    )
    data: Any = compose("sft", ["recipe=own"]).data
    assert data.train_files == found and list(data.train_files) == list(found), "in their order"
    assert (data.shuffle, data.max_length) == (False, 77), "other options of the section are merged"
    kept: Any = compose("sft", ["recipe=none"]).data.train_files  # type: ignore[attr-defined]
    assert kept == compose("sft", ["recipe=included"]).data.train_files  # type: ignore[attr-defined]
    assert list(kept) == ["a.jsonl", "b.jsonl"][: len(kept)]
    typed: Any = compose("sft", ["recipe=own", f"data.train_files={included}"]).data.train_files  # type: ignore[attr-defined]
    assert typed == kept


def test_files_in_a_group_of_the_section_are_replaced_too(project: Path) -> None:
    (project / "configs" / "data").mkdir()
    for name, files in {"mixed": "{a.jsonl: 1}", "other": "{b.jsonl: 2}", "listed": "[c.jsonl]"}.items():
        (project / "configs" / "data" / f"{name}.yaml").write_text(f"train_files: {files}\n")
    (project / "configs" / "sft.yaml").write_text(
        "defaults: [{model: null}, _self_, {data: mixed}]\nmodel: {path: m}\ndata: {train_files: {own.jsonl: 1}}\n"
    )
    for words, found in (
        ([], {"a.jsonl": 1.0}),
        (["data=other"], {"b.jsonl": 2.0}),
        (["data=listed"], ["c.jsonl"]),
    ):
        assert compose("sft", words).data.train_files == found  # type: ignore[attr-defined]


def test_a_list_that_contains_a_table_is_a_mistake(project: Path) -> None:
    (project / "configs" / "sft.yaml").write_text(SFT + "[{a.jsonl: 1}]\n")
    with pytest.raises(UserError, match=r"data\.train_files\.0: "):
        compose("sft")


def test_a_mistake_in_a_job_file_has_its_line(project: Path) -> None:
    for weight, shown in (("0", "0"), ("true", "True"), ("[1]", r"\[1\]")):
        (project / "configs" / "sft.yaml").write_text(f"{SFT}{{a.jsonl: 1, b.jsonl: {weight}}}\n")
        with pytest.raises(
            UserError, match=rf"configs/sft\.yaml, line 4: data\.train_files: b\.jsonl has the weight {shown};"
        ):
            compose("sft")


def test_a_written_configuration_is_read_as_it_was(project: Path) -> None:
    for kind in ("sft", "ppo"):
        config = compose(kind, ["model.path=m", "data.train_files={a.jsonl: 0.7, b: 3}", *_REWARD.get(kind, ())])
        (project / "config.yaml").write_text(dump(config))
        assert load_config(kind, project / "config.yaml") == config
        assert flat(config.model_dump())["data.train_files"] == {"a.jsonl": 0.7, "b": 3.0}


_REWARD = {"ppo": ("reward.function=exact",)}
