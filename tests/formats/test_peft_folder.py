"""What may differ between the adapters of a checkpoint and those of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.formats.peft_folder import changed_setting, new_config


def adapters(base: str, rank: int = 2) -> dict[str, object]:
    return new_config(base, rank, 6.0, 0.0, ["q_proj"], None)


def test_a_model_that_was_moved_is_not_another_one(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "other").mkdir()
    stored = adapters(str(tmp_path / "old"))
    assert "model.path" in str(changed_setting(stored, adapters(str(tmp_path / "other"))))
    (tmp_path / "old").rename(tmp_path / "new")
    assert changed_setting(stored, adapters(str(tmp_path / "new"))) is None
    assert "model.lora.rank=2" in str(changed_setting(stored, adapters(str(tmp_path / "new"), rank=3)))


def test_a_model_of_the_hub_may_be_a_folder_now(tmp_path: Path) -> None:
    assert changed_setting(adapters("owner/model"), adapters(str(tmp_path))) is None
    assert changed_setting(adapters("owner/model"), adapters("owner/model")) is None
    assert "and the run has owner/other" in str(changed_setting(adapters("owner/model"), adapters("owner/other")))


@pytest.mark.parametrize(("continued", "who"), [(True, "the adapters of model.lora.path have"), (False, "the run has")])
def test_the_message_names_what_set_the_rank(continued: bool, who: str) -> None:
    found = changed_setting(adapters("owner/model"), adapters("owner/model", rank=3), continued)
    assert found == f"its adapters have model.lora.rank=2, and {who} 3"
