"""What needs no Lightning; tests/programs/test_lightning.py has the rest."""

import io
import random

import numpy
import torch

from hpc_rl.adapters.inside.lightning import random_states, renamed, set_random_states


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
