"""The terminal chat, with messages from a pipe, and ended by Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_rl.probes.chat import load_chat
from tests.helpers import make_tiny_model

TIMEOUT_S = 600
OWN_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

open("ran", "w").close()


class OwnConfig(Qwen2Config):
    model_type = "own_kind"


class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chat")
    make_tiny_model(made / "runs" / "sft-1" / "model", hidden=32, layers=2, max_position_embeddings=64)
    (made / "runs" / "sft-1" / "config.yaml").write_text("")
    (made / "runs" / "sft-2").mkdir()
    (made / "runs" / "sft-2" / "config.yaml").write_text("")
    (made / "reward").mkdir()
    (made / "reward" / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    return made


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hpc_rl.cli", "chat", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=os.environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def say(folder: Path, messages: Sequence[str], *words: str) -> tuple[int, list[str], str]:
    process = start(folder, *words)
    shown, errors = process.communicate("".join(f"{message}\n" for message in messages), TIMEOUT_S)
    return process.returncode, shown.splitlines(), errors


def test_a_conversation_from_a_pipe(folder: Path) -> None:
    """A new conversation begins like the first; earlier messages stay in the context until it is full."""
    options = ("sft-1", "--temperature", "0", "--max-tokens", "4")
    code, shown, errors = say(
        folder, ["one", "/reset", *["one"] * 20, "/reset", "one", "/exit", "never read"], *options
    )
    assert code == 0, errors
    assert 3 < len(shown) < 20 and shown[0] == shown[1] == shown[-1]
    assert "exceed the model's 64 positions" in errors


@pytest.mark.long
def test_the_end_of_the_input_ends_the_chat(folder: Path) -> None:
    code, alone, errors = say(folder, ["one"], "sft-1", "--temperature", "0", "--max-tokens", "4")
    assert code == 0 and len(alone) == 1, errors


def test_a_token_that_ends_an_answer_is_not_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some models end a turn with a token that their tokenizers do not count as special."""
    chat = load_chat(str(folder / "runs" / "sft-1" / "model"), temperature=0, max_tokens=4)
    chat.answer("one")
    whole = capsys.readouterr().out.removesuffix("\n")
    first, *_, last = chat.tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert first != last and last not in chat.tokenizer.all_special_ids
    chat.messages, chat.ends = [], [last]
    chat.answer("one")
    said = chat.messages[-1]["content"]
    assert capsys.readouterr().out.removesuffix("\n") == said
    assert said == chat.tokenizer.decode(chat.tokenizer(whole, add_special_tokens=False)["input_ids"][:-1]) != whole


def test_the_first_line_does_not_allow_the_code_of_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder / "modules"))
    path = make_tiny_model(folder / "remote", hidden=32, layers=2)
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    settings = json.loads((path / "config.json").read_text()) | {"model_type": "own_kind", "auto_map": names}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "own.py").write_text(OWN_CODE)
    code, shown, errors = say(folder, ["y", "y"], "./remote")
    assert code == 2 and not shown and not (folder / "ran").exists()
    assert "./remote comes with code of its own" in errors and "--trust-remote-code" in errors
    code, shown, errors = say(folder, ["y"], "./remote", "--trust-remote-code", "--max-tokens", "2")
    assert code == 0 and len(shown) == 1 and (folder / "ran").exists(), errors


@pytest.mark.long
def test_a_conversation_that_is_too_long_can_be_begun_anew(folder: Path) -> None:
    code, shown, errors = say(folder, ["word " * 40, "one"], "sft-1", "--temperature", "0", "--max-tokens", "4")
    assert code == 0 and len(shown) == 1
    assert "exceed the model's 64 positions: begin a new conversation with /reset" in errors


def test_ctrl_c_ends_it_without_a_traceback(folder: Path) -> None:
    process = start(folder, "sft-1", "--temperature", "0", "--max-tokens", "4")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    assert process.stdout.readline().strip(), "it has answered"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and "Traceback" not in errors


@pytest.mark.parametrize(
    "words, message",
    [
        (["sft-2"], "run sft-2 has no model"),
        (["./none"], "./none: there is no such run or model folder"),
        (["runs"], "runs is a folder without config.json, and not a run"),
        (["reward"], "reward is a classifier (LlamaForSequenceClassification), such as a reward model, and cannot"),
    ],
)
def test_what_is_no_model(folder: Path, words: list[str], message: str) -> None:
    code, shown, errors = say(folder, [], *words)
    assert code == 2 and not shown and message in errors and "Traceback" not in errors
