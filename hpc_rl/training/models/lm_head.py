"""Loss and log-probabilities from hidden states, without holding the logits of all positions at once.

Positions are processed in chunks of `CHUNK_BYTES` of logits. The loss computes its gradients in the same pass, while a
chunk's logits are in memory (the idea of Liger Kernel, https://arxiv.org/abs/2410.10989). Log-probabilities compute
their logits again in the backward pass, because their upstream gradient is unknown in the forward pass.

torch.nn.functional.linear_cross_entropy (torch 2.13) is not used: with a vocabulary of 151,936 it took six times as
long as plain logits on a CPU, and earlier versions do not have it.

Shape suffixes: N positions, H hidden size, V vocabulary, C positions of one chunk, W a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CHUNK_BYTES = {"cpu": 64 << 20, "gpu": 1 << 30}
"""Bytes of float32 logits in one chunk: enough rows for fast matrix products, and small compared to a model."""
CPU_ROWS = 8192
"""Rows of a bfloat16 weight that a CPU converts to float32 at a time."""


def cross_entropy_sum(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return `scale` times the sum of -log p(target) over all positions, a float32 scalar.

    The gradients of hidden states and weight are computed in the same pass, but not below torch.no_grad.

    Args:
        hidden_NH: float32 or bfloat16; sums, exponentials and the weight's gradient are float32 in both cases.
        targets_N: int64.
        softcap: cap c of the logits x, which become c tanh(x / c); None for no cap.
    """
    result: torch.Tensor = _CrossEntropySum.apply(*differentiated(hidden_NH, weight_VH), targets_N, scale, softcap)
    return result


def differentiated(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors as they are, or detached below torch.no_grad, of which an autograd function would not know: its
    ctx.needs_input_grad says what the tensors require."""
    return tensors if torch.is_grad_enabled() else tuple(tensor.detach() for tensor in tensors)


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = True,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(target) and the entropy of p at each position, with p = softmax(hidden @ weight.T / temperature).

    Args:
        entropy: if false, the entropies are 0 and a pass over the probabilities is saved; for use without gradients.
        softcap: cap of the logits, before the temperature; see cross_entropy_sum.

    Returns:
        log-probabilities [N] and entropies [N] in nats, both float32 and differentiable.
    """
    logprobs_N, entropy_N = _TokenLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature, entropy, softcap)
    return logprobs_N, entropy_N


def chunks(positions: int, weight_VH: torch.Tensor, matrices: int = 1) -> Iterator[slice]:
    """Yield slices of equal size, each with at most CHUNK_BYTES of logits.

    Args:
        matrices: number of such matrices that a chunk needs at the same time.
    """
    chunk_bytes = CHUNK_BYTES["cpu" if weight_VH.device.type == "cpu" else "gpu"]
    limit = max(1, chunk_bytes // (4 * weight_VH.shape[0] * matrices))
    size = -(-positions // -(-positions // limit)) if positions else 1
    return (slice(start, min(start + size, positions)) for start in range(0, positions, size))


class _LogProbs:
    """The log-softmax of chunks of logits, float32, in a buffer that all chunks share."""

    def __init__(self, weight_VH: torch.Tensor, softcap: float | None, gradients: bool) -> None:
        self.weight_VH = weight_VH
        self.softcap = softcap
        self.keeps_slope = gradients and softcap is not None
        self.slope_CV: torch.Tensor | None = None
        """Derivative of the chunk's capped logits with respect to the uncapped ones, 1 - tanh(x / c)^2. All chunks
        share its buffer."""
        self.buffer: torch.Tensor | None = None

    def __call__(self, hidden_CH: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Return log-probabilities [C, V], which are valid until the next call."""
        rows, vocabulary = hidden_CH.shape[0], self.weight_VH.shape[0]
        if self.buffer is None:
            self.buffer = hidden_CH.new_empty(rows, vocabulary, dtype=torch.float32)
        logits = float32_logits(hidden_CH, self.weight_VH, self.buffer[:rows])
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_()
            if self.keeps_slope:
                if self.slope_CV is None:
                    self.slope_CV = torch.empty_like(self.buffer)
                torch.square(logits, out=self.slope_CV[:rows]).neg_().add_(1)
            logits.mul_(self.softcap)
        if temperature != 1.0:
            logits.div_(temperature)
        return torch.log_softmax(logits, dim=-1, out=logits)

    def without_cap(self, grad_CV: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the chunk's uncapped logits, from that of the capped ones."""
        return grad_CV if self.slope_CV is None else grad_CV.mul_(self.slope_CV[: len(grad_CV)])


def float32_logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, logits_CV: torch.Tensor) -> torch.Tensor:
    """Compute hidden @ weight.T into a float32 tensor, and return it."""
    if hidden_CH.dtype == torch.float32:
        torch.mm(hidden_CH, weight_VH.t(), out=logits_CV)
    elif _multiplies_into_float32(hidden_CH):
        # Rounding a logit of 25 to bfloat16 would change the log-probability by up to 0.06.
        torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32, out=logits_CV)
    elif hidden_CH.device.type == "cpu":
        # The product of two bfloat16 numbers is exact in float32. Only a part of the weight is copied at a time.
        wide_CH = hidden_CH.float()
        for weight_WH, logits_CW in zip(weight_VH.split(CPU_ROWS), logits_CV.split(CPU_ROWS, dim=1), strict=True):
            torch.mm(wide_CH, weight_WH.float().t(), out=logits_CW)
    else:
        logits_CV.copy_(hidden_CH @ weight_VH.t())
    return logits_CV


def _multiplies_into_float32(tensor: torch.Tensor) -> bool:
    """Return whether matrix products of this tensor can keep their float32 sums: CUDA's can."""
    return tensor.is_cuda and torch.version.hip is None


class HeadGradients:
    """The gradients of hidden states and weight, to which each chunk adds its part.

    Args:
        ctx: of an autograd function whose first two arguments are hidden states and weight.
        scale: factor of both gradients.
    """

    def __init__(self, ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, scale: float = 1.0) -> None:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        self.needed = needs_hidden or needs_weight
        self._inputs, self._scale = (hidden_NH, weight_VH), scale
        self._hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # The first chunk overwrites the weight's gradient. Without positions it is 0: FSDP expects one from each rank.
        new = torch.empty_like if len(hidden_NH) else torch.zeros_like
        self._weight_VH = new(weight_VH, dtype=torch.float32) if needs_weight else None

    def add(self, rows: slice, grad_CV: torch.Tensor) -> None:
        """Add the part of a chunk, from the gradient of its logits, in the type of the hidden states."""
        hidden_NH, weight_VH = self._inputs
        if self._hidden_NH is not None:
            torch.mm(grad_CV, weight_VH, out=self._hidden_NH[rows])
            if self._scale != 1:
                self._hidden_NH[rows].mul_(self._scale)
        if self._weight_VH is not None:
            hidden_CH = hidden_NH[rows] if self._scale == 1 else hidden_NH[rows] * self._scale
            _add_product(self._weight_VH, grad_CV, hidden_CH, first=rows.start == 0)

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return both gradients in the types of their tensors; None for one that is not needed."""
        grad_weight_VH = self._weight_VH
        return self._hidden_NH, None if grad_weight_VH is None else grad_weight_VH.to(self._inputs[1].dtype)

    def save(self, ctx: Any) -> None:
        """Keep both gradients for `saved_gradients` in the backward pass."""
        ctx.dtype = self._inputs[1].dtype
        ctx.save_for_backward(self._hidden_NH, self._weight_VH)


def _add_product(total_VH: torch.Tensor, left_CV: torch.Tensor, right_CH: torch.Tensor, first: bool) -> None:
    """Add left.T @ right to the total in float32; the first summand replaces the old total."""
    beta = 0 if first else 1
    if left_CV.dtype == total_VH.dtype:
        torch.addmm(total_VH, left_CV.t(), right_CH, beta=beta, out=total_VH)
    elif _multiplies_into_float32(left_CV):
        torch.addmm(total_VH, left_CV.t(), right_CH, out_dtype=torch.float32, beta=beta, out=total_VH)
    elif first:
        total_VH.copy_(left_CV.t() @ right_CH)
    else:
        total_VH.add_(left_CV.t() @ right_CH)


def saved_gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of hidden states and weight that the forward pass has computed, times the upstream one."""
    grad_hidden_NH, grad_weight_VH = ctx.saved_tensors
    # Reading the value would synchronise a GPU; on a CPU it saves a pass over the weight's gradient.
    if upstream.device.type != "cpu" or upstream.item() != 1.0:
        grad_hidden_NH = None if grad_hidden_NH is None else grad_hidden_NH * upstream.to(grad_hidden_NH.dtype)
        grad_weight_VH = None if grad_weight_VH is None else grad_weight_VH.mul_(upstream)
    return grad_hidden_NH, None if grad_weight_VH is None else grad_weight_VH.to(ctx.dtype)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        gradients = HeadGradients(ctx, hidden_NH, weight_VH, scale)
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        log_softmax = _LogProbs(weight_VH, softcap, gradients.needed)
        for rows in chunks(hidden_NH.shape[0], weight_VH):
            targets_C1 = targets_N[rows, None]
            logprobs_CV = log_softmax(hidden_NH[rows])
            total -= logprobs_CV.gather(1, targets_C1).sum()
            if not gradients.needed:
                continue
            # d(-log p[target]) / d logits = p - onehot(target)
            grad_CV = logprobs_CV.exp_()
            grad_CV.scatter_add_(1, targets_C1, grad_CV.new_full((1, 1), -1.0).expand_as(targets_C1))
            gradients.add(rows, log_softmax.without_cap(grad_CV).to(hidden_NH.dtype))
        gradients.save(ctx)
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        return *saved_gradients(ctx, grads[0]), None, None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        entropy: bool,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N = hidden_NH.new_empty(hidden_NH.shape[0], dtype=torch.float32)
        entropy_N = torch.zeros_like(logprobs_N)
        log_softmax = _LogProbs(weight_VH, softcap, gradients=False)
        for rows in chunks(hidden_NH.shape[0], weight_VH):
            logprobs_CV = log_softmax(hidden_NH[rows], temperature)
            logprobs_N[rows] = logprobs_CV.gather(1, targets_N[rows, None])[:, 0]
            if entropy:
                entropy_N[rows] = -(logprobs_CV.exp() * logprobs_CV).sum(dim=1)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, entropy_N = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N = grads
        gradients = HeadGradients(ctx, hidden_NH, weight_VH)
        log_softmax = _LogProbs(weight_VH, ctx.softcap, gradients=True)
        for rows in chunks(hidden_NH.shape[0], weight_VH):
            targets_C1 = targets_N[rows, None]
            logprobs_CV = log_softmax(hidden_NH[rows], ctx.temperature)
            # d log p[target] / d logits = onehot - p        d entropy / d logits = -p (log p + entropy)
            up_C1, up_entropy_C1 = grad_logprobs_N[rows, None], grad_entropy_N[rows, None]
            p_CV = logprobs_CV.exp()
            grad_CV = logprobs_CV.add_(entropy_N[rows, None]).mul_(up_entropy_C1).add_(up_C1).mul_(p_CV).neg_()
            grad_CV.scatter_add_(1, targets_C1, up_C1)
            grad_CV = log_softmax.without_cap(grad_CV.div_(ctx.temperature))
            gradients.add(rows, grad_CV.to(hidden_NH.dtype))
        return *gradients.result(), None, None, None, None
