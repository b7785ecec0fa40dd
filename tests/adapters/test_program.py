from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.adapters.program import Program, imported_names, read_settings


@pytest.mark.parametrize(
    ("words", "module", "name", "arguments"),
    [
        (("train.py", "--lr", "1"), "", "train.py", ("--lr", "1")),
        (("python", "-u", "train.py", "a"), "", "train.py", ("a",)),
        (("/opt/bin/python3.11", "-m", "verl.trainer.main_ppo", "a=1"), "verl.trainer.main_ppo", "", ("a=1",)),
        (("-m", "axolotl.cli.train", "c.yml"), "axolotl.cli.train", "", ("c.yml",)),
        (("axolotl", "train", "c.yml"), "", "axolotl", ("train", "c.yml")),
        ((), "", "", ()),
        (("-m",), "", "-m", ()),
    ],
)
def test_parts_of_a_command(words: tuple[str, ...], module: str, name: str, arguments: tuple[str, ...]) -> None:
    program = Program(words)
    assert (program.module, program.name, program.arguments) == (module, name, arguments)


def test_options_in_all_spellings() -> None:
    words = ("t.py", "c.yml", "--output-dir", "out", "--lr=1e-3", "--bf16", "--x", "-1", "trainer.nnodes=2", "+a.b=c=d")
    program = Program((*words, "--lr=2e-3", "--last"))
    assert program.options == {
        **{"output_dir": "out", "lr": "2e-3", "bf16": "", "x": "-1"},
        **{"trainer.nnodes": "2", "a.b": "c=d", "last": ""},
    }
    assert program.positional == ("c.yml",)


@given(st.lists(st.text(max_size=20), max_size=8))
def test_any_words_are_read(words: list[str]) -> None:
    program = Program(tuple(words), Path("/nowhere"))
    assert set(program.options.values()) is not None
    assert program.settings("config") == {} and isinstance(program.imports, frozenset)


def test_settings_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "output_dir: ./out # here\ntrainer:\n  steps: 5\n  deep:\n    name: 'x'\nlist:\n  - a: 1\nlast: \"q\"\n"
    )
    (tmp_path / "b.json").write_text('{"output_dir": "o", "deep": {"x": 1}, "l": [1]}')
    (tmp_path / "c.toml").write_text("a = 1\n[ckpt]\ninterval = 5\n")
    found = {"output_dir": "./out", "trainer.steps": "5", "trainer.deep.name": "x", "last": "q"}
    assert read_settings(tmp_path / "a.yaml") == found
    assert read_settings(tmp_path / "b.json") == {"output_dir": "o", "deep.x": "1"}
    assert read_settings(tmp_path / "c.toml") == {"a": "1", "ckpt.interval": "5"}
    assert read_settings(tmp_path / "missing.yaml") == read_settings(tmp_path) == {}
    (tmp_path / "bad.json").write_text("{")
    assert read_settings(tmp_path / "bad.json") == {}
    assert Program(("t.py", "--config", "a.yaml"), tmp_path).settings("config")["last"] == "q"
    assert Program(("t", "@", "c.toml"), tmp_path).settings()["ckpt.interval"] == "5"


def test_imports_of_a_script_and_of_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, own\nfrom pkg.part import f\n")
    (tmp_path / "own.py").write_text("def f():\n    from trl import SFTTrainer\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/part.py").write_text("import own, train, lightning.pytorch as pl\n")
    program = Program(("python", "train.py"), tmp_path)
    assert program.uses("trl.SFTTrainer") and program.uses("lightning") and program.uses("os")
    assert not program.uses("light", "transformers")
    assert Program(("-m", "pkg.part"), tmp_path).uses("lightning.pytorch")
    (tmp_path / "bad.py").write_text("import trl(")
    assert imported_names(tmp_path / "bad.py") == imported_names(tmp_path / "none.py") == []
