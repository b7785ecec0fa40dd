"""The line of a job file or recipe that a message about a mistake names."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.config.compose import compose, load_config
from hpc_rl.config.hydra_files import composed_files
from hpc_rl.config.origins import line_in, origins
from hpc_rl.errors import UserError

SFT = """\
defaults:
  - model: null
  - recipe: null
  - _self_

optim:
  lrr: 1e-3
trainer: {total_epochs: many}
data:
  train_files: [a.jsonl, 3]
"""
MINE = "# @package _global_\ndefaults: [base]\ntrainer:\n  save_frequency: 3\n"
BASE = "# @package _global_\nmodel:\n  pathh: x\ntrainer: {save_frequency: 4}\n"
OWN_MODEL = "path: m\nsize: 3\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = {"sft.yaml": SFT, "recipe/mine.yaml": MINE, "recipe/base.yaml": BASE, "model/own.yaml": OWN_MODEL}
    for name, text in files.items():
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def problems(*words: str) -> set[str]:
    with pytest.raises(UserError) as found:
        compose("sft", words)
    return {line.partition(";")[0].partition(", found")[0] for line in str(found.value).splitlines()}


IN_THE_JOB_FILE = {
    "configs/sft.yaml, line 7: optim.lrr: unknown key",
    "configs/sft.yaml, line 10: data.train_files.1: Input should be a valid string",
}
NO_NUMBER = "trainer.total_epochs: expected a whole number"


def test_mistakes_in_the_job_file_have_lines() -> None:
    assert problems("model.path=m") == {*IN_THE_JOB_FILE, f"configs/sft.yaml, line 8: {NO_NUMBER}"}


def test_mistakes_in_recipes_have_lines_and_those_on_the_command_line_none() -> None:
    assert problems("recipe=mine", "model.path=m", "trainer.total_epochs=x") == {
        *IN_THE_JOB_FILE,
        NO_NUMBER,
        "configs/recipe/mine.yaml, line 4: trainer.save_frequency: unknown key",
        "configs/recipe/base.yaml, line 3: model.pathh: unknown key",
    }


def test_a_groups_keys_have_its_section_in_front() -> None:
    assert "configs/model/own.yaml, line 2: model.size: unknown key" in problems("model=own")


def test_files_are_in_the_order_of_precedence(project: Path) -> None:
    found = [(str(path.relative_to(project / "configs")), section) for path, section in composed_files("sft", [
        "recipe=mine", "model=own",
    ])]  # fmt: skip
    assert found == [("model/own.yaml", "model."), ("recipe/base.yaml", ""), ("recipe/mine.yaml", ""), ("sft.yaml", "")]


def test_a_section_on_the_command_line_hides_its_keys() -> None:
    assert origins("sft")("optim.lrr") == "configs/sft.yaml, line 7: "
    assert origins("sft", ["optim={lrr: 2}"])("optim.lrr") == ""
    assert origins("sft", ["optimizer=2"])("optim.lrr") == "configs/sft.yaml, line 7: "
    assert origins("sft")("optim.nothing") == ""


def test_a_file_that_cannot_be_read_has_no_lines(project: Path) -> None:
    (project / "bad.yaml").write_text("a: [")
    (project / "loop.yaml").write_text("a: &a {b: *a}")
    for name in ("bad", "loop", "none"):
        assert line_in(project / f"{name}.yaml", "a") == ""


def test_a_configuration_of_a_run_has_lines_too(project: Path) -> None:
    (project / "config.yaml").write_text("model: {path: m}\ndata:\n  train_files: [x.jsonl]\nzzz: 1\n")
    with pytest.raises(UserError, match=r"^config\.yaml, line 4: zzz: unknown key"):
        load_config("sft", project / "config.yaml")
