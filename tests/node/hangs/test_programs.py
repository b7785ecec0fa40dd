"""A user's program with transformers' Trainer, of which a rank stops in a step."""

from pathlib import Path

import pytest

from hpc_rl.node.hangs.process_status import LONG
from tests.node.test_torchrun import Entry

LIMIT_S = 5
PROGRAM = f"""
import os, time
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
    def forward(self, x, labels):
        return {{"loss": ((x @ self.weight - labels) ** 2).mean()}}

class Sleeps(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 0:
            time.sleep({LONG * LIMIT_S + 3})  # what nobody can tell from a hang
            print("the first step begins", flush=True)

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and os.environ["RANK"] == "0":
            time.sleep(10_000)

settings = TrainingArguments("out", use_cpu=True, max_steps=9, report_to=[], save_strategy="no", disable_tqdm=True)
data = [{{"x": torch.randn(4), "labels": torch.randn(())}} for _ in range(32)]
Trainer(Model(), settings, train_dataset=data, callbacks=[Sleeps()]).train()
"""


def test_a_step_that_does_not_end(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    entry = Entry(tmp_path, "--adapter", "transformers", "--hang-timeout", str(LIMIT_S), "--device", "cpu")
    try:
        code, out, err = entry.run(PROGRAM, HPC_RL_RUN_DIR=str(tmp_path))
    finally:
        entry.end()
    assert code == 1 and "the first step begins" in out, out + err
    line = (entry.attempt / ".hang").read_text()
    assert line.startswith("rank 0 on node localhost: no heartbeat for ") and "in training of step 3" in line, line
    assert (entry.attempt / "stacks").is_dir()
