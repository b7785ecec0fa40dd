"""`hpc-rl data check` with options of the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_rl.cli.data import check
from hpc_rl.errors import UserError


@pytest.mark.parametrize(
    "reward",
    [["reward.functions=[gsm8k,format]", "reward.weights=[1,0.2]"], ["reward.model=m"], ["reward.url=http://h"]],
)
def test_any_reward_of_the_job_is_left_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reward: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}) + "\n")
    check("prompts.jsonl", ["data.prompt_key=prompt", *reward], kind="ppo")
    assert "name a model" in capsys.readouterr().out


def test_a_model_that_cannot_be_trained_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    with pytest.raises(
        UserError, match=r"model\.path .* cannot be trained in packed rows: models of type rwkv have layers with"
    ):
        check(str(tmp_path / "train.jsonl"), [], model=str(tmp_path))
