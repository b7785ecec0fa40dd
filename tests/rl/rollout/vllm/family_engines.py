"""Load a model of each of some families into vLLM on this CPU, replace its weights, and print its responses.

python -m tests.rl.rollout.vllm.family_engines DTYPE FOLDER...   the new weights are in sync.pt of each folder
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.rollout.engine import Placement, Sampling, complete
from hpc_rl.rl.rollout.vllm import engine as vllm_engine
from tests.rl.rollout.tiny_engine import prompts
from tests.rl.vllm_contract.families import ROOM

STEPS = 6


def main(dtype: str, folders: list[str]) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    vllm_engine.LOCAL_BUCKET_BYTES = 20_000  # so that the weights of a layer arrive in several calls
    lazy: Any = registry._LazyRegisteredModel  # which would start a process to look at each class
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
    for folder in folders:
        try:
            found = responses(dtype, folder)
        except Exception as error:  # noqa: BLE001 - the next family is tried too
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        print("FOUND", json.dumps({"folder": folder, **found}), flush=True)
        cleanup_dist_env_and_memory()


def responses(dtype: str, folder: str) -> dict[str, Any]:
    rollout = RolloutConfig.model_validate({"max_num_seqs": 8, "dtype": dtype})
    engine = vllm_engine.VllmEngine(ModelConfig(path=folder), rollout, (), ROOM, 0, Placement("cpu"))
    try:
        found = {"class": engine._llm.apply_model(lambda model: type(model).__name__)[0]}
        for number in range(3):
            if number:
                engine.load_weights(torch.load(Path(folder, "sync.pt")))
            completions = complete(engine, prompts(), range(7), Sampling(STEPS))
            found[f"sync {number}"] = [[one.token_ids.tolist(), one.logprobs.tolist()] for one in completions]
        return found
    finally:
        engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
