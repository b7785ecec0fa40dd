"""What trainer.micro_tokens=auto is in a job, from the memory of its devices and from an earlier attempt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hpc_rl.errors import UserError
from hpc_rl.training import rows
from hpc_rl.training.rows import Decision, correct, decide
from tests.plan.configs import QWEN_7B, config

AUTO = "trainer.micro_tokens=auto"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of 7B without weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "7b").mkdir()
    (tmp_path / "7b" / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path


def job(*words: str, kind: str = "sft") -> Any:
    return config(kind, "model.path=7b", *words)


def test_a_number_and_cpus_need_no_plan() -> None:
    assert decide(job("trainer.micro_tokens=5000"), 80e9, 8) == Decision(5000)
    assert decide(job(AUTO), None, 8) == Decision(4096)
    assert decide(job(AUTO, "data.max_length=5000"), None, 8) == Decision(8192)
    assert decide(job(AUTO, kind="generate"), 80e9, 8) == Decision(4096)  # no reward model


@pytest.mark.parametrize(
    ("stated", "device", "gpu"),
    [
        ((), 85e9, 85e9),
        (("slurm.node.gpu_gb=80",), 85e9, 80e9),  # as at submission
        (("slurm.gpu_type=h100",), 85e9, 80e9),
        (("slurm.node.gpu_gb=80",), 40e9, 40e9),  # other GPUs than the profile describes
    ],
)
def test_the_memory_of_a_gpu(stated: tuple[str, ...], device: float, gpu: float) -> None:
    found = decide(job(AUTO, *stated), device, 8)
    tokens = 2048 if gpu == 40e9 else 4096
    assert found.recorded == {
        "tokens": tokens, "is_corrected": 0, "planned": tokens, "ranks": 8, "gpu_bytes": round(gpu)
    }  # fmt: skip
    assert found.tokens == tokens and not found.is_corrected
    assert found.line.startswith(f"trainer.micro_tokens=auto: {tokens:,} tokens in each pass of a rank. The phase")
    assert found.used_in(job(AUTO)).trainer.row_tokens == tokens


def test_a_model_that_is_not_counted(folder: Path) -> None:
    (folder / "7b" / "config.json").write_text(json.dumps({**QWEN_7B, "model_type": "jetmoe"}))
    found = decide(job(AUTO), 80e9, 8)
    assert (found.tokens, found.recorded, found.is_corrected) == (4096, None, True)
    assert found.line == (
        "trainer.micro_tokens=auto: 4,096 tokens in each pass of a rank; model.path 7b: models of type jetmoe have "
        "experts in their attention, whose memory is not planned"
    )


def test_a_resumed_job() -> None:
    recorded = {"tokens": 16384, "is_corrected": 1, "planned": 4096, "ranks": 8, "gpu_bytes": 80 * 10**9}
    same = decide(job(AUTO), 80e9, 8, recorded)
    assert (same.tokens, same.recorded, same.is_corrected) == (16384, recorded, True)
    first = decide(job(AUTO), 80e9, 8, {**recorded, "tokens": 4096, "is_corrected": 0})
    assert (first.tokens, first.is_corrected) == (4096, False)  # it stopped before it was corrected
    for other, device, ranks in ((job(AUTO), 80e9, 16), (job(AUTO), 79e9, 8)):
        assert decide(other, device, ranks, recorded).tokens == 4096
    shortened = {**recorded, "tokens": 2048}  # which now do not hold the longest sample
    assert decide(job(AUTO, "data.max_length=4000"), 80e9, 8, shortened).tokens == 4096
    longer = decide(job(AUTO, "data.max_length=5000"), 80e9, 8, recorded)
    assert (longer.tokens, longer.is_corrected) == (5000, False)


def test_a_correction() -> None:
    before = decide(job(AUTO), 80e9, 8)
    more = correct(job(AUTO).updated("trainer.micro_tokens", 4096), before, 4096, {"": 20e9})
    assert more == Decision(
        8192,
        "trainer.micro_tokens=auto: 8,192 tokens in each pass of a rank from now on, instead of 4,096, because 20.0 of "
        "80.0 GB were used with 4,096 tokens",
        {"tokens": 8192, "is_corrected": 1, "planned": 4096, "ranks": 8, "gpu_bytes": 80 * 10**9},
    )
    same = correct(job(AUTO), before, 4096, {"": 47e9})
    with mock.patch.object(rows, "shapes_of", side_effect=UserError("the hub does not answer")):
        assert correct(job(AUTO), before, 4096, {"": 20e9}) == replace(before, line="", is_corrected=True)
    assert same == Decision(4096, "", {**(before.recorded or {}), "is_corrected": 1})


def test_nothing_corrects_the_rows_of_a_reward_model() -> None:
    found = decide(job(AUTO, "reward.model=7b", kind="generate"), 80e9, 8)
    assert (found.tokens, found.is_corrected) == (32768, True)
