"""Types of the results that suffer from bfloat16: logits, values and scores."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.workers.critic import Critic
from hpc_rl.rl.workers.logprobs import load_reference
from hpc_rl.rl.workers.packed_shard import pack_shard
from hpc_rl.training.models.lm_head import CHUNK_BYTES, cross_entropy_sum, token_logprobs
from tests.rl.ppo_config import ppo_config
from tests.simulated_gpu.gpu import simulated_gpus
from tests.simulated_gpu.models import loading_without_files
from tests.simulated_gpu.process import simulate
from tests.simulated_gpu.scenarios import Job, shard_of

VOCABULARY, HIDDEN, POSITIONS = 152064, 512, 4000


class Products(TorchDispatchMode):
    """Records type and columns of the results of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.dtype, int]] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and tensor.ndim == 2:
                self.largest = max(self.largest, tensor.numel() * tensor.itemsize)
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.seen.add((out.dtype, out.shape[-1]))
        return out


def _head_products() -> dict[str, tuple[set[tuple[torch.dtype, int]], int]]:
    found = {}
    with simulated_gpus(ranks=1):
        hidden = torch.zeros(POSITIONS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(POSITIONS, device="cuda", dtype=torch.int64)
        for name, loss in {
            "cross entropy": lambda: cross_entropy_sum(hidden, weight, targets),
            "log-probabilities": lambda: sum(part.sum() for part in token_logprobs(hidden, weight, targets, 0.7)),
        }.items():
            with Products() as products:
                loss().backward()
            found[name] = (products.seen, products.largest)
    return found


def _head_types() -> dict[str, set[torch.dtype]]:
    """Return the types of weight, input and output of a critic's head, and those of a reference's held weights."""
    config: PpoConfig = ppo_config("trainer.device=cuda", "data.max_response_length=64")
    job = Job(micro_tokens=256, length=128)
    with simulated_gpus(ranks=8), loading_without_files("tiny"):
        critic = Critic(config, job.world())
        seen: set[torch.dtype] = set()

        def record(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen.update({module.weight.dtype, inputs[0].dtype, output.dtype})

        critic.model.hf.score.register_forward_hook(record)
        critic.values(pack_shard(shard_of(job), job.world().device))
        reference = load_reference(config, job.world())
        held = {parameter.dtype for parameter in reference._model.parameters()}
        return {"head": seen, "reference": held}


def test_logits_and_the_weights_gradient_keep_their_float32_sums() -> None:
    for name, (products, largest) in simulate(_head_products).items():
        columns = {dtype for dtype, width in products if width == VOCABULARY}
        assert columns == {torch.float32}, name
        # hidden and its gradient have HIDDEN columns as well, so both types occur for the weight's gradient
        assert (torch.float32, HIDDEN) in products, name
        assert CHUNK_BYTES["gpu"] / 2 < largest <= CHUNK_BYTES["gpu"], name


def test_values_are_float32_and_the_reference_is_held_in_bfloat16() -> None:
    found = simulate(_head_types)
    assert found == {"head": {torch.float32}, "reference": {torch.bfloat16}}
