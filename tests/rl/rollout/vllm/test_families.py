"""vLLM on the CPU computes with the weights that it receives, for each family that it can run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.rl.rollout.engine import Completion
from tests.marks import long
from tests.rl.rollout.tiny_engine import forward_logprobs, prompts
from tests.rl.rollout.vllm.test_engine import needs_vllm
from tests.rl.vllm_contract.families import changed, make_family, sent

SHORT = ("gpt_oss", "granitemoehybrid")
EXACT = (
    *(*SHORT, "cohere2", "falcon_h1", "gemma3", "gemma3_text"),
    *("granite", "olmo2", "olmo3", "phi3", "smollm3"),
)
ROUNDED = ("qwen3_next",)
"""Their kernels for CPUs compute in bfloat16 only."""


def in_vllm(dtype: str, folders: list[Path]) -> dict[str, dict[str, Any]]:
    """Return what family_engines prints, by model_type."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.rl.rollout.vllm.family_engines", dtype, *map(str, folders)]
    log = folders[0].parent / "log"
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=file, timeout=500, check=False, env={**os.environ, **variables})
    lines = [line.removeprefix("FOUND ") for line in log.read_text().splitlines() if line.startswith("FOUND ")]
    assert len(lines) == len(folders), log.read_text()[-2000:]
    return {Path(found["folder"]).name: found for found in map(json.loads, lines)}


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kinds"), [("float32", SHORT), long("float32", EXACT[len(SHORT) :]), long("bfloat16", ROUNDED)]
)
def test_after_a_sync_log_probabilities_are_the_trainers(tmp_path: Path, dtype: str, kinds: tuple[str, ...]) -> None:
    folders = [make_family(tmp_path / kind, kind) for kind in kinds]
    policies = [changed(folder, dtype) for folder in folders]
    for folder, policy in zip(folders, policies, strict=True):
        torch.save(sent(policy, dtype), folder / "sync.pt")
    found = in_vllm(dtype, folders)
    for kind, policy in zip(kinds, policies, strict=True):
        assert "error" not in found[kind], (kind, found[kind])
        before, *after = (difference(policy, found[kind][f"sync {number}"]) for number in range(3))
        assert before > 0.02, (kind, before)  # the logits of Cohere 2 are small
        assert max(after) < (1e-4 if dtype == "float32" else before / 3), (kind, before, after)


def difference(policy: Any, responses: list[Any]) -> float:
    """Return the mean difference between an engine's log-probabilities and a trainer's."""
    made = [Completion(np.array(ids, np.int32), np.array(given, np.float32), False) for ids, given in responses]
    expected = forward_logprobs(policy, prompts(), made)
    return float(np.abs(np.concatenate([one.logprobs for one in made]) - expected).mean())
