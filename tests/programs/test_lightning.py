"""The real Lightning: stopped anywhere in an epoch, with workers, and in validation, it resumes to the same losses."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.adapters.inside.hooked import hooked_environ
from tests.programs.environments import python_of

pytestmark = pytest.mark.programs
PROGRAM = """
import os, sys
from pathlib import Path
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    def training_step(self, batch, number):
        if self.trainer.global_step == int(os.environ["STOP_AT"]) - 1:
            Path(os.environ["HPC_RL_RUN_DIR"], "stop").touch()
        loss = ((self.layers(batch[0]) - batch[1]) ** 2).mean()
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, number):
        self.log("val_loss", ((self.layers(batch[0]) - batch[1]) ** 2).mean())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

L.seed_everything(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
settings = dict(max_epochs=3, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    log_every_n_steps=1, enable_checkpointing=False) | eval(sys.argv[1])
workers = settings.pop("workers", 0)
trainer = L.Trainer(**settings)
loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
trainer.fit(Module(), loader, DataLoader(data, batch_size=32))
print("finished", trainer.global_step)
"""


def fit(folder: Path, settings: str, stop_at: int = -1) -> tuple[int, str]:
    (folder / "attempt-1").mkdir(parents=True, exist_ok=True)
    (folder / "stop").unlink(missing_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [python_of("trainers"), "program.py", settings],
        cwd=folder, env=hooked_environ("lightning", run=folder) | {"STOP_AT": str(stop_at)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def losses(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], {}).update({name: line[name] for name in line if name.endswith("/loss")})
    return found


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        ("{}", (5, 16, 37)),
        ("{'workers': 1}", (21,)),
        ("{'accumulate_grad_batches': 3, 'val_check_interval': 6}", (3,)),
    ],
    ids=["plain", "workers", "accumulation and validation"],
)
def test_a_resume_is_exact(tmp_path: Path, settings: str, stops: tuple[int, ...]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, said = fit(whole, settings)
    assert code == 0 and "finished" in said, said
    for stop_at in stops:
        code, said = fit(parts, settings, stop_at)
        assert code == 75 and "checkpoint saved" in said and "finished" not in said, said
    code, said = fit(parts, settings)
    assert code == 0 and "resuming from" in said and "not resumable" not in said, said
    assert losses(parts) == losses(whole)
