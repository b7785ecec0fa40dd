"""The prompts of a run: tokenized once, and read from files by later runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt, PromptCounts
from hpc_rl.errors import UserError
from hpc_rl.probes.tiny_model import make_tokenizer
from hpc_rl.rl.loop import prompt_data
from hpc_rl.run_dir import RunDir
from hpc_rl.token_cache import cache
from hpc_rl.training.stopping import Stopped
from tests.rl.ppo_config import ppo_config
from tests.token_cache.test_cache import Stopping

ROWS = 600
"""Three blocks."""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Loader:
    """Loads prompts as the runs in one folder do."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "a.jsonl"
        self.tokenizer: PreTrainedTokenizerFast = make_tokenizer(300)
        self.write(ROWS)

    def write(self, rows: int) -> None:
        made = [{"messages": f"{number} ist groß?", "answer": number, "more": [None, 0.5]} for number in range(rows)]
        self.file.write_text("".join(json.dumps(row) + "\n" for row in made))

    def __call__(
        self,
        *overrides: str,
        files: Sequence[Path] = (),
        split: str = "train",
        tools: Sequence[dict[str, Any]] = (),
        stopping: Any = None,
        config: PpoConfig | GenerateConfig | None = None,
    ) -> tuple[Sequence[Prompt], PromptCounts]:
        names = [str(path) for path in files or [self.file]]
        run = RunDir(self.folder / "run")
        found = config or ppo_config(*overrides)
        return prompt_data.PromptLoader(found, self.tokenizer, tools, run, stopping or Stopping()).load(names, split)

    @property
    def entries(self) -> list[str]:
        return sorted(path.name for path in RunDir(self.folder / "run").tokenized.glob("*-*"))


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows in each call of the function that tokenizes."""
    calls: list[int] = []
    make = prompt_data.prompt_tokenizer

    def counting(*arguments: Any) -> Any:
        work = make(*arguments)

        def tokenize(rows: Any) -> Any:
            found = work(rows)
            calls.append(found[1].rows)
            return found

        return tokenize

    monkeypatch.setattr(prompt_data, "prompt_tokenizer", counting)
    return calls


def contents(prompts: Sequence[Prompt]) -> list[Any]:
    return [(one.token_ids.tolist(), one.answer, one.row, one.text) for one in prompts]


def test_prompts_are_tokenized_once(load: Loader, tokenized: list[int]) -> None:
    first, counts = load()
    assert tokenized == [256, 256, 88] and len(first) == counts.rows == ROWS
    again, same = load()
    assert len(tokenized) == 3 and same == counts and same.shortest == counts.shortest > 0
    assert contents(again) == contents(first)
    assert first[599].row == {"messages": "599 ist groß?", "answer": 599, "more": [None, 0.5]}
    assert load.tokenizer.decode(first[7].token_ids) == first[7].text and "7 ist groß?" in first[7].text


def test_ppo_and_generate_share_the_files(load: Loader, tokenized: list[int]) -> None:
    load("data.max_response_length=7", "data.train_batch_size=2")
    other = compose("generate", ["model.path=/m", "data.files=x.jsonl", "data.max_prompts=3", "trainer.device=cpu"])
    assert isinstance(other, GenerateConfig)
    assert len(load(config=other)[0]) == ROWS and len(tokenized) == 3


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({}, {"overrides": ("data.answer_key=more",)}),
        ({}, {"overrides": ("data.answer_key=null",)}),
        ({}, {"overrides": ("data.max_prompt_length=500",)}),
        ({}, {"overrides": ("data.overlong_prompts=truncate",)}),
        (
            {"overrides": ("data.chat_template_kwargs={a: 1, b: 2}",)},
            {"overrides": ("data.chat_template_kwargs={b: 2, a: 1}",)},
        ),
        ({}, {"split": "test"}),
        ({}, {"tools": (TOOL,)}),
        ({"tools": (TOOL,)}, {"tools": (dict(reversed(TOOL.items())),)}),
    ],
)
def test_what_the_prompts_depend_on(
    load: Loader, tokenized: list[int], first: dict[str, Any], other: dict[str, Any]
) -> None:
    def loaded(options: dict[str, Any]) -> list[Any]:
        return contents(
            load(*options.get("overrides", ()), **{k: v for k, v in options.items() if k != "overrides"})[0]
        )

    before = loaded(first)
    assert len(loaded(other)) == ROWS and len(tokenized) == 6 and len(load.entries) == 2
    assert loaded(first) == before and len(tokenized) == 6


def test_changed_data_is_tokenized_again(load: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    load()
    load.write(3)
    prompts, _ = load()
    assert [one.answer for one in prompts] == [0, 1, 2] and len(load.entries) == 1
    assert "is stale, because the data has changed: tokenizing again" in capsys.readouterr().out


def test_the_counts_of_all_blocks(load: Loader) -> None:
    lengths = [len(one.token_ids) for one in load()[0]]
    limit = sorted(lengths)[50]
    kept, counts = load(f"data.max_prompt_length={limit}")
    fitting = [length for length in lengths if length <= limit]
    assert len(kept) == len(fitting) < ROWS and counts.shortest == min(lengths)
    assert counts == PromptCounts(rows=ROWS, tokens=sum(fitting), dropped=ROWS - len(fitting))
    cut, counts = load(f"data.max_prompt_length={limit}", "data.overlong_prompts=truncate")
    assert (len(cut), counts.truncated, counts.dropped) == (ROWS, ROWS - len(fitting), 0)
    message = (
        rf"a\.jsonl: all 600 prompts are over data\.max_prompt_length 2 \(the shortest has {min(lengths)} tokens\)"
    )
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            load("data.max_prompt_length=2")


def test_prompts_that_files_cannot_hold_stay_in_memory(
    load: Loader, tokenized: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    raw = b"\xff"
    file = load.folder / "b.parquet"
    parquet.write_table(pyarrow.table({"messages": ["7?"] * 300, "answer": [7] * 300, "raw": [raw] * 300}), file)
    for _ in range(2):
        prompts, counts = load(files=[file])
        assert counts.rows == len(prompts) == 300 and prompts[299].row["raw"] == raw
        said = capsys.readouterr().out
        assert "b.parquet are tokenized at every start and kept in memory: column 'raw' has a value that JSON" in said
        assert not load.entries and not list(RunDir(load.folder / "run").tokenized.glob("*.arrow"))
    assert tokenized == [256, 300, 256, 300]


def test_a_slow_tokenizer_has_no_files(load: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    slow = Slow(tokenizer_object=load.tokenizer.backend_tokenizer)
    slow.chat_template, load.tokenizer = load.tokenizer.chat_template, slow
    assert len(load()[0]) == ROWS and not load.entries
    assert "kept in memory: the tokenizer has no fast version" in capsys.readouterr().out


def test_a_folder_that_others_can_write_to_is_not_used(load: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    (load.folder / "shared").mkdir()
    (load.folder / "shared").chmod(0o777)
    prompts, _ = load(f"cache.data_dir={load.folder}/shared")
    assert len(prompts) == ROWS and isinstance(prompts, list) and not list((load.folder / "shared").iterdir())
    said = capsys.readouterr().out
    assert f"kept in memory: {load.folder}/shared cannot be used (" in said and "set cache.data_dir to a folder" in said


def test_a_folder_takes_the_split(load: Loader) -> None:
    (load.folder / "data").mkdir()
    for name, count in (("train", 3), ("test", 2)):
        (load.folder / "data" / f"{name}.json").write_text('{"messages": "7?", "answer": "7"}\n' * count)
    assert [len(load(files=[load.folder / "data"], split=split)[0]) for split in ("train", "test")] == [3, 2]


def test_a_bad_row_leaves_nothing(load: Loader) -> None:
    with load.file.open("a") as file:
        file.write('{"messages": "7?"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, row 601: no column 'answer'"):
        load()
    assert not load.entries


def test_a_run_stops_between_blocks(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_ROUND_S", 0)
    with pytest.raises(Stopped, match=r"^stopped before the data was tokenized: nothing is saved yet$"):
        load(stopping=Stopping(at=2))
    assert not load.entries and len(load()[0]) == ROWS
