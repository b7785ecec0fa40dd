"""The checkpoint manager and the metrics of torchtitan 0.3.0, as its source has them: torchtitan itself is not run."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.adapters.inside import torchtitan
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.run_dir import ENV_ATTEMPT_DIR, ENV_RUN_DIR


class Manager:
    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.interval, self.enable = str(folder / "checkpoint"), 500, True
        self.states = {"train_state": SimpleNamespace(config=SimpleNamespace(training=SimpleNamespace(steps=steps)))}
        self.calls: list[Any] = []

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        is_saved = last_step or curr_step % self.interval == 0
        if is_saved:
            self.calls.append((curr_step, last_step))
            Path(self.folder, f"step-{curr_step}").mkdir(parents=True)
        return is_saved

    def maybe_wait_for_saving(self) -> None:
        self.calls.append("waited")


class Processor:
    def log(self, step: int, loss: float, most: float, norm: float, extra_metrics: Any = None) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "attempt-1").mkdir()
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path))
    monkeypatch.setenv(ENV_ATTEMPT_DIR, str(tmp_path / "attempt-1"))
    monkeypatch.setattr(torchtitan, "_training", [])
    for owner, name in ((Manager, "save"), (Processor, "log")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to restore it
    torchtitan.attach(SimpleNamespace(__name__=Manager.__module__, BaseCheckpointManager=Manager))
    torchtitan.attach(SimpleNamespace(__name__="metrics", MetricsProcessor=Processor))
    yield tmp_path


def test_a_stop_saves_everything_in_any_step(run: Path) -> None:
    manager, processor = Manager(run, 10), Processor()
    assert not manager.save(1)
    (run / "stop").touch()
    processor.log(2, 1.5, 2.0, 0.1, extra_metrics={"lr": 1e-3, "n_tokens_seen": 8})
    with pytest.raises(SystemExit) as ended:
        manager.save(2)
    assert ended.value.code == EXIT_STOPPED and manager.calls == [(2, False), "waited"]
    assert json.loads((run / "saved.jsonl").read_text())["path"] == str(run / "checkpoint/step-2")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"train/loss": 1.5, "train/lr": 1e-3, "train/tokens": 8.0}.items() <= {
        name: value for line in lines if line["step"] == 2 for name, value in line.items()
    }.items()


def test_a_stop_in_the_last_step_changes_nothing(run: Path) -> None:
    manager = Manager(run, 3)
    (run / "stop").touch()
    assert manager.save(3, last_step=True) and manager.calls == [(3, True)]
