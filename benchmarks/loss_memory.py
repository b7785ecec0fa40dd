"""Peak memory of the LM head's loss and its backward pass: `python -m benchmarks.loss_memory [--device cuda]`.

4,096 tokens, vocabulary 151,936, hidden size 896 (Qwen2.5-0.5B's). The figure is the memory beyond hidden states and
weight (see memory.py). It includes their gradients, which both ways have to hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, log_softmax

from benchmarks.memory import HIDDEN, VOCABULARY, compare, peak
from hpc_rl.training.models.lm_head import cross_entropy_sum, token_logprobs

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain_loss(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return cross_entropy(hidden_NH @ weight_VH.t(), targets_N, reduction="sum")


def plain_logprobs(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return log_softmax(hidden_NH @ weight_VH.t(), dim=-1).gather(1, targets_N[:, None]).sum()


def chunked_logprobs(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden_NH, weight_VH, targets_N)[0].sum()


VARIANTS: dict[str, Loss] = {
    "loss, plain logits": plain_loss,
    "loss, hpc-rl": cross_entropy_sum,
    "log-probabilities, plain logits": plain_logprobs,
    "log-probabilities, hpc-rl": chunked_logprobs,
}


def measure(loss: Loss, tokens: int, device: torch.device) -> dict[str, float]:
    """Return the peak memory in GiB beyond the inputs, and the wall time."""
    torch.manual_seed(0)
    hidden_NH = torch.randn(tokens, HIDDEN, device=device).requires_grad_()
    weight_VH = (torch.randn(VOCABULARY, HIDDEN, device=device) / HIDDEN**0.5).requires_grad_()
    targets_N = torch.randint(VOCABULARY, (tokens,), device=device)
    loss(hidden_NH[:2], weight_VH[:64], targets_N[:2] % 64).backward()  # libraries are loaded at first use
    hidden_NH.grad = weight_VH.grad = None
    found = peak(lambda: loss(hidden_NH, weight_VH, targets_N), device)
    assert hidden_NH.grad is not None and weight_VH.grad is not None
    return found


def plain_of(variant: str) -> str:
    return f"{variant.partition(',')[0]}, plain logits"


if __name__ == "__main__":
    compare("loss_memory", __doc__, VARIANTS, measure, plain_of, "of plain")
