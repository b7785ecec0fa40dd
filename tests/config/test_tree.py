"""YAML that would never end."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.config import tree
from hpc_rl.config.compose import compose
from hpc_rl.config.tree import MOST_YAML_BYTES, read_options, read_tree
from hpc_rl.errors import UserError
from tests.security.strangers import bomb


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (bomb(), "aliases stand for more than 200,000 values"),
        ("a: &a [*a]\n", "an alias contains itself"),
        ("a: &a {b: *a}\n", "an alias contains itself"),
        ("a: " + "[" * 2_000, "it is nested too deeply"),
    ],
)
def test_what_would_never_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    path = tmp_path / "configs" / "sft.yaml"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UserError, match=rf"sft\.yaml is not YAML: {problem}"):
        read_tree(path)
    assert read_options(path) == {}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=problem):
        compose("sft", [])


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: " + "x" * (MOST_YAML_BYTES - 3))
    assert len(read_tree(path)["a"]) == MOST_YAML_BYTES - 3
    path.write_text("a: " + "x" * (MOST_YAML_BYTES - 2))
    with pytest.raises(UserError, match="it has more than 524,288 bytes"):
        read_tree(path)


def test_values_of_an_alias_count_wherever_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: &a [1, 2]\nb: *a\n")  # a table, two keys, and twice a list of two
    monkeypatch.setattr(tree, "_MOST_VALUES", 9)
    assert read_tree(path) == {"a": [1, 2], "b": [1, 2]}
    monkeypatch.setattr(tree, "_MOST_VALUES", 8)
    with pytest.raises(UserError, match="more than 8 values"):
        read_tree(path)
