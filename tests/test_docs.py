"""README.md and docs/*.md: what they say is true of the commands, the options and the pages.

Every `hpc-rl` command in a block of code is parsed, and its options composed. What stands at the block's beginning
decides whether more happens, in a folder with small data, a small model and a few programs (`workshop` below):

    ```              nothing more
    ```sh run        the block's hpc-rl commands are run as they stand, one after another, and have to end well
    ```sh dry-run    its `submit` commands are run with --dry-run, and have to end well
    ```text          and other languages: no commands at all

Every key of the configuration and every link between pages has to exist.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from hpc_rl.cli import app
from hpc_rl.config.compose import compose
from hpc_rl.config.keys import documented_keys
from hpc_rl.config.kinds import KINDS
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.script import _values
from tests.commands import understand
from tests.helpers import chats, make_tiny_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NO_KEYS = {"container.sh", "container.sh.j2", "ray.init", "ray.put", "data.rows", "ray.sbatch.j2", "trainer.json"}
"""Dotted words in code that are no keys of the configuration."""
OTHERS = {"from-verl.md", "from-openrlhf.md"}
"""Pages with other projects' keys, in the first column of their tables."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    how: str
    """run, dry-run, or nothing."""
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """Blocks of code that have commands of ours."""
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^ *```(.*)\n((?s:.*?))^ *```$", text, re.MULTILINE):
            language, _, how = found[1].partition(" ")
            assert how in ("", "run", "dry-run"), f"{page.name}: ```{found[1]}"
            lines = [line.strip() for line in found[2].replace("\\\n", " ").splitlines()]
            commands = tuple(line for line in lines if re.match(r"hpc-rl |python -m hpc_rl", line))
            if commands and language in ("", "sh"):
                yield Block(page.name, text[: found.start()].count("\n") + 1, how, commands)


BLOCKS = list(blocks())


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_are_understood(block: Block) -> None:
    for line in block.commands:
        understand(line)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def workshop(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder that the pages assume."""
    shutil.copytree(model, tmp_path / "models" / "small")
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    rows = [json.dumps({"messages": chat, "answer": "2"}) + "\n" for chat in chats(2048)]
    for name in ("train.jsonl", "prompts.jsonl", "data/gsm8k/train.jsonl", "data/gsm8k/test.jsonl"):
        (tmp_path / name).write_text("".join(rows))
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "rewards.py").write_text("def score(response, answer):\n    return 1.0\n")
    for program in ("train.py", "my_driver.py"):
        (tmp_path / program).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry_run(words: list[str]) -> str:
    """What the command prints with --dry-run; in this process, since there are many of them."""
    front, dash, program = " ".join(map(shlex.quote, words)).partition(" -- ")
    asked = [*shlex.split(front), *([] if "--dry-run" in words else ["--dry-run"])]
    sys.argv = ["hpc-rl", *asked, *(["--", *shlex.split(program)] if dash else [])]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        typer.main.get_command(app).main(sys.argv[1:], standalone_mode=False)
    return printed.getvalue()


def test_submissions_would_go_through(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    lines = [(block, line) for block in BLOCKS if block.how == "dry-run" for line in block.commands]
    shutil.copytree("models/small", "runs/sft-1/model")
    for block, line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "submit":
            script = dry_run(words)
            assert script.startswith("#!/bin/bash\n"), f"{block}: {line}"
    assert len(lines) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.how == "run"], ids=str)
def test_blocks_to_run_end_well(block: Block, workshop: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for line in block.commands:
        command = [sys.executable, "-m", "hpc_rl.cli", *shlex.split(line, comments=True)[1:]]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def example_file(page: str, language: str) -> str:
    """The last block of a page in a language: a file that the reader is to write."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[-1]


def test_files_to_write_work(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    (workshop / "slurm_templates").mkdir()
    (workshop / "slurm_templates" / "torchrun.sbatch.j2").write_text(example_file("templates.md", "jinja"))
    assert "--export=ALL --cpu-bind=none \\\n" in dry_run(["submit", "torchrun", "--", "train.py"])
    (workshop / "configs" / "recipe").mkdir(parents=True)
    (workshop / "configs" / "recipe" / "mine.yaml").write_text(example_file("recipes.md", "yaml"))
    config = compose("ppo", ["recipe=mine", "data.train_files=train.jsonl"])
    assert config.model_dump()["actor"]["mini_batch_size"] == 2048


def code_words(text: str) -> set[str]:
    """Words in `code`, without what follows an equals sign."""
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    return {word.partition("=")[0].strip("'\"") for word in words}


def options() -> list[tuple[str, str]]:
    return [(key, kind) for row in KINDS.values() for key, kind, *_ in documented_keys(row.schema)]


def unknown_keys(words: set[str]) -> set[str]:
    """Those of the words that look like a key of the configuration and are none."""
    keys = {key for key, _ in options()}
    sections = {key.partition(".")[0] for key in keys}
    tables = {key for key, kind in options() if kind.startswith("dict")}
    dotted = {word for word in words if re.fullmatch(r"[a-z_]+(\.[\w-]+)+", word) and word.split(".")[0] in sections}
    groups = {".".join(key.split(".")[:depth]) for key in keys for depth in (1, 2)}
    return {word for word in dotted - keys - groups - NO_KEYS if word.rpartition(".")[0] not in tables}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OTHERS], ids=lambda page: page.name)
def test_keys_exist(page: Path) -> None:
    assert unknown_keys({"trainer.total_epoch", "trainer.total_epochs"}) == {"trainer.total_epoch"}
    assert not unknown_keys(code_words(page.read_text()))


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_the_keys_that_others_become_exist(name: str) -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs" / name).read_text().splitlines() if line.startswith("| `")]
    ours = [code_words(row[1]) for row in rows if len(row) >= 3]
    keys = {key for key, _ in options()} | {"ray_kwargs.ray_init.num_cpus"}
    flat = set().union(*ours)
    assert len(flat & keys) > 50 and flat <= keys, flat - keys


def test_templates_page_lists_what_a_template_knows() -> None:
    job = Job("sft", compose("torchrun"), RunDir(Path("/runs/mine")), Path("/home/me"))
    page = (ROOT / "docs" / "templates.md").read_text()
    table = page[page.index("A template knows") :]
    listed = {word for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)}
    assert listed == set(_values(job))


def anchors(page: Path) -> set[str]:
    """The names that headings get on a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"


def test_the_readme_lists_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []
