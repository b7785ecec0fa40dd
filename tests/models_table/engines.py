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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.rl.rollout.engine import Completion, Placement, Sampling, complete
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.training.models.stored_form import StoredForm

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
    "failed to be inspected": "the engine did not start: model architectures failed to be inspected",
    "validation error for VllmConfig": "the engine did not start: validation error for VllmConfig",
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

    def try_model(self, exported: Path, other: Path, folder: Path) -> dict[str, Any]:
        """Return what `compared` returns, or `error` and the first lines of one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(exported), str(other), str(folder)]) + "\n")
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


def compared(exported: Path, other: Path) -> dict[str, float]:
    """Return the largest differences between log-probabilities of vLLM and of transformers: with the exported model,
    and after it has received the weights of another one. `change` is that between the two models.
    """
    from hpc_rl.rl.rollout.vllm.engine import VllmEngine
    from hpc_rl.training.models.causal_lm import load_model

    rollout = RolloutConfig(max_num_seqs=4)
    engine = VllmEngine(ModelConfig(path=str(exported)), rollout, (), ROOM, 0, Placement("cpu"))
    first = complete(engine, prompts(), range(3), Sampling(RESPONSE, temperature=0.0))
    hf = load_model(ModelConfig(path=str(other))).hf
    engine.load_weights(WeightSource(hf, torch.float32, stored=StoredForm(hf)))
    second = complete(engine, prompts(), range(3), Sampling(RESPONSE, temperature=0.0))
    return {
        "exported": difference(exported, first),
        "change": difference(other, first),
        "sent": difference(other, second),
    }


@torch.no_grad()
def difference(path: Path, completions: Sequence[Completion]) -> float:
    """Return the largest difference of the log-probabilities of these tokens from those of transformers."""
    from tests.models_table.checks import transformers_own

    model, found = transformers_own(path), []
    for prompt, completion in zip(prompts(), completions, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(dim=1)
        expected = logits.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        found.append(np.abs(completion.logprobs - expected).max())
    return float(max(found))


def _try(exported: str, other: str, folder: str) -> None:
    """Write the result of one model. Called in a process of its own."""
    log = os.open(Path(folder, LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        found: dict[str, Any] = dict(compared(Path(exported), Path(other)))
    except ERRORS as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(folder, RESULT).write_text(json.dumps(found))


def main() -> None:
    """Answer each request with a line when its process has ended."""
    import vllm.v1.engine.llm_engine  # noqa: F401  # what takes the time
    from vllm.model_executor.models import registry

    # vLLM asks another process about the class of a model, which would import vllm once more.
    registry._run_in_subprocess = lambda ask: ask()
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
