"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/*.md: the commands, options, files and pages that they name exist.

Every `hpc-rl` command in a block of code is parsed, and its options are composed. The first line of a block decides
whether it is also run, in a folder with small data, a small model and a few programs (`workshop` below):

    ```              not run
    ```sh run        its hpc-rl commands are run in order, and have to succeed
    ```sh dry-run    its `submit` commands are run with --dry-run, and have to succeed
    ```text          and other languages: not a block of commands; hpc-rl commands are allowed in diagrams only

`hpc-rl init FOLDER` is always run, so that the commands after `cd FOLDER` are those of a starter project.

mkdocs.yml has to list every page. docs/site_pages.py is tested without MkDocs; `make docs` builds the site.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

from hpc_rl.cli import app
from hpc_rl.config.compose import compose
from hpc_rl.config.keys import documented_keys
from hpc_rl.config.kinds import KINDS, offered
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.render import _values
from tests.commands import understand
from tests.helpers import chats, make_tiny_model, pretend_vllm
from tests.http_server import serving
from tests.marks import long

ROOT = Path(__file__).parents[1]
DOCS = sorted(path for path in (ROOT / "docs").glob("*.md") if not path.name.startswith("_"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
NO_KEYS = {
    "eval.json",
    "container.sh",
    "container.sh.j2",
    "ray.init",
    "ray.put",
    "data.rows",
    "ray.sbatch.j2",
    "trainer.json",
}
"""Dotted words in code that look like keys of the configuration and are something else."""
TO_BE_WRITTEN = {"configs/recipe/mine.yaml", "hpc_rl/images/charliecloud.py"}
"""Files that the reader is asked to write."""
REMOVED = {"critic.enable"}
"""Keys that CHANGELOG.md names because they no longer exist."""
OTHERS = {"from-verl.md", "from-openrlhf.md"}
"""Pages with other projects' keys, in the first column of their tables."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    how: str
    """run, dry-run, or empty."""
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """Yield the blocks of code that contain hpc-rl commands."""
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^ *```(.*)\n((?s:.*?))^ *```$", text, re.MULTILINE):
            language, _, how = found[1].partition(" ")
            assert how in ("", "run", "dry-run"), f"{page.name}: ```{found[1]}"
            lines = [line.strip() for line in found[2].replace("\\\n", " ").splitlines()]
            commands = tuple(line for line in lines if re.match(r"hpc-rl |python -m hpc_rl|cd [\w-]+$", line))
            if commands and language in ("", "sh"):
                yield Block(page.name, text[: found.start()].count("\n") + 1, how, commands)


BLOCKS = list(blocks())


def prepare(line: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a line that makes or enters a starter project; return False for any other line."""
    if line.startswith("cd "):
        monkeypatch.chdir(line.removeprefix("cd "))
    elif line.startswith("hpc-rl init "):
        in_this_process(shlex.split(line)[1:])
    else:
        return False
    return True


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_commands_are_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block.commands:
        if not prepare(line, monkeypatch):
            understand(line)


def test_commands_are_in_blocks_that_are_parsed() -> None:
    for page in PAGES:
        lines = [line for text in code_blocks(page, "text") for line in text.splitlines()]
        assert not [line for line in lines if line.startswith("hpc-rl ") and "   " not in line], page.name  # a diagram
    listed = {line.partition(" -")[0] for block in BLOCKS for line in block.commands}
    assert {"hpc-rl init my-project", "hpc-rl clean", "hpc-rl runs", "hpc-rl data check prompts.jsonl"} <= listed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def workshop(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make the working folder that the pages assume, and change into it."""
    shutil.copytree(model, tmp_path / "models" / "small")
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    rows = [json.dumps({"messages": chat, "answer": "2"}) + "\n" for chat in chats(2048)]
    for name in ("train.jsonl", "val.jsonl", "prompts.jsonl", "data/gsm8k/train.jsonl", "data/gsm8k/test.jsonl"):
        (tmp_path / name).write_text("".join(rows))
    pair = json.dumps({"prompt": "?", "chosen": "yes", "rejected": "no"}) + "\n"
    (tmp_path / "pairs.jsonl").write_text(pair * 16)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "rewards.py").write_text("def score(response, answer):\n    return 1.0\n")
    for program in ("train.py", "my_driver.py"):
        (tmp_path / program).write_text("")
    pretend_vllm(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # a reader's jobs find the models of the hub
    with serving(_Hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield tmp_path


class _Hub(BaseHTTPRequestHandler):
    """Has everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


def dry_run(words: list[str]) -> str:
    """Run the command with --dry-run in this process, because there are many of them, and return what it prints."""
    front, dash, program = " ".join(map(shlex.quote, words)).partition(" -- ")
    asked = [*shlex.split(front), *([] if "--dry-run" in words else ["--dry-run"])]
    return in_this_process([*asked, *(["--", *shlex.split(program)] if dash else [])])


def in_this_process(words: list[str]) -> str:
    """Run an hpc-rl command and return what it prints on standard output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        typer.main.get_command(app).main(words, standalone_mode=False)
    return printed.getvalue()


DRY_RUNS = [block for block in BLOCKS if block.how == "dry-run"]


@pytest.mark.parametrize("block", DRY_RUNS, ids=str)
def test_submissions_would_go_through(block: Block, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("models/small", "runs/sft-1/model")
    for line in block.commands:
        words = shlex.split(line, comments=True)[1:]
        if not prepare(line, monkeypatch) and words[0] == "submit":
            assert dry_run(words).startswith("#!/bin/bash\n"), line


def test_enough_submissions_are_tried() -> None:
    assert len([line for block in DRY_RUNS for line in block.commands if line.startswith("hpc-rl submit ")]) >= 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [long(block) if block.page == "first-rl-task.md" else block for block in BLOCKS if block.how == "run"],
    ids=str,
)
def test_blocks_to_run_end_well(block: Block, workshop: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for line in block.commands:
        command = [sys.executable, "-m", "hpc_rl.cli", *shlex.split(line, comments=True)[1:]]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def example_file(page: str, language: str) -> str:
    """Return the last block of a page in a language: a file that the reader is asked to write."""
    return code_blocks(ROOT / "docs" / page, language)[-1]


def code_blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of a page in a language, without the indentation of a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def test_files_to_write_work(workshop: Path) -> None:
    (workshop / "slurm_templates").mkdir()
    (workshop / "slurm_templates" / "torchrun.sbatch.j2").write_text(example_file("templates.md", "jinja"))
    assert "--export=ALL --cpu-bind=none \\\n" in dry_run(["submit", "torchrun", "--", "train.py"])
    (workshop / "configs" / "recipe").mkdir(parents=True)
    (workshop / "configs" / "recipe" / "mine.yaml").write_text(example_file("recipes.md", "yaml"))
    config = compose("ppo", ["recipe=mine", "data.train_files=train.jsonl"])
    assert config.model_dump()["actor"]["mini_batch_size"] == 2048


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_is_python(page: Path) -> None:
    for block in code_blocks(page, "python"):
        if not block.startswith("# row of "):  # those are evaluated by test_extending.py
            ast.parse(block)


def test_the_files_of_the_first_task_work(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_prompts, rewards = code_blocks(ROOT / "docs" / "first-rl-task.md", "python")
    exec(make_prompts, {})
    rows = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    assert (len(rows), len(Path("val.jsonl").read_text().splitlines())) == (2000, 100)
    names: dict[str, Any] = {}
    exec(rewards, names)
    score, answer = names["score"], rows[0]["answer"]
    assert answer == " ".join(sorted(answer.split(), key=int))
    assert score(f"I sort them.\nAnswer: {answer}\nDone.", answer) == 1.0
    assert score(answer, answer) == score("Answer:", answer) == 0.0
    assert score("Answer: 1 3 2 4", "1 2 3 4") == 0.25
    assert score("Answer: 1 2 3 4 5 6 7 8", "1 2 3 4") == 0.25
    page = (ROOT / "docs" / "first-rl-task.md").read_text()
    check = re.search(r"^hpc-rl (data check .*) --model \S+$", page, re.MULTILINE)
    assert check is not None
    shown = in_this_process([*check[1].split(), "--model", str(model)])
    assert shown.startswith("prompts.jsonl: 2,000 rows") and rows[0]["answer"] in shown
    command = re.search(r"python -c \'(.*)\'$", page, re.MULTILINE)
    assert command is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(command[1].partition("; ")[2], names)
    assert f"It prints `{printed.getvalue().strip()}`" in page


def code_words(text: str) -> set[str]:
    """Return the words in `code`, up to an equals sign."""
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    return {word.partition("=")[0].strip("'\"") for word in words}


def options() -> list[tuple[str, str]]:
    return [(key, kind) for row in KINDS.values() for key, kind, *_ in documented_keys(row.schema)]


def unknown_keys(words: set[str]) -> set[str]:
    """Return the words that look like a key of the configuration but do not exist."""
    keys = {key for key, _ in options()}
    sections = {key.partition(".")[0] for key in keys}
    tables = {key for key, kind in options() if kind.startswith("dict")}
    dotted = {word for word in words if re.fullmatch(r"[a-z_]+(\.[\w-]+)+", word) and word.split(".")[0] in sections}
    groups = {".".join(key.split(".")[:depth]) for key in keys for depth in (1, 2)}
    return {word for word in dotted - keys - groups - NO_KEYS if word.rpartition(".")[0] not in tables}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OTHERS], ids=lambda page: page.name)
def test_keys_exist(page: Path) -> None:
    assert unknown_keys({"trainer.total_epoch", "trainer.total_epochs"}) == {"trainer.total_epoch"}
    assert unknown_keys(code_words(page.read_text())) == (REMOVED if page.name == "CHANGELOG.md" else set())


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows that begin with code."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [re.split(r" (?<!\\)\| ?", line.removeprefix("| ").removesuffix("|")) for line in lines]


def plain(text: str) -> Any:
    """Return the value that a cell stands for; to YAML, 1e-05 is text."""
    value = yaml.safe_load(text)
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+e-?\d+", value) else value


def value_of(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def section_of(page: str, heading: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_recipe_has_the_values_that_the_page_lists() -> None:
    section = section_of("from-verl.md", "Run verl's Slurm example with this project's trainer")
    tree = compose("ppo", ["recipe=gsm8k-verl", "data.train_files=a.parquet"]).model_dump(mode="json")
    rows = table_rows(section)
    for _, (key,), value in ((row[0], code_words(row[1]), row[2]) for row in rows):
        assert plain(value.partition(" (")[0]) == pytest.approx(value_of(tree, key)), key
    assert len(rows) > 35


@pytest.mark.parametrize("page", sorted(OTHERS))
def test_the_defaults_here_are_those_that_the_page_lists(page: str) -> None:
    defaults = {key: default for key, _, default, _ in documented_keys(KINDS["ppo"].schema)}
    rows = table_rows(section_of(page, "Defaults that differ"))
    for row in rows:
        (key,) = code_words(row[1])
        assert plain(row[3]) == plain(defaults[key]), key
    assert len(rows) > 10


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_the_keys_that_others_become_exist(name: str) -> None:
    rows = table_rows((ROOT / "docs" / name).read_text())
    ours = [code_words(row[1]) for row in rows if len(row) >= 3]
    keys = {key for key, _ in options()} | {"ray_kwargs.ray_init.num_cpus"}
    flat = set().union(*ours)
    assert len(flat & keys) > 50 and flat <= keys, flat - keys


def test_templates_page_lists_the_variables_of_a_template() -> None:
    job = Job("sft", compose("torchrun"), RunDir(Path("/runs/mine")), Path("/home/me"))
    page = (ROOT / "docs" / "templates.md").read_text()
    table = page[page.index("These variables are available in a template") :]
    listed = {word for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)}
    assert listed == set(_values(job))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"


def test_one_page_lists_all_others() -> None:
    listed = (ROOT / "docs" / "pages.md").read_text()
    assert [page.name for page in DOCS if page.name != "pages.md" and f"({page.name})" not in listed] == []


def test_the_readme_names_what_to_try_first() -> None:
    text = (ROOT / "README.md").read_text()
    assert [words for words in ("make demo", "make test", "(docs/pages.md)") if words not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_on_a_page_exist(page: Path) -> None:
    """A path in `code` that begins with a folder of the repository is a file or folder there."""
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    top = "|".join(name for name in folders if name != "build")
    words = {word for code in re.findall(r"`([^`\n]+)`", page.read_text()) for word in code.split()}
    named = {word for word in words if re.fullmatch(rf"({top})/[a-z\d_./-]+", word)} - TO_BE_WRITTEN
    assert [word for word in sorted(named) if not (ROOT / word).exists()] == []


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nav_entries(tree: Any) -> Iterator[str]:
    """Yield the paths in a `nav` of MkDocs."""
    if isinstance(tree, str):
        yield tree
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from nav_entries(child)


def test_the_site_lists_every_page_once(site_pages: ModuleType) -> None:
    entries = list(nav_entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    generated = {path for path in site_pages.generated_pages() if not path.startswith("reference/api-")}
    assert sorted(entries) == sorted({page.name for page in DOCS} | generated)


@pytest.mark.parametrize("kind", [row.name for row in offered()])
def test_the_reference_lists_every_option(site_pages: ModuleType, kind: str) -> None:
    page = site_pages.configuration_page(kind)
    rows = list(documented_keys(KINDS[kind].schema))
    for key, _, _, meaning in rows:
        assert page.count(f'<a id="{key}"></a>') == 1
        assert meaning.replace("|", r"\|") in page
    assert f"these {len(rows)} options" in page
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings))


def test_the_api_reference_lists_every_module(site_pages: ModuleType) -> None:
    pages = site_pages.api_pages()
    listed = re.findall(r"^::: (\S+)$", "\n".join(pages.values()), re.MULTILINE)
    assert len(listed) == len(set(listed)) > 150
    assert {"hpc_rl", "hpc_rl.rl.loop.trainer", "hpc_rl.node.ray_cluster.head"} < set(listed)
    assert not any("__" in name or ".starter" in name for name in listed)
    assert "[`hpc_rl.algorithms`](api-algorithms.md)" in pages["api"]


def test_links_of_pages_that_move_into_the_site(site_pages: ModuleType) -> None:
    assert site_pages.relocated("[a](docs/sft.md#x) [b](CHANGELOG.md)") == "[a](sft.md#x) [b](changelog.md)"
    assert site_pages.site_markdown("[a](../README.md) ![](figures/x.png)") == "[a](index.md) ![](figures/x.png)"
    assert site_pages.site_markdown("```sh dry-run\nx\n```\n```sh\n") == "```sh\nx\n```\n```sh\n"
