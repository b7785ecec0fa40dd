"""`data check`: what it prints with a tokenizer, and without transformers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.preferences import RewardDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.check import check_data
from hpc_rl.errors import UserError
from hpc_rl.submission.hub import HubCache
from hpc_rl.submission.preflight.model import check_chat_template
from tests.data.conftest import CHATML, MARKED

SFT = DataConfig(train_files=["unused"])
PPO = PromptDataConfig(train_files=["unused"])
CHAT = {
    "messages": [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "13"},
    ],
    "answer": ["twelve é"],
}


@pytest.fixture(params=[CHATML, MARKED], ids=["derived", "marked"])
def folder(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    tokenizer.chat_template = request.param
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({**CHAT, "answer": "x"}) + "\n" + json.dumps(CHAT) + "\n")
    return tmp_path


def lines(folder: Path, data: DataConfig | PromptDataConfig | RewardDataConfig, number: int = 2) -> list[str]:
    model = folder / "model"
    found = check_data(str(folder / "rows.jsonl"), number, data, ModelConfig(path=str(model)), model)
    return [line for line in found if not line.startswith("columns that are not read")]


def parts(printed: list[str], label: str) -> list[str]:
    """The text of each part with this label, its pieces joined."""
    found: list[str] = []
    last = ""
    for line in printed:
        if not line.startswith("  "):
            continue
        last = line[:10].strip() or last
        if last == label:
            pieces = json.loads("[" + line[11:].strip().replace('" "', '", "') + "]")
            if line[:10].strip():
                found.append("")
            found[-1] += "".join(pieces)
    return found


def test_tokens_and_loss_of_a_row(folder: Path) -> None:
    printed = lines(folder, SFT)
    assert printed[0] == f"{folder / 'rows.jsonl'}: 2 rows, all valid chats"
    assert parts(printed, "loss") == ["12<|im_end|>", "13<|im_end|>"]
    whole = "".join(a + b for a, b in zip(parts(printed, "no loss"), [*parts(printed, "loss"), ""], strict=True))
    assert whole.startswith("<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n")
    assert (
        printed[1] == f"row 2 ({sum(line.count(chr(34)) for line in printed[2:]) // 2} tokens, 6 of them carry loss):"
    )
    assert all(len(line) <= 110 for line in printed)


def test_rows_that_are_cut_or_dropped(folder: Path) -> None:
    whole = lines(folder, SFT)[1]
    count = int(whole.split("(")[1].split()[0])
    cut = SFT.model_copy(update={"max_length": count - 1})
    limit = f"data.max_length {count - 1}"
    assert lines(folder, cut)[1].startswith(f"row 2 ({count - 1} tokens, ")
    assert lines(folder, cut)[1].endswith(f" carry loss; cut to {limit}):")
    short = SFT.model_copy(update={"max_length": 4})
    assert lines(folder, short)[1] == "row 2 is dropped: no assistant token is left within data.max_length 4"
    drop = cut.model_copy(update={"truncation": "drop"})
    assert lines(folder, drop)[1] == f"row 2 is dropped: it is longer than {limit}"


@pytest.mark.parametrize("folder", [CHATML], indirect=True)
def test_a_prompt_and_its_answer(folder: Path) -> None:
    printed = lines(folder, PPO)
    assert printed[0].endswith("2 rows, all valid prompts")
    assert printed[1].startswith("row 2 as the policy sees it (")
    text = "".join(json.loads("[" + ", ".join(line.strip().replace('" "', '", "') for line in printed[2:-1]) + "]"))
    assert text.endswith("12<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")
    assert printed[-1] == 'reference answer (data.answer_key=answer): ["twelve é"]'
    limited = PPO.model_copy(update={"max_prompt_length": 5})
    assert "row 2 is dropped: it has " in lines(folder, limited)[1]
    assert "cut to the last 5" in lines(folder, limited.model_copy(update={"overlong_prompts": "truncate"}))[1]


def test_rows_that_do_not_exist_and_bad_rows(folder: Path) -> None:
    with pytest.raises(UserError, match="has 2 rows: choose --row from 1 to 2"):
        lines(folder, SFT, number=3)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"messages": []}\n')
    with pytest.raises(UserError, match="row 3: column 'messages' has an empty list"):
        lines(folder, SFT)


def test_without_transformers_the_text_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tokens = lines(folder, SFT)
    monkeypatch.setitem(sys.modules, "transformers", None)
    printed = lines(folder, SFT)
    for label in ("loss", "no loss"):
        assert parts(printed, label) == parts(with_tokens, label)
    assert printed[-3].startswith(f"The tokens are not shown, because {sys.executable} has no transformers. ")
    assert printed[-1].startswith(f"{shlex.quote(sys.executable)} -m pip install ")
    (folder / "model" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template: set data"):
        lines(folder, SFT)
    with pytest.raises(UserError, match=r"model\.path me/name is a name on the hub, and .* has no transformers"):
        list(check_data(str(folder / "rows.jsonl"), 1, SFT, ModelConfig(path="me/name"), None))


@pytest.mark.parametrize("installed", [True, False])
def test_fields_without_effect_are_counted(folder: Path, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = {"role": "assistant", "content": "12", "reasoning_content": "seven and five", "weight": 0}
    row = {"messages": [{**CHAT["messages"][0], "name": "Ann"}, turn, *CHAT["messages"][2:]], "tools": [], "id": 3}
    (folder / "rows.jsonl").write_text(2 * (json.dumps(row) + "\n") + json.dumps(CHAT) + "\n")
    if not installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    found = list(check_data(str(folder / "rows.jsonl"), 1, SFT, ModelConfig(path="x"), folder / "model"))
    assert "columns that are not read, with the number of rows that have a value: answer (1), id (2)" in found
    assert (
        "fields without effect: name (2), reasoning_content (2): the chat template does not render them, or nothing "
        "reads them" in found
    )
    assert parts(found, "loss") == ["13<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML.replace("<|im_end|>", ""), "ends the assistant's turns with no special token"),
        (
            CHATML.replace("{{ m.content }}", "{{ '<t>' if loop.last and m.role == 'assistant' }}{{ m.content }}"),
            "in another form than the last",
        ),
        (MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"), "outside of its generation"),
    ],
)
def test_what_a_template_does_to_training_is_said(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    """By `data check` with transformers and without, and by the checks of a submission."""
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps(CHAT) + "\n")
    model, cache = ModelConfig(path=str(tmp_path / "model")), HubCache(tmp_path, tmp_path, "", "")
    assert said in lines(tmp_path, SFT, 1)[1]
    assert said in (check_chat_template(model, SFT, cache) or "")
    only_ends = check_chat_template(model, PPO, cache)
    assert ("no special token" in said) == (only_ends is not None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert said in lines(tmp_path, SFT, 1)[1]


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer could be loaded from"):
        list(check_data(str(folder / "rows.jsonl"), 1, SFT, ModelConfig(path=str(folder)), folder))


@pytest.mark.parametrize("folder", [MARKED], indirect=True)
def test_the_command_on_a_light_installation(folder: Path) -> None:
    """Without torch, numpy, pyarrow, datasets and transformers."""
    (folder / "rows.csv").write_text("question,answer\nWhat?,12\n")
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'numpy', 'pyarrow', 'datasets', 'transformers']))\n"
        "from hpc_rl.cli import main\n"
        "sys.argv[0] = 'hpc-rl'\n"
        "main()\n"
    )

    def command(*arguments: str) -> Any:
        return subprocess.run(
            [sys.executable, "-c", program, "data", *arguments],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    pair = ("data.prompt_key=question", "data.response_key=answer")
    done = command("check", "rows.csv", "--model", "model", *pair)
    assert done.returncode == 0, done.stderr
    assert '  loss     "12<|im_end|>"' in done.stdout.splitlines()
    done = command("check", "rows.csv", "--model", "model", "--kind", "ppo", "data.prompt_key=question")
    assert done.stdout.splitlines()[-1] == 'reference answer (data.answer_key=answer): "12"', done.stderr
    done = command("check", "rows.csv", *pair)
    (counted, hint) = done.stdout.splitlines()
    assert "1 row, all valid chats" in counted and "--model FOLDER_OR_NAME" in hint and done.returncode == 0
    for arguments, message in (
        (("check", "rows.csv", "--model", "model"), "set data.prompt_key=question data.response_key=answer"),
        (("check", "rows.csv"), "set data.prompt_key=question data.response_key=answer"),
        (("gsm8k", "--source", "openai/gsm8k:main", "--out", "out"), "data gsm8k needs datasets, and"),
    ):
        done = command(*arguments)
        assert done.returncode == 2 and message in done.stderr
        assert all(line.startswith("hpc-rl: ") for line in done.stderr.splitlines())


def test_the_tokens_of_a_labelled_response(folder: Path) -> None:
    row = {"prompt": "What?", "response": "12", "a": 0.5, "b": 1}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = {"train_files": ["a"], "label_keys": ["a", "b"]}
    printed = lines(folder, RewardDataConfig(**options), 1)
    assert printed[1].startswith("row 1, response with labels 0.5, 1 (") and parts(printed, "loss") == ["12<|im_end|>"]
    printed = lines(folder, RewardDataConfig(train_files=["a"], label_key="a"), 1)
    assert printed[1].startswith("row 1, response with label 0.5 (")
