"""The check of the attention kernels: the product's packed attention against a plain softmax in float64."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from hpc_rl.probes.acceptance.bench import Bench, Failed, worst
from hpc_rl.training.models.attention import packed_attention
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.parallel.distributed import World

LENGTHS = (1, 17, 64, 130, 5)
HEADS, KEY_HEADS, HEAD_SIZE = 8, 2, 64
WINDOWS = (None, 16)
SCALES = (None, 0.25)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest error relative to the largest value, of the output and of the gradients."""


def kernels(bench: Bench, world: World, _variant: str) -> str:
    """Compare outputs and gradients for samples of several lengths, with and without sliding windows and scales."""
    packed_attention.use_flash_attention_3(world)
    dtype = torch.bfloat16 if bench.layout.uses_gpus else torch.float32
    largest = 0.0
    for window, scale in itertools.product(WINDOWS, SCALES):
        inputs = _inputs(world.device, dtype)
        found = _with_gradients(_product(inputs, window, scale), inputs)
        exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
        expected = _with_gradients(_plain(exact, window, scale), exact)
        error = worst(_error(a, b) for a, b in zip(found, expected, strict=True))
        if error > TOLERANCE[dtype]:
            raise Failed(
                f"relative error {error:.1e} with sliding window {window} and scale {scale} in {dtype}; at most "
                f"{TOLERANCE[dtype]:.0e} is expected"
            )
        largest = max(largest, error)
    return f"relative error at most {largest:.1e} in {str(dtype).removeprefix('torch.')}, forward and backward"


def _inputs(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value, [1, heads, T, head size]."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def _product(inputs: list[torch.Tensor], window: int | None, scale: float | None) -> torch.Tensor:
    query, key, value = inputs
    samples = [np.zeros(length, np.int64) for length in LENGTHS]
    batch = pack_samples(samples, [np.zeros(length, bool) for length in LENGTHS]).to(query.device)
    out, _ = packed_attention.packed_attention(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        scaling=scale,
        sliding_window=window,
        **packed_attention.attention_kwargs(batch),
    )
    return out


def _plain(inputs: list[torch.Tensor], window: int | None, scale: float | None) -> torch.Tensor:
    """Compute softmax(q k / sqrt(head size)) v in each sample, [1, T, heads, head size]."""
    query, key, value = inputs
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
    outputs = []
    for q, k, v in zip(*(x.split(LENGTHS, dim=2) for x in (query, key, value)), strict=True):
        scores = q @ k.transpose(-1, -2) * (scale if scale is not None else HEAD_SIZE**-0.5)
        position = torch.arange(q.shape[2])
        back = position[:, None] - position[None, :]
        hidden = (back < 0) if window is None else (back < 0) | (back >= window)
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def _with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float32).view(out.shape)
    (out * weights.to(out.device, out.dtype)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double().cpu() - expected).abs().max() / expected.abs().max())
