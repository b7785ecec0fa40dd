"""What tokenized data depends on."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.preferences import PreferenceDataConfig, RewardDataConfig
from hpc_rl.config.sft import DataConfig
from hpc_rl.data import identity
from hpc_rl.data.identity import contents_of, key_of
from tests.data.conftest import CHATML, MARKED


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "a.jsonl").write_text("{}\n")
    return str(tmp_path / "a.jsonl")


def test_the_key_depends_on_what_the_tokens_depend_on(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(split: str = "train", files: tuple[str, ...] = (file,), **options: Any) -> str:
        return key_of(files, split, data.model_copy(update=options), tokenizer)

    first = key()
    assert first == key() == key(train_batch_size=8, shuffle=False, val_files=["b"], train_files=["c"])
    (tmp_path / "link.jsonl").symlink_to(file)
    assert first == key(files=(str(tmp_path / "link.jsonl"),))
    (tmp_path / "same.jinja").write_text(CHATML)
    assert first == key(chat_template=str(tmp_path / "same.jinja"))
    (tmp_path / "other.jinja").write_text(MARKED)
    others = [
        key("test"),
        key(files=(file, file)),
        key(max_length=1023),
        key(truncation="drop"),
        key(messages_key="chat"),
        key(prompt_key="a", response_key="b"),
        key(chat_template=str(tmp_path / "other.jinja")),
    ]
    monkeypatch.setattr(identity, "FORMAT", identity.FORMAT + 1)
    others.append(key())
    monkeypatch.undo()
    tokenizer.add_tokens(["twelve"])
    others.append(key())
    tokenizer.add_special_tokens({"pad_token": "<|im_end|>"})
    others.append(key())
    assert len({first, *others}) == len(others) + 1


def test_the_kind_of_data_counts(tokenizer: PreTrainedTokenizerFast, file: str) -> None:
    kinds = [kind(train_files=[file]) for kind in (DataConfig, PreferenceDataConfig, RewardDataConfig)]
    assert len({key_of([file], "train", kind, tokenizer) for kind in kinds}) == 3


def test_a_template_with_the_date_is_of_a_day(
    tokenizer: PreTrainedTokenizerFast, data: DataConfig, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(2100, 1, 2)

    plain = key_of([file], "train", data, tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d') }}" + CHATML
    dated = key_of([file], "train", data, tokenizer)
    monkeypatch.setattr(identity, "datetime", Later)
    assert key_of([file], "train", data, tokenizer) != dated
    tokenizer.chat_template = CHATML
    assert key_of([file], "train", data, tokenizer) == plain


def test_the_contents_are_another_part(file: str) -> None:
    before = contents_of([file], "train")
    assert before == contents_of([file], "test")
    Path(file).write_text("{} \n")
    assert contents_of([file], "train") != before
