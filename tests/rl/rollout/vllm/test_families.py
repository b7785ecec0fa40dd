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

EXACT = {"lfm2": "Lfm2ForCausalLM"}
ROUNDED = {"qwen3_5_text": "Qwen3_5ForCausalLM"}


def in_vllm(dtype: str, folders: list[Path]) -> dict[str, dict[str, Any]]:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.rl.rollout.vllm.family_engines", dtype, *map(str, folders)]
    with open(folders[0].parent / "log", "w+") as log:
        subprocess.run(command, stdout=log, stderr=log, timeout=1700, check=False, env={**os.environ, **variables})
        log.seek(0)
        lines = [json.loads(line.removeprefix("FOUND ")) for line in log if line.startswith("FOUND ")]
    return {Path(line["folder"]).name: line for line in lines}
