"""The policy's adapters in a vLLM engine, without merged weights: vLLM's add_lora replaces them at each sync.

https://docs.vllm.ai/en/latest/features/lora/ describes it. vLLM reads adapters from a folder in the format of peft,
which is here a temporary one on the engine's node; all processes of an engine are on one node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpc_rl.errors import RunError
from hpc_rl.formats.peft_folder import CONFIG, PREFIX, WEIGHTS
from hpc_rl.rl.actors.process import own_folder
from hpc_rl.rl.weights.buckets import Bucket, unpack
from hpc_rl.training.models import safetensors_files

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

NAME, NUMBER = "policy", 1
"""How vLLM distinguishes adapters. An engine has only these."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM makes room (MaxLoRARanks in vllm/config/lora.py)."""


def engine_rank(rank: int) -> int:
    """Return the smallest of vLLM's ranks with room for adapters of this rank, at most `EngineSpec.max_lora_rank`."""
    return next(room for room in RANKS if room >= rank)


class VllmAdapters:
    """The adapters of one engine.

    Args:
        config: contents of adapter_config.json.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._received: dict[str, torch.Tensor] = {}
        self.current: LoRARequest | None = None
        """What a request names to be computed with the adapters; None before the first sync."""

    def start(self) -> None:
        """Start an update, which brings all adapters."""
        self._received = {}

    def take(self, bucket: Bucket) -> None:
        """Take some of the adapters, whose memory belongs to the sender until the call returns."""
        self._received |= {PREFIX + name: tensor.clone() for name, tensor in unpack(bucket)}

    def replace(self, engine: Any) -> None:
        """Replace the adapters in a vLLM engine by those of the update.

        Raises:
            RunError: vLLM does not take them.
        """
        from vllm.lora.request import LoRARequest

        tensors, self._received = self._received, {}
        with own_folder("adapters-") as folder:
            (Path(folder) / CONFIG).write_text(json.dumps(dict(self._config)))
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            types = {name: tensor.dtype for name, tensor in tensors.items()}
            safetensors_files.write(Path(folder) / WEIGHTS, shapes, types, tensors.__getitem__)
            try:
                engine.add_lora(LoRARequest(NAME, NUMBER, folder, load_inplace=True))
            except (ValueError, RuntimeError) as error:
                raise RunError(
                    f"rollout.merge_lora=false: vllm does not take the policy's adapters: {error}; use "
                    "rollout.merge_lora=true"
                ) from error
            # A request with load_inplace would read the folder again at each step.
            self.current = LoRARequest(NAME, NUMBER, folder)
