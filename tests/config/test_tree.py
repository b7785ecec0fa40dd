"""YAML that would never end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl.config import tree
from hpc_rl.config.compose import compose
from hpc_rl.config.tree import read_options, read_tree
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.queue import prepare
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


@pytest.mark.parametrize(("whose", "most"), [(0, 4_000_000), (1, 2**19)])
def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: int, most: int) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: " + "x" * (most - 3))
    user = os.geteuid() + whose
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert len(read_tree(path)["a"]) == most - 3
    path.write_text("a: " + "x" * (most - 2))
    with pytest.raises(UserError, match=f"it has more than {most:,} bytes"):
        read_tree(path)


def test_what_a_submission_writes_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [f"/scratch/projects/some-university/data/shards-of-a-large-data-set/{n:06d}.jsonl" for n in range(9_000)]
    settings = {"model.path": "m", "data.train_files": files}
    job = Job("sft", compose("sft", [], settings), RunDir(tmp_path / "run"), tmp_path)
    prepare(job, "#!/bin/bash\n", code="")
    assert job.run_dir.config.stat().st_size > 2**19
    assert len(read_tree(job.run_dir.config, named=False)["data"]["train_files"]) == 9_000
    monkeypatch.setattr("hpc_rl.submission.job.MOST_OWN_BYTES", 2**19)
    with pytest.raises(UserError, match=r"the configuration has [\d,]+ bytes, and at most 524,288 are read"):
        prepare(job, "#!/bin/bash\n", code="")


def test_values_of_an_alias_count_wherever_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: &a [1, 2]\nb: *a\n")  # a table, two keys, and twice a list of two
    monkeypatch.setattr(tree, "_MOST_VALUES", 9)
    assert read_tree(path) == {"a": [1, 2], "b": [1, 2]}
    monkeypatch.setattr(tree, "_MOST_VALUES", 8)
    with pytest.raises(UserError, match="more than 8 values"):
        read_tree(path)
