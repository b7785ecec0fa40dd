"""Traces of single steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from hpc_rl.config.compose import compose
from hpc_rl.config.training.sft import SftConfig
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.training.profiling import trace_path, traced


def steps(override: str) -> list[int]:
    config = compose("sft", ["model.path=/model", "data.train_files=train.jsonl", override])
    assert isinstance(config, SftConfig)
    return config.trainer.profile_steps


@pytest.mark.parametrize(
    "override, found",
    [
        ("trainer.profile_steps=[3,7]", [3, 7]),
        ("trainer.profile_steps=3", [3]),
        ("trainer.profile_steps=10-12", [10, 11, 12]),
        ("trainer.profile_steps=4-4", [4]),
        ("trainer.seed=1", []),
    ],
)
def test_steps_are_a_list_or_a_range(override: str, found: list[int]) -> None:
    assert steps(override) == found


@pytest.mark.parametrize("value", ["[0]", "12-10", "1-11", "[1,2,3,4,5,6,7,8,9,10,11]", "3-", "soon", "[a]"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"trainer\.profile_steps"):
        steps(f"trainer.profile_steps={value}")


def test_a_trace_has_the_operations_inside(tmp_path: Path) -> None:
    path = trace_path(RunDir(tmp_path), 12, 3, "train")
    assert path == tmp_path / "profiles" / "step-00000012" / "train-rank3.json.gz"
    with traced(path):
        torch.ones(3, 3) @ torch.ones(3, 3)
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


def test_without_a_path_nothing_is_recorded(tmp_path: Path) -> None:
    with traced(None):
        torch.ones(1)
    assert trace_path(RunDir(tmp_path), 1, 0).name == "rank0.json.gz"
    assert not (tmp_path / "profiles").exists()
