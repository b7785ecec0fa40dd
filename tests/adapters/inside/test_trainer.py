"""The real Trainer of transformers, with a model of one weight, in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.adapters.inside.trainer import renamed
from hpc_rl.errors import EXIT_STOPPED
from tests.adapters.inside.hooked import hooked_environ

pytest.importorskip("accelerate")
PROGRAM = """
import os, sys
from pathlib import Path
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.drop = torch.nn.Dropout(0.5)
    def forward(self, x, labels):
        return {"loss": ((self.drop(x) @ self.weight - labels) ** 2).mean()}

class StopAt(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == int(os.environ.get("STOP_AT", -1)):
            Path(os.environ["HPC_RL_RUN_DIR"], "stop").touch()

torch.manual_seed(1)
data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(24)]
settings = dict(output_dir="out", use_cpu=True, per_device_train_batch_size=2, num_train_epochs=2, logging_steps=1,
    report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.1) | eval(sys.argv[1])
torch.manual_seed(2)
trainer = Trainer(Model(), TrainingArguments(**settings), train_dataset=data, eval_dataset=data, callbacks=[StopAt()])
trainer.train()
print("finished", trainer.state.global_step)
"""


def train(
    folder: Path, settings: dict[str, Any], attempt: int, stop_at: int = -1, processes: int = 1
) -> tuple[int, str]:
    run = folder / "run"
    environ = hooked_environ("trainer", run=run, attempt=attempt) | {"STOP_AT": str(stop_at)}
    (run / "stop").unlink(missing_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *ranks, "program.py", repr(settings)],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


KEEPS_ONE = {
    "save_strategy": "epoch",
    "eval_strategy": "epoch",
    "load_best_model_at_end": True,
    "save_total_limit": 1,
    "save_only_model": False,
}
"""Trainer would delete the checkpoint of a stop, if the training returned."""


@pytest.mark.parametrize(
    ("settings", "stop_at"),
    [({"save_only_model": True, "gradient_accumulation_steps": 3}, 2), (KEEPS_ONE, 14)],
    ids=["only model", "keeps one"],
)
def test_it_saves_ends_and_resumes_to_the_same_losses(tmp_path: Path, settings: dict[str, Any], stop_at: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, said = train(whole, settings, 1)
    total = max(losses(whole))
    assert code == 0 and f"finished {total}" in said, said
    code, said = train(parts, settings, 1, stop_at)
    assert code == EXIT_STOPPED and f"stopped after step {stop_at + 1} of {total}: checkpoint saved" in said, said
    assert "finished" not in said
    saved = json.loads((parts / "run/saved.jsonl").read_text().splitlines()[-1])
    path = str(parts / f"out/checkpoint-{stop_at + 1}")
    assert saved == {"step": stop_at + 1, "path": path, "processes": 1, "part": "train-0"}
    code, said = train(parts, settings, 2)
    assert code == 0 and f"resuming from {saved['path']}" in said, said
    assert losses(parts) == losses(whole)


def test_two_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    code, said = train(tmp_path, {}, 1, stop_at=3, processes=2)
    assert code != 0 and "stopped after step 4 of 12" in said, said
    assert {path.name for path in (tmp_path / "out/checkpoint-4").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    code, said = train(tmp_path, {}, 2, processes=2)
    assert code == 0 and sorted(losses(tmp_path)) == list(range(1, 13)), said


def test_a_stop_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    code, said = train(tmp_path, {"max_steps": 5}, 1, stop_at=4)
    assert code == 0 and "finished 5" in said and not (tmp_path / "run/saved.jsonl").exists(), said


def test_names_of_measurements() -> None:
    found = renamed({"loss": 1, "eval_loss": 2.0, "eval_x": 3, "kl": 0.5, "rewards/f/mean": 4, "text": "no"})
    assert found == {"train/loss": 1, "val/loss": 2, "val/x": 3, "actor/kl": 0.5, "train/rewards/f/mean": 4}
