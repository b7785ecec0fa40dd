from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.config.compose import dump
from hpc_rl.config.schema import DataConfig, ModelConfig, OptimConfig, SftConfig, SftTrainerConfig
from tests.helpers import make_tiny_model, write_chats


@pytest.fixture(scope="session")
def sft_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps, as config.yaml."""
    folder = tmp_path_factory.mktemp("sft")
    config = SftConfig(
        model=ModelConfig(path=str(make_tiny_model(folder / "model", tie=True))),
        data=DataConfig(
            train_files=[str(write_chats(folder / "train.jsonl", 31))],
            val_files=[str(write_chats(folder / "val.jsonl", 9))],
            train_batch_size=8,
        ),
        optim=OptimConfig(lr=1e-2, clip_grad=2.0),
        trainer=SftTrainerConfig(device="cpu", total_epochs=2, micro_tokens=1024, test_freq=3, export=False),
    )
    path = folder / "config.yaml"
    path.write_text(dump(config))
    return path
