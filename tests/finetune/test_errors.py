"""What a person sees when something is wrong: one line, and the right exit code."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from hpc_rl.config.compose import compose, dump
from hpc_rl.errors import UserError
from hpc_rl.finetune import trainer
from hpc_rl.finetune.sft import Sft
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.page import report
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training import guards
from tests.finetune.jobs import run_here, run_job, spawn


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.path=/nowhere/at-all"], "model.path: no tokenizer could be loaded from '/nowhere/at-all'"),
        (["trainer.device=cuda"], "needs GPU 0"),
        (["optim.lr=1e20", "optim.clip_grad=0"], "nan in step 2 on rank 0"),
        (["data.train_files=[/nowhere.jsonl]"], "/nowhere.jsonl"),
    ],
    ids=["no model", "no gpu", "nan", "no data"],
)
def test_bad_input_is_one_line(sft_config: list[str], tmp_path: Path, overrides: list[str], line: str) -> None:
    if "trainer.device=cuda" in overrides:
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        from hpc_rl.training.parallel import distributed

        with pytest.raises(UserError, match=line):
            distributed.start("cuda", 10)
        return
    with pytest.raises(UserError) as error:
        run_here(sft_config, tmp_path, *overrides)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_two_ranks_report_it_once(sft_config: list[str], tmp_path: Path) -> None:
    results = run_job(sft_config, tmp_path, "model.path=/nowhere", ranks=2)
    assert [code for code, _, _ in results] == [2, 2]
    assert results[0][2].splitlines()[-1].startswith("model.path: no tokenizer")
    assert results[1][2] == ""


def test_unknown_key(sft_config: list[str], tmp_path: Path) -> None:
    ((code, _, errors),) = run_job(sft_config, tmp_path, "trainer.micro_token=5")
    assert (code, errors) == (2, "trainer.micro_token: unknown key; did you mean trainer.micro_tokens?\n")


def test_out_of_memory_names_the_settings(
    sft_config: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*_: object) -> torch.Tensor:
        return torch.empty(1 << 50, dtype=torch.uint8)

    monkeypatch.setattr(Sft, "loss", greedy)
    with pytest.raises(
        UserError, match=r"out of memory in step 1: lower trainer.micro_tokens, or set model.enable_gra"
    ):
        run_here(sft_config, tmp_path)


def test_the_memory_guard_passes_other_errors() -> None:
    with pytest.raises(RuntimeError, match="something else"), guards.explain_out_of_memory("step 1"):
        raise RuntimeError("something else")


def test_a_complete_configuration_runs_unchanged(sft_config: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(compose("sft", [*sft_config, "trainer.total_training_steps=1"])))
    alone = ["-m", "hpc_rl.finetune.train", "--config", str(tmp_path / "config.yaml"), "--run-dir", str(tmp_path)]
    ((code, out, errors),) = spawn(alone, ranks=1)
    assert code == 0, errors
    assert "step 1/1" in out
    ((code, _, errors),) = spawn([*alone, "trainer.seed=2"], ranks=1)
    assert code == 2 and "is a complete configuration, so trainer.seed=2" in errors


def test_a_failure_is_reported_before_the_tracker_ends(
    sft_config: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wandb may take minutes to end."""

    def fails(_state: object) -> NoReturn:
        raise ZeroDivisionError

    events: list[str] = []
    config: Any = compose("sft", sft_config)
    state = SimpleNamespace(saver=nullcontext(), tracker=Tracker(config, RunDir(tmp_path), None, is_main=True))
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(trainer, "load", lambda *_: state)
    monkeypatch.setattr(trainer, "loop", fails)
    monkeypatch.setattr(report, "report_end", lambda *_: events.append("report"))
    monkeypatch.setattr(Tracker, "finish", lambda _self, code: events.append(f"finish {code}"))
    with pytest.raises(ZeroDivisionError):
        run_here(sft_config, tmp_path)
    assert events == ["report", "finish 1"]
