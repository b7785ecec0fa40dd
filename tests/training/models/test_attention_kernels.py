"""The operators of attention, against torch's attention of single samples and against differences of their results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hpc_rl.training.models.attention import cpu_attention, exact_attention, packed_attention
from hpc_rl.training.models.attention.exact_attention import SCORE_BYTES, SoftmaxOptions
from hpc_rl.training.models.attention.packed_attention import SampleBounds

LENGTHS = (3, 1, 7, 4)
BORDERS = torch.tensor([0, *itertools.accumulate(LENGTHS)])


def inputs(heads: int = 4, key_heads: int = 2, sizes: tuple[int, int] = (6, 6), dtype: Any = torch.float64) -> Any:
    """Query, key and value as models have them: heads are a dimension of a tensor [1, T, heads, size]."""
    torch.manual_seed(0)
    shapes = [(heads, sizes[0]), (key_heads, sizes[0]), (key_heads, sizes[1])]
    rows = [torch.randn(1, sum(LENGTHS), *shape, dtype=dtype) for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in rows]


def by_torch(q: Any, k: Any, v: Any, scale: float | None, window: int | None) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    outs = []
    for sample in zip(*(x.split(LENGTHS, dim=2) for x in (q, k, v)), strict=True):
        length = sample[0].shape[2]
        shown = torch.ones(length, length, dtype=torch.bool).tril()
        if window is not None:
            shown &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
        outs.append(scaled_dot_product_attention(*sample, attn_mask=shown, scale=scale).transpose(1, 2))
    return torch.cat(outs, dim=1)


def with_gradients(out: torch.Tensor, tensors: Any) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize(("scale", "window"), [(None, None), (0.3, None), (None, 3), (0.3, 1)])
@pytest.mark.parametrize("kernel", ["cpu", "exact", "torch's choice"])
def test_samples_equal_attention_of_each_alone(kernel: str, scale: float | None, window: int | None) -> None:
    tensors = inputs()
    if kernel == "cpu":
        out = cpu_attention.attend(*tensors, BORDERS, scale, window)
    elif kernel == "exact":
        out = exact_attention.attend(*tensors, BORDERS, SoftmaxOptions(scale, window))
    else:
        out = packed_attention._per_sample(*tensors, SampleBounds(LENGTHS, BORDERS.int()), scale, window)
    expected = with_gradients(by_torch(*tensors, scale, window), tensors)
    for ours, theirs in zip(with_gradients(out, tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_cpus_computes_smaller_types(dtype: torch.dtype) -> None:
    tensors, exact = inputs(dtype=dtype), [x.detach().double().requires_grad_() for x in inputs(dtype=dtype)]
    found = with_gradients(cpu_attention.attend(*tensors, BORDERS), tensors)
    expected = with_gradients(by_torch(*exact, None, None), exact)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "dropout", "value_size"),
    [(None, None, False, 0.0, 5), (2, 0.7, True, 0.0, 6), (None, None, True, 0.4, 6), (3, 1.5, False, 0.3, 4)],
)
def test_exact_gradients_equal_differences(
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    dropout: float,
    value_size: int,
) -> None:
    monkeypatch.setitem(SCORE_BYTES, "cpu", 150)  # several blocks of queries
    query, key, value = inputs(sizes=(6, value_size))
    sinks_H = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True) if sinks else None

    def attend(query: Any, key: Any, value: Any, sinks_H: Any) -> torch.Tensor:
        torch.manual_seed(7)  # each call drops the same weights
        softmax = SoftmaxOptions(0.9, window, softcap, sinks_H)
        return exact_attention.attend(query, key, value, BORDERS, softmax, dropout)

    assert torch.autograd.gradcheck(attend, (query, key, value, sinks_H), fast_mode=True)


def test_dropout_keeps_the_mean_and_follows_torchs_seed() -> None:
    query, key, value = (x.detach() for x in inputs())
    softmax = SoftmaxOptions()
    exact = exact_attention.attend(query, key, value, BORDERS, softmax)
    torch.manual_seed(1)
    drawn = [exact_attention.attend(query, key, value, BORDERS, softmax, 0.25) for _ in range(4000)]
    torch.manual_seed(1)
    assert torch.equal(exact_attention.attend(query, key, value, BORDERS, softmax, 0.25), drawn[0])
    assert not torch.equal(drawn[0], drawn[1])
    first = torch.stack(drawn)[:, 0, 0]  # the first token attends to itself only: 0, or its value / 0.75
    kept = (first != 0).all(dim=2)
    assert 0.73 < kept.double().mean() < 0.77
    torch.testing.assert_close(first[kept], (exact[0, 0] / 0.75).expand_as(first)[kept])
    torch.testing.assert_close(torch.stack(drawn).mean(dim=0), exact, atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("settings", "value_size", "kernel"),
    [
        ({}, 6, "cpu"),
        ({"sliding_window": 3}, 6, "cpu"),
        ({}, 5, "exact"),
        ({"dropout": 0.1}, 6, "exact"),
        ({"softcap": 2.0}, 6, "exact"),
        ({"s_aux": torch.zeros(4)}, 6, "exact"),
    ],
)
def test_what_no_fused_kernel_computes_is_exact(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], value_size: int, kernel: str
) -> None:
    called = []
    for name, module in (("cpu", cpu_attention), ("exact", exact_attention)):
        attend = module.attend
        monkeypatch.setattr(
            module, "attend", lambda *args, name=name, attend=attend: called.append(name) or attend(*args)
        )
    bounds = SampleBounds(LENGTHS, BORDERS.int())
    assert torch.equal(bounds.borders, BORDERS) and bounds.longest == max(LENGTHS)
    out, _ = packed_attention.packed_attention(
        torch.nn.Module(), *inputs(sizes=(6, value_size)), None, packed_bounds=bounds, **settings
    )
    assert called == [kernel] and out.shape == (1, sum(LENGTHS), 4, value_size)


@pytest.mark.parametrize("operator", ["cpu", "exact"])
def test_operators_keep_torchs_rules(operator: str) -> None:
    """Shapes and strides of the traced results, no result that shares memory, and gradients that can be traced."""
    tensors = inputs()
    if operator == "cpu":
        torch.library.opcheck(cpu_attention._attend, (*tensors, BORDERS, 0.3, 3))
    else:
        sinks_H = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True)
        torch.library.opcheck(exact_attention._attend, (*tensors, BORDERS, sinks_H, None, 0.3, 3, 1.5, 0.0))
        torch.library.opcheck(exact_attention._attend, (*tensors, BORDERS, None, torch.tensor(5), 0.3, None, None, 0.5))


@pytest.mark.parametrize(("window", "blocks"), [(None, 24), (8, 6)])
def test_blocks_of_attention_with_a_window_are_larger(
    monkeypatch: pytest.MonkeyPatch, window: int | None, blocks: int
) -> None:
    """384 scores of each head are allowed: 4 queries x 96 keys without a window, and 16 x 24 with one of 8."""
    monkeypatch.setitem(SCORE_BYTES, "cpu", 4 * 2 * 384)
    found = list(exact_attention.blocks([10, 106, 110], 2, window, torch.device("cpu")))
    assert len(found) == blocks + 1
    assert [place for queries, _ in found for place in range(queries.start, queries.stop)] == list(range(10, 110))
    for queries, keys in found:
        start = 10 if queries.start < 106 else 106
        assert keys == slice(start if window is None else max(start, queries.start - 7), queries.stop)
