import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.adapters.inside import accelerate
from hpc_rl.adapters.inside.accelerate import Waiting
from hpc_rl.adapters.saved import newest_saved
from hpc_rl.run_dir import ENV_RUN_DIR, RunDir
from tests.adapters.inside.hooked import hooked_environ

LOOP = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), 0.1))
for step in range(1, 7):
    loss = model(torch.ones(2)).sum()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.log({"loss": loss.item(), "text": "x"}, step=step)
    if step in (2, 6):
        accelerator.save_state(f"out/step_{step}")
"""


def test_a_checkpoint_is_recorded_when_all_ranks_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path))
    run, waiting = RunDir(tmp_path), Waiting()
    waiting.note_pass(2)  # nothing waits
    for name, ranks in (("all", (0, 1)), ("first", (0,))):
        (tmp_path / name).mkdir()
        for rank in ranks:
            (tmp_path / name / f"random_states_{rank}.pkl").touch()
        waiting.begin(tmp_path / name)
        passes = 0
        while waiting.path is not None:
            waiting.note_pass(2)
            passes += 1
        found = newest_saved(run)
        assert found is not None and Path(found.path) == tmp_path / name and found.processes == 2
        assert passes == (2 if name == "all" else accelerate.LATER + 1)


def test_the_loop_of_a_user(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "loop.py").write_text(LOOP)
    environ = hooked_environ("accelerate", run=tmp_path)
    subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, env=environ, timeout=240, check=True)
    saved = [json.loads(line) for line in (tmp_path / "saved.jsonl").read_text().splitlines()]
    assert [(one["step"], one["path"]) for one in saved] == [(2, str(tmp_path / "out/step_2"))]  # step 6 was the end
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and all("train/loss" in line for line in lines)
