"""The kernels of GPUs, as far as a CPU can check them: FlashAttention 3 is activated, and gets what it needs.

torch's own code runs, from varlen_attn to the call of the package's operators. Those are stand-ins that compute the
formulas of attention with what they are given, by their meaning in FlashAttention 3:
https://github.com/Dao-AILab/flash-attention/blob/main/hopper/flash_api.cpp
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention

from hpc_rl.training.models.attention import cpu_attention, packed_attention
from hpc_rl.training.models.attention.packed_attention import SampleBounds, use_flash_attention_3
from hpc_rl.training.parallel.distributed import World

HOPPER = World(rank=0, size=1, device=torch.device("cuda"))
LENGTHS = (5, 1, 9, 3)


def probabilities(
    q: Any, k: Any, cu_seqlens: torch.Tensor, scale: float, causal: bool, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [heads, T, T] and the logarithms of their sums [heads, T], from [T, heads, size]."""
    sample = torch.bucketize(torch.arange(len(q)), cu_seqlens[1:], right=True)
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = sample[:, None] != sample
    if causal or right >= 0:
        hidden |= back < (0 if causal else -right)
    if left >= 0:
        hidden |= back > left
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("thd,shd->hts", q.double(), k.double()) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=2), scores.logsumexp(dim=2)


def forward(*given: Any) -> tuple[torch.Tensor | None, ...]:
    """flash_attn_3::fwd."""
    q, k, v, k_new, v_new, qv, out, cu_q, cu_k = given[:9]
    longest_q, longest_k, scale, causal, left, right = *given[12:14], *given[23:27]
    assert given[27:29] == (0, 0.0)  # attention_chunk, softcap
    assert k_new is v_new is qv is out is None
    assert cu_q is cu_k and longest_q == longest_k == max(LENGTHS)
    weights, sums = probabilities(q, k, cu_q, scale or q.shape[2] ** -0.5, causal, left, right)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hts,shd->thd", weights, v.double()).to(q.dtype), sums.float(), None, None


def backward(*given: Any) -> None:
    """flash_attn_3::bwd, which writes into its arguments."""
    dout, q, k, v, _out, sums, dq, dk, dv, cu_q = given[:10]
    scale, causal, left, right, softcap = given[15:20]
    assert softcap == 0
    scale = scale or q.shape[2] ** -0.5
    weights, expected = probabilities(q, k, cu_q, scale, causal, left, right)
    torch.testing.assert_close(sums, expected.float())
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).double() for x in (k, v))
    grad_weights = torch.einsum("thd,shd->hts", dout.double(), v)
    grad = weights * (grad_weights - (weights * grad_weights).sum(dim=2, keepdim=True)) * scale
    dq.copy_(torch.einsum("hts,shd->thd", grad, k))
    dk.copy_(torch.einsum("hts,thd->shd", grad, q.double()).unflatten(1, (-1, groups)).sum(dim=2))
    dv.copy_(torch.einsum("hts,thd->shd", weights, dout.double()).unflatten(1, (-1, groups)).sum(dim=2))


class Operators:
    """Stand in for torch.ops.flash_attn_3."""

    fwd = staticmethod(forward)
    bwd = staticmethod(backward)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Let torch believe that it is a build for CUDA on a Hopper GPU, with the package installed."""
    if "FA3" not in getattr(torch_attention, "list_flash_attention_impls", list)():
        pytest.skip(f"torch {torch.__version__} has no FlashAttention 3")
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.ops, "flash_attn_3", Operators, raising=False)
    yield monkeypatch
    torch_attention.restore_flash_attention_impl(_raise_warn=False)
    sys.modules.pop("flash_attn_interface", None)


def test_it_is_used_if_it_is_installed(hopper: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        use_flash_attention_3(HOPPER)
    assert torch_attention.current_flash_attention_impl() == "FA3"
    assert capsys.readouterr().out == "attention: FlashAttention 3\n"


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        (torch.cuda, "get_device_capability", lambda _device: (8, 0)),
        (torch.cuda, "get_device_capability", lambda _device: (10, 0)),
        (torch.version, "cuda", None),  # ROCm, whose MI300 has the capability 9.4
        (torch_attention, "list_flash_attention_impls", lambda: ["FA4"]),
    ],
)
def test_other_gpus_and_versions_keep_torchs_own(
    hopper: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: Any, name: str, value: Any
) -> None:
    hopper.setattr(target, name, value)
    use_flash_attention_3(HOPPER)
    assert torch_attention.current_flash_attention_impl() is None
    assert capsys.readouterr().out == ""


def test_without_the_package_nothing_happens(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flash_attn_interface.py").unlink()
    use_flash_attention_3(HOPPER)
    use_flash_attention_3(World(rank=0, size=1, device=torch.device("cpu")))
    assert torch_attention.current_flash_attention_impl() is None


def test_a_package_that_cannot_be_imported_is_named(
    hopper: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('no libcudart.so')")
    use_flash_attention_3(HOPPER)
    assert torch_attention.current_flash_attention_impl() is None
    assert capsys.readouterr().out == (
        "attention: torch's own FlashAttention, because flash_attn_interface cannot be used: no libcudart.so\n"
    )


@pytest.mark.parametrize(("scale", "window"), [(None, None), (0.3, None), (None, 3), (0.2, 1)])
def test_its_operators_get_samples_windows_and_scales(
    hopper: pytest.MonkeyPatch, scale: float | None, window: int | None
) -> None:
    from torch.nn.attention import _fa3

    use_flash_attention_3(HOPPER)
    hopper.setattr(_fa3, "_fa3_common_support_error", lambda *_: None)  # of tensors that are on no GPU
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _fa3._fa3_flash_attention_forward_impl_default, "CPU")
    library.impl("_flash_attention_backward", _fa3._fa3_flash_attention_backward_impl, "CPU")
    torch.manual_seed(0)
    borders = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    shapes = [(1, sum(LENGTHS), heads, 8) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape).bfloat16().transpose(1, 2).requires_grad_() for shape in shapes]
    found = packed_attention._flash(*tensors, SampleBounds(LENGTHS, borders.int()), scale, window)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = cpu_attention.attend(*exact, borders, scale, window)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    exact_gradients = torch.autograd.grad((expected * weights).sum(), exact)
    for ours, theirs in zip((found, *gradients), (expected, *exact_gradients), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-2, rtol=2e-2)
    library._destroy()
