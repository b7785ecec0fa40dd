"""Peak memory of the loss of distillation: `python -m benchmarks.divergence_memory [--device cuda]`.

4,096 tokens, vocabulary 151,936, hidden size 896 (Qwen2.5-0.5B's) for student and teacher. The figure is the memory
beyond hidden states and weights (see memory.py), with the gradients of the student's. The plain version computes the
forward divergence, with all logits of both models at once, by torch's own function; of the three divergences it needs
the least memory that way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import kl_div

from benchmarks.memory import HIDDEN, VOCABULARY, compare, peak
from hpc_rl.training.models.distill_head import Terms, distillation_sum, live

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def log_softmax_of(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(hidden_NH @ weight_VH.t(), dim=-1)


def plain(hidden: torch.Tensor, weight: torch.Tensor, theirs: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        teacher_NV = log_softmax_of(theirs, head)
    return kl_div(log_softmax_of(hidden, weight), teacher_NV, log_target=True, reduction="sum")


def chunked(divergence: str, top_k: int | None = None) -> Loss:
    """Return the loss in chunks."""

    def loss(hidden: torch.Tensor, weight: torch.Tensor, theirs: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        targets_N = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        return distillation_sum(hidden, weight, targets_N, live(theirs, head, 1.0, top_k), Terms(divergence))[0]

    return loss


VARIANTS: dict[str, Loss] = {
    "forward, plain logits": plain,
    "forward, hpc-rl": chunked("forward"),
    "reverse, hpc-rl": chunked("reverse"),
    "js, hpc-rl": chunked("js"),
    "forward, top 64, hpc-rl": chunked("forward", top_k=64),
}


def measure(loss: Loss, tokens: int, device: torch.device) -> dict[str, float]:
    """Return the peak memory in GiB beyond the inputs, and the wall time."""
    torch.manual_seed(0)
    hidden, theirs = (torch.randn(tokens, HIDDEN, device=device) for _ in range(2))
    weight, head = (torch.randn(VOCABULARY, HIDDEN, device=device) / HIDDEN**0.5 for _ in range(2))
    hidden.requires_grad_()
    weight.requires_grad_()
    loss(hidden[:2], weight[:128], theirs[:2], head[:128]).backward()  # libraries are loaded at first use
    hidden.grad = weight.grad = None
    found = peak(lambda: loss(hidden, weight, theirs, head), device)
    assert hidden.grad is not None and weight.grad is not None
    return found


if __name__ == "__main__":
    compare("divergence_memory", __doc__, VARIANTS, measure, lambda _: "forward, plain logits", "of forward, plain")
