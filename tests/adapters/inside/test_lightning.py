"""What needs no Lightning; tests/programs/test_lightning.py has the rest."""

import io
import random
from pathlib import Path

import numpy
import pytest
import torch

from hpc_rl.adapters.inside import training
from hpc_rl.adapters.inside.lightning import random_states, renamed, set_random_states
from hpc_rl.adapters.inside.training import remove_replaced


def test_random_numbers_go_on_after_a_checkpoint_that_runs_no_code() -> None:
    before, file = random_states(), io.BytesIO()
    torch.save({"states": [before]}, file)
    numbers = (torch.rand(2).tolist(), random.random(), numpy.random.rand())
    file.seek(0)
    set_random_states(torch.load(file, weights_only=True)["states"][0])
    assert (torch.rand(2).tolist(), random.random(), numpy.random.rand()) == numbers


def test_names_of_measurements() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    logged = {"train_loss": torch.tensor(2.0), "val/acc": 1, "f1": 0.25, "val_loss": 3}
    found = renamed(logged, [optimizer])
    assert found == {"train/loss": 2, "val/acc": 1, "train/f1": 0.25, "val/loss": 3, "train/lr": 0.5}
    assert renamed({}, []) == {}


def test_a_newer_checkpoint_replaces_those_of_earlier_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = tmp_path / "fit-0", tmp_path / "theirs"
    for path in (own / "step-3.ckpt", own / "step-7.ckpt", own / "mine.ckpt", theirs / "step-9.ckpt"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (own / "step-5.ckpt").mkdir()  # of a sharded strategy

    def left() -> list[str]:
        return sorted(path.name for path in own.iterdir())

    remove_replaced(own, own / "absent.ckpt")
    assert len(left()) == 4
    remove_replaced(own, own / "step-7.ckpt")
    assert left() == ["mine.ckpt", "step-7.ckpt"]
    monkeypatch.setattr(training, "own_disk", lambda path: "/local" if path.is_relative_to(theirs) else "")
    remove_replaced(own, theirs / "step-9.ckpt")  # another node would not have it
    assert left() == ["mine.ckpt", "step-7.ckpt"]
    monkeypatch.setattr(training, "own_disk", lambda _: "")
    remove_replaced(own, theirs / "step-9.ckpt")
    assert left() == ["mine.ckpt"] and (theirs / "step-9.ckpt").exists()
