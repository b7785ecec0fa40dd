"""An exported model, loaded as others load it: it ends its answers, and scores texts, as the run does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from tests.data.conftest import CHATML
from tests.finetune.jobs import run_here
from tests.helpers import make_tiny_model
from tests.rl.rollout.vllm.test_engine import needs_vllm

QUESTIONS = ("What is 3 plus 4?", "What is 5 plus 5?")
ANSWERS = ("It is 7.", "It is 10.")
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, kind, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options = dict(model=folder, dtype="float32", max_model_len=200, enforce_eager=True, max_num_seqs=4)
if kind == "generate":
    llm = LLM(**options)
    sampling = llm.get_default_sampling_params()
    sampling.temperature, sampling.max_tokens = 0, 60
    chats = [[{"role": "user", "content": text}] for text in texts]
    found = [[one.outputs[0].text, one.outputs[0].finish_reason] for one in llm.chat(chats, sampling)]
else:
    found = [one.outputs.probs for one in LLM(**options, runner="pooling").classify(texts)]
print("FOUND", json.dumps(found), flush=True)
"""


def base_model(folder: Path, **named: str | None) -> Path:
    """A model whose tokenizer, like those of base models, names another end than its chat template writes."""
    path = make_tiny_model(folder, hidden=64, num_attention_heads=2, num_key_value_heads=2, tie=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token, tokenizer.pad_token = "<|endoftext|>", named.get("pad_token")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    end = tokenizer.eos_token_id
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": end, "pad_token_id": None}))
    GenerationConfig(eos_token_id=end).save_pretrained(path)
    return path


def in_vllm(folder: Path, kind: str, texts: list[str]) -> list[Any]:
    command = [sys.executable, "-c", VLLM, str(folder), kind, json.dumps(texts)]
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environ)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [done.stderr[-1000:]]
    found: list[Any] = json.loads(line.removeprefix("FOUND "))
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    turns = [("user", "assistant"), *zip(QUESTIONS, ANSWERS, strict=True)]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in zip(turns[0], pair, strict=True)]}
        for pair in turns[1:]
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = [f"model.path={base_model(folder / 'base')}", f"data.train_files={folder / 'train.jsonl'}"]
    options = ["data.train_batch_size=2", "optim.lr=1e-2", "trainer.device=cpu", "trainer.total_epochs=60"]
    assert run_here(base, folder / "run", *options, "data.max_length=128", "trainer.micro_tokens=256") == 0
    return folder / "run" / "model"


def test_the_end_of_a_turn_is_named_wherever_programs_look(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    end, base_end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    generation, config = (
        json.loads((exported / f"{name}.json").read_text()) for name in ("generation_config", "config")
    )
    assert generation["eos_token_id"] == config["eos_token_id"] == [end, base_end]
    assert generation["pad_token_id"] == config["pad_token_id"] == tokenizer.pad_token_id == base_end
    assert tokenizer.eos_token_id == end and tokenizer.chat_template == CHATML


def test_transformers_ends_its_answers(exported: Path) -> None:
    assert in_transformers(exported) == [text + "<|im_end|>" for text in ANSWERS]


def in_transformers(folder: Path) -> list[str]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for question in QUESTIONS:
        asked = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**ids, max_new_tokens=60, do_sample=False)
        found.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :]))
    return found


@needs_vllm
def test_vllm_ends_its_answers(exported: Path) -> None:
    assert in_vllm(exported, "generate", list(QUESTIONS)) == [[text, "stop"] for text in ANSWERS]


@pytest.mark.long
@needs_vllm
def test_vllm_and_transformers_give_the_scores_of_a_reward_model(tmp_path: Path) -> None:
    rows = [{"prompt": q, "chosen": a, "rejected": "No. " * 3} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = [f"model.path={base_model(tmp_path / 'base')}", f"data.train_files={tmp_path / 'train.jsonl'}"]
    options = ["data.train_batch_size=2", "optim.lr=1e-2", "trainer.device=cpu", "trainer.total_epochs=10"]
    assert (
        run_here(["--kind", "rm", *base], tmp_path / "run", *options, "data.max_length=128", "trainer.micro_tokens=512")
        == 0
    )
    folder = tmp_path / "run" / "model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [
        f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        for row in rows
        for answer in (row["chosen"], row["rejected"])
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        together = model(**batch).logits
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert alone.abs().max() > 1.5, "a sigmoid would differ"
    torch.testing.assert_close(torch.tensor(in_vllm(folder, "classify", texts)), alone, atol=1e-3, rtol=1e-3)
