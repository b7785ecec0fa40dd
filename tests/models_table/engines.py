"""vLLM on CPUs for many small models: one process imports it, and forks another for each model.

python -m tests.models_table.engines    reads requests from its standard input
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.rl.rollout.engine import Placement, Sampling, complete
from tests.rl.vllm_contract.stand_ins import stand_in

ROOM = 64
"""Most tokens of prompt and response: not more than the original length of models with `longrope`."""
RESPONSE = 8
TIMEOUT_S = 300
RESULT, LOG = "vllm.json", "vllm.log"
ERRORS = (
    *(UserError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError),
    *(ImportError, OSError),
)
"""What a library raises for a model that it cannot compute. NotImplementedError is a RuntimeError."""


REASONS = {
    "selective_scan_fwd": "vLLM's CPU build has no kernel for layers of Mamba 1",
    'scoring_func == "softmax"': "vLLM's CPU build has no selection of experts by sigmoid without groups",
    "set_allocator": "vLLM computes its layers with a state by Triton, which its CPU build does not have",
    "is_act_and_mul=False": "vLLM's CPU build has no experts whose activation has no gate",
    "too many values to unpack": "vLLM has no code for the class that transformers writes (PhimoeForCausalLM)",
    "'cutlass'": "vLLM computes its layers with a state by kernels for GPUs only",
}
"""Pattern of an error -> what is wrong."""


class Engines:
    """The process that has imported vLLM."""

    def __init__(self) -> None:
        environ = os.environ | ENGINES["vllm"].process_environment("cpu") | {"VLLM_LOGGING_LEVEL": "WARNING"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.models_table.engines"],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def try_model(self, model: Path, sent: Path, folder: Path, dtype: str) -> dict[str, Any]:
        """Return what `responses` returns, or `error` and the first lines of one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(model), str(sent), str(folder), dtype]) + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the process that starts vLLM has died")
        result = folder / RESULT
        if not result.exists():
            return {"error": f"the process died, or took more than {TIMEOUT_S} s", "log": (folder / LOG).read_text()}
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)


def engine_reason(found: Mapping[str, Any]) -> str:
    """Return the reason in the error of an engine."""
    text = str(found["error"]).splitlines()[0]
    return next((reason for pattern, reason in REASONS.items() if re.search(pattern, text)), text)


def prompts() -> list[Any]:
    """Return prompts of different lengths."""
    generator = np.random.default_rng(0)
    return [generator.integers(3, 300, size).astype(np.int32) for size in (5, 23, ROOM - RESPONSE - 1)]


def responses(model: str, sent: str, dtype: str) -> dict[str, Any]:
    """Return greedy responses of a model, and those after each of two updates of its weights, with log-probabilities.

    transformers' models cannot be loaded afterwards: vLLM may have changed their classes.
    """
    from hpc_rl.rl.rollout.vllm import engine as vllm_engine

    vllm_engine.LOCAL_BUCKET_BYTES = 20_000  # so that the weights of a layer arrive in several calls
    rollout = RolloutConfig.model_validate({"max_num_seqs": 64, "dtype": dtype})
    engine = vllm_engine.VllmEngine(ModelConfig(path=model), rollout, (), ROOM, 0, Placement("cpu"))
    found = []
    for number in range(3):
        if number:
            engine.load_weights(torch.load(sent))
        made = complete(engine, prompts(), range(3), Sampling(RESPONSE, temperature=0.0))
        found.append([[one.token_ids.tolist(), one.logprobs.tolist()] for one in made])
    return {"class": engine._llm.apply_model(lambda model: type(model).__name__)[0], "responses": found}


def _try(model: str, sent: str, folder: str, dtype: str) -> None:
    """Write the result of one model. Called in a process of its own."""
    log = os.open(Path(folder, LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        found = responses(model, sent, dtype)
    except ERRORS as error:
        traceback.print_exc()
        what = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        found = {"error": f"{type(error).__name__}: {what}"}
    Path(folder, RESULT).write_text(json.dumps(found))


def main() -> None:
    """Answer each request with a line when its process has ended."""
    stand_in()
    import vllm.v1.engine.llm_engine  # noqa: F401  # what takes the time

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            signal.alarm(TIMEOUT_S)
            _try(*json.loads(line))
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print("done", flush=True)


if __name__ == "__main__":
    main()
