"""Log-probabilities of held responses under a causal model, the policy or the reference."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.rl.workers.held import Held
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.models.causal_lm import CausalLM
from hpc_rl.training.models.lm_head import token_logprobs


def token_logprobs_of(
    model: CausalLM, batch: PackedBatch, temperature: float, entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [N] and entropies [N] of a micro-batch's response tokens, both differentiable."""
    own = model.sequence.own(batch)
    options = (temperature, entropy, model.softcap)
    own_N = model(own, lambda hidden_NH, weight_VH: token_logprobs(hidden_NH, weight_VH, own.targets_N, *options))
    logprobs_N, entropy_N = (model.sequence.whole(found_N, batch) for found_N in own_N)
    return logprobs_N, entropy_N


@torch.no_grad()
def held_logprobs(model: CausalLM, held: Held, temperature: float) -> NDArray[np.float32]:
    """Return the log-probabilities of all held response tokens, [N]. Every rank of the model's world calls this."""
    parts = [token_logprobs_of(model, micro.batch, temperature, entropy=False)[0] for micro in held.micro_batches()]
    return torch.cat(parts).cpu().numpy()
