"""vLLM and training choose the same factors of `longrope`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.training.models.causal_lm import load_model
from tests.rl.rollout.tiny_engine import forward_logprobs, prompts, sharp_model
from tests.rl.rollout.vllm.test_engine import needs_vllm

ORIGINAL, ROOM, STEPS = 16, 42, 6
VLLM = """
import json, sys
from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.rollout.engine import Placement, Sampling, complete
from hpc_rl.rl.rollout.vllm.engine import VllmEngine
from tests.rl.rollout.tiny_engine import prompts
folder, room, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
engine = VllmEngine(ModelConfig(path=folder), RolloutConfig(max_num_seqs=8), (), room, 0, Placement("cpu"))
found = complete(engine, prompts(), range(7), Sampling(steps))
print("FOUND", json.dumps([[one.token_ids.tolist(), one.logprobs.tolist()] for one in found]), flush=True)
"""


def in_vllm(folder: Path) -> list[Completion]:
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-c", VLLM, str(folder), str(ROOM), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environ)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")] or [done.stderr[-1000:]]
    found: list[Any] = json.loads(line.removeprefix("FOUND "))
    return [Completion(np.array(ids, np.int32), np.array(given, np.float32), False) for ids, given in found]


@pytest.mark.long
@needs_vllm
def test_vllm_and_training_agree(tmp_path: Path) -> None:
    """Samples shorter than the original length have the long factors too; the factors of their length are others."""
    rotary = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL}
    rotary |= {"short_factor": [1.0] * 16, "long_factor": [2.0 + number for number in range(16)]}
    settings = {"kind": "phi3", "hidden": 64, "num_attention_heads": 2, "bos_token_id": 1, "rope_parameters": rotary}
    settings |= {"max_position_embeddings": 64, "original_max_position_embeddings": ORIGINAL}
    model = sharp_model(tmp_path, longest=ROOM, **settings)
    model.hf.save_pretrained(tmp_path)
    completions = in_vllm(tmp_path)
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    np.testing.assert_allclose(logprobs, forward_logprobs(model, prompts(), completions), atol=1e-4)
    by_length = load_model(ModelConfig(path=str(tmp_path)))
    assert np.abs(logprobs - forward_logprobs(by_length, prompts(), completions)).max() > 0.1
