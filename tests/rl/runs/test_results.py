"""What a run leaves behind, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.marks import long
from tests.rl.runs.jobs import Runs, metrics, samples, series

LETTERS = """
def score(response, answer, letter):
    return response.count(letter) / max(len(response), 1)
"""


def test_validation_samples_and_the_model(run: Runs, tmp_path: Path) -> None:
    options = ("trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.val_before_train=true")
    export = ("trainer.export=true", "trainer.log_val_generations=2", "trainer.save_freq=1")
    assert run(tmp_path, *options, *export, "trainer.max_ckpt_to_keep=2") == 0
    found = metrics(tmp_path)
    assert [step["step"] for step in found if "val/score" in step] == [0, 2, 3]
    assert [step["step"] for step in found if "actor/pg_loss" in step] == [1, 2, 3]
    assert len(series(tmp_path, "timing_s/testing")) == 3
    assert len(series(tmp_path, "timing_s/save_checkpoint")) == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert (tmp_path / "report.html").exists()

    rows = samples(tmp_path)
    assert all(row.keys() == {"step", "split", "prompt", "response", "answer", "score"} for row in rows)
    training = [row["step"] for row in rows if row["split"] == "train"]
    assert set(training) == {1, 2, 3} and all(2 <= training.count(step) <= 4 for step in (1, 2, 3))
    rows = [row for row in rows if row["split"] == "val"]
    assert [row["step"] for row in rows] == [0, 0, 2, 2, 3, 3]
    assert "<|im_start|>user\nWhat is" in rows[0]["prompt"]
    check_export(tmp_path / "model", rows[-1])


def check_export(folder: Path, sample: dict[str, str]) -> None:
    """The exported model generates the samples of the last validation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer(sample["prompt"], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        said = model.generate(**asked, max_new_tokens=6, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(said, skip_special_tokens=True) == sample["response"]
    assert tokenizer.chat_template


@pytest.mark.parametrize("advantage, lr", [long("gae", 3e-3), ("grpo", 3e-3)])
def test_it_learns(run: Runs, tmp_path: Path, advantage: str, lr: float) -> None:
    """To write one letter, of which there are some hundred."""
    (tmp_path / "reward.py").write_text(LETTERS)
    assert (
        run.without("reward.")(
            tmp_path / "run",
            f"algorithm.advantage={advantage}",
            f"reward.function={tmp_path}/reward.py:score",
            "reward.kwargs={letter: a}",
            "reward.workers=1",
            "data.train_batch_size=8",
            "rollout.n=8",
            "actor.mini_batch_size=32",
            f"actor.optim.lr={lr}",
            "critic.optim.lr=3e-3",
            "trainer.total_training_steps=40",
            "trainer.micro_tokens=1000",
        )
        == 0
    )
    scores = series(tmp_path / "run", "critic/score/mean")
    print([round(score, 3) for score in scores])
    assert sum(scores[:5]) / 5 < 0.1
    assert sum(scores[-5:]) / 5 > 0.5
