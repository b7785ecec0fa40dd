"""What tokenized data depends on."""

from __future__ import annotations

import importlib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.training.preferences import PreferenceDataConfig, RewardDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data import identity
from hpc_rl.data.identity import contents_of, key_of, tokenizer_of, window_of, windows_of
from tests.data.conftest import CHATML, MARKED


def test_windows_of_a_run_have_one_key_and_different_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert windows_of(tmp_path / "a") != windows_of(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert windows_of(tmp_path / "a") == windows_of(Path("a"))
    first = window_of("key", "commit", (0, 10))
    others = [window_of("other", "commit", (0, 10)), window_of("key", "other", (0, 10))]
    others += [window_of("key", "commit", (10, 10)), window_of("key", "commit", (0, 10), "{{ strftime_now('%Y') }}")]
    assert first == window_of("key", "commit", (0, 10), CHATML) and len({first, *others}) == 5


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "a.jsonl").write_text("{}\n")
    return str(tmp_path / "a.jsonl")


def test_the_key_depends_on_what_the_tokens_depend_on(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(split: str = "train", files: tuple[str, ...] = (file,), **options: Any) -> str:
        return key_of(files, split, data.model_copy(update=options), tokenizer_of(tokenizer))

    first = key()
    assert first == key() == key(train_batch_size=8, shuffle=False, val_files=["b"], train_files=["c"])
    (tmp_path / "link.jsonl").symlink_to(file)
    assert first == key(files=(str(tmp_path / "link.jsonl"),))
    assert first == key(chat_template="a.jinja")  # the tokenizer has its text
    others = [
        key("test"),
        key(files=(file, file)),
        key(max_length=1023),
        key(truncation="drop"),
        key(messages_key="chat"),
        key(prompt_key="a", response_key="b"),
    ]
    monkeypatch.setattr(identity, "FORMAT", identity.FORMAT + 1)
    others.append(key())
    monkeypatch.undo()
    assert key() == first
    monkeypatch.setattr(identity, "_text", lambda path: f"{path.name} has changed")
    others.append(key())
    monkeypatch.undo()
    tokenizer.chat_template = MARKED
    others.append(key())
    tokenizer.chat_template = CHATML
    tokenizer.init_kwargs["split_special_tokens"] = True
    others.append(key())
    del tokenizer.init_kwargs["split_special_tokens"]
    assert key() == first
    tokenizer.add_tokens(["twelve"])
    others.append(key())
    tokenizer.add_special_tokens({"pad_token": "<|im_end|>"})
    others.append(key())
    assert len({first, *others}) == len(others) + 1


def test_the_kind_of_data_counts(tokenizer: PreTrainedTokenizerFast, file: str) -> None:
    kinds = [kind(train_files=[file]) for kind in (DataConfig, PreferenceDataConfig, RewardDataConfig)]
    assert len({key_of([file], "train", kind, tokenizer_of(tokenizer)) for kind in kinds}) == 3


def test_a_template_with_the_date_is_of_a_day(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(2100, 1, 2)

    template = "{{ strftime_now('%d') }}" + CHATML
    plain, dated = contents_of([file], "train", CHATML), contents_of([file], "train", template)
    tokenizer.chat_template = template
    key = key_of([file], "train", data, tokenizer_of(tokenizer))
    monkeypatch.setattr(identity, "datetime", Later)
    assert contents_of([file], "train", CHATML) == plain and contents_of([file], "train", template) != dated
    assert key_of([file], "train", data, tokenizer_of(tokenizer)) == key, (
        "the entry of the day before is found, and replaced"
    )


def test_the_key_stays_after_a_call(tokenizer: PreTrainedTokenizerFast, data: DataConfig, file: str) -> None:
    tokenizer.backend_tokenizer.enable_truncation(16)
    tokenizer.backend_tokenizer.enable_padding()
    before = key_of([file], "train", data, tokenizer_of(tokenizer))
    tokenizer("some text")
    assert tokenizer.backend_tokenizer.truncation is None
    assert key_of([file], "train", data, tokenizer_of(tokenizer)) == before


def test_folders_with_the_same_name_are_different(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for project in ("a", "b"):
        (tmp_path / project / "data").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / project)
        keys |= {
            key_of(["data"], "train", data, tokenizer_of(tokenizer)),
            key_of(["hub/data"], "train", data, tokenizer_of(tokenizer)),
        }
    assert len(keys) == 3


def test_the_code_of_a_tokenizer_counts(
    trained: Tokenizer, data: DataConfig, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "modules" / "transformers_modules"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(package.parent)
    source = package / "own.py"
    source.write_text("import transformers\nclass Own(transformers.PreTrainedTokenizerFast):\n    pass\n")
    own = importlib.import_module("transformers_modules.own").Own(tokenizer_object=trained)
    own.chat_template = CHATML
    before = key_of([file], "train", data, tokenizer_of(own))
    assert before == key_of([file], "train", data, tokenizer_of(own))
    source.write_text(f"{source.read_text()}# other\n")
    assert key_of([file], "train", data, tokenizer_of(own)) != before


def test_the_contents_are_another_part(file: str) -> None:
    before = contents_of([file], "train")
    assert before == contents_of([file], "test")
    Path(file).write_text("{} \n")
    assert contents_of([file], "train") != before
