from __future__ import annotations

import pytest

from tests.helpers import make_tiny_model, write_chats


@pytest.fixture(scope="session")
def sft_config(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of 8 steps, as overrides."""
    folder = tmp_path_factory.mktemp("sft")
    return [
        f"model.path={make_tiny_model(folder / 'model', tie=True)}",
        f"data.train_files={write_chats(folder / 'train.jsonl', 31)}",
        f"data.val_files={write_chats(folder / 'val.jsonl', 9)}",
        "data.train_batch_size=8",
        *("optim.lr=1e-2", "optim.clip_grad=2.0", "trainer.device=cpu", "trainer.total_epochs=2"),
        *("trainer.micro_tokens=1024", "trainer.test_freq=3", "trainer.export=false"),
    ]
