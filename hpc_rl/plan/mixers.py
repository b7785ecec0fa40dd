"""Layers with a state: their parameters, and what a training step and an engine need for them.

transformers computes them with torch if no kernels are installed, one sample after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.plan.families import Mixer

_CHUNK = 64
"""Tokens that a delta net computes at a time."""
Linears = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class MixerShape:
    """What a layer with a state needs beside its weights."""

    kept: int = 0
    """Bytes that training keeps of a token for the backward pass, in the code of transformers without kernels."""
    working: int = 0
    """Bytes of a token of one sample that exist beside them in the backward pass."""
    forward: int = 0
    """Bytes of a token of one sample in a pass without gradients."""
    operations: int = 0
    """Operations of a token in a forward pass, without those of the linear layers."""
    state: int = 0
    """Numbers in the state of a sequence that generates."""
    convolution: int = 0
    """Numbers of a sequence's last tokens, which a convolution needs."""


def total(text: str, **sizes: int) -> int:
    """Return the numbers in some vectors, such as `2H N`."""
    found = 0
    for times, letter in re.findall(r"(\d*)([A-Z]?)", text):
        if times or letter:
            found += int(times or 1) * (sizes[letter] if letter else 1)
    return found


def mixer_of(kind: Mixer, size: Callable[..., int], settings: Mapping[str, Any]) -> tuple[Linears, int, MixerShape]:
    """Return the linear layers of a mixer, the number of its other parameters, and its shape.

    Args:
        size: returns a setting by its standard name.
    """
    hidden = size("hidden_size")
    return {
        "delta": _delta,
        "delta parts": _delta,
        "kimi": _kimi,
        "lightning": _lightning,
        "mamba": _mamba,
        "mamba2": _mamba2,
        "convolution": _convolution,
    }[kind](hidden, size, settings)


def _delta(hidden: int, size: Callable[..., int], settings: Mapping[str, Any]) -> tuple[Linears, int, MixerShape]:
    """Gated delta net (https://arxiv.org/abs/2412.06464)."""
    key_heads, heads = size("linear_num_key_heads"), size("linear_num_value_heads")
    key_size, value_size = size("linear_key_head_dim"), size("linear_value_head_dim")
    keys, values, kernel = key_heads * key_size, heads * value_size, size("linear_conv_kernel_dim", 4)
    kind = settings["model_type"]
    if kind == "olmo_hybrid":
        names = {"q_proj": keys, "k_proj": keys, "v_proj": values, "a_proj": heads, "b_proj": heads, "g_proj": values}
    elif kind == "qwen3_next":
        names = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads}
    else:
        names = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    linears = tuple((name, rows, hidden) for name, rows in names.items())
    out = "o_proj" if kind == "olmo_hybrid" else "out_proj"
    vectors = kernel * (2 * keys + values) + 2 * heads + value_size
    repeated, states = heads * key_size, heads * key_size * value_size // _CHUNK
    shape = MixerShape(
        kept=8 * keys + 34 * values + 32 * repeated + 4 * states + (20 * _CHUNK + 38) * heads,
        working=5 * keys + 9 * values + 16 * repeated,
        forward=32 * values + 36 * repeated + 4 * _CHUNK * heads,
        operations=heads * (_CHUNK * (5 * key_size + 3 * value_size) + 6 * key_size * value_size),
        state=heads * key_size * value_size,
        convolution=(kernel - 1) * (2 * keys + values),
    )
    return (*linears, (out, hidden, values)), vectors, shape


def _kimi(hidden: int, size: Callable[..., int], settings: Mapping[str, Any]) -> tuple[Linears, int, MixerShape]:
    """Kimi delta attention (https://arxiv.org/abs/2510.26692)."""
    linear = settings.get("linear_attn_config") or {}
    heads = linear.get("num_heads") or size("linear_num_heads", 32)
    head = linear.get("head_dim") or size("linear_head_dim", 128)
    kernel = linear.get("short_conv_kernel_size") or size("linear_conv_kernel_dim", 4)
    width = heads * head
    linears = (
        ("q_proj", width, hidden),
        ("k_proj", width, hidden),
        ("v_proj", width, hidden),
        ("f_a_proj", head, hidden),
        ("f_b_proj", width, head),
        ("b_proj", heads, hidden),
        ("g_a_proj", head, hidden),
        ("g_b_proj", width, head),
        ("o_proj", hidden, width),
    )
    shape = MixerShape(
        kept=871 * width + 5990 * heads + 4 * width * head // _CHUNK,
        working=774 * width,
        forward=802 * width,
        operations=heads * (8 * _CHUNK * head + 6 * head * head),
        state=heads * head * head,
        convolution=(kernel - 1) * 3 * width,
    )
    return linears, 3 * width * kernel + width + heads + head, shape


def _lightning(hidden: int, size: Callable[..., int], settings: Mapping[str, Any]) -> tuple[Linears, int, MixerShape]:
    """Lightning attention (https://arxiv.org/abs/2501.08313)."""
    heads = size("num_attention_heads")
    head = size("head_dim", hidden // heads)
    width, block = heads * head, size("block_size", 256)
    linears = (("qkv_proj", 3 * width, hidden), ("out_proj", hidden, width), ("output_gate", width, hidden))
    return (
        linears,
        width,
        MixerShape(
            kept=28 * width + 2 * heads * block + 2 * width * head // block,
            working=12 * width + 2 * hidden,
            forward=16 * width,
            operations=heads * (4 * block * head + 4 * head * head),
            state=heads * head * head,
        ),
    )


def _mamba(hidden: int, size: Callable[..., int], settings: Mapping[str, Any]) -> tuple[Linears, int, MixerShape]:
    """Mamba (https://arxiv.org/abs/2312.00752) with Jamba's norms."""
    inner, state, kernel = size("mamba_expand", 2) * hidden, size("mamba_d_state", 16), size("mamba_d_conv", 4)
    rank = size("mamba_dt_rank", -(-hidden // 16))
    linears = (
        ("in_proj", 2 * inner, hidden),
        ("x_proj", rank + 2 * state, inner),
        ("dt_proj", inner, rank),
        ("out_proj", hidden, inner),
    )
    vectors = inner * (state + 1 + kernel + 1) + rank + 2 * state
    vectors += inner if settings.get("mamba_conv_bias", True) else 0
    vectors += 2 * inner + hidden if settings.get("mamba_proj_bias") else 0
    return (
        linears,
        vectors,
        MixerShape(
            kept=inner * (24 + 14 * state) + 8 * rank + 19 * state,
            working=16 * inner * state,
            forward=inner * (22 + 12 * state),
            operations=2 * inner * state,
            state=inner * state,
            convolution=(kernel - 1) * inner,
        ),
    )


def _mamba2(hidden: int, size: Callable[..., int], settings: Mapping[str, Any]) -> tuple[Linears, int, MixerShape]:
    """Mamba 2 (https://arxiv.org/abs/2405.21060)."""
    heads = size("mamba_n_heads", size("mamba_num_heads", 128))
    state = size("mamba_d_state", size("ssm_state_size", 128))
    groups, kernel = size("mamba_n_groups", size("n_groups", 1)), size("mamba_d_conv", size("conv_kernel", 4))
    if kind_is_nemotron := "mamba_num_heads" in settings:
        inner = heads * size("mamba_head_dim", 64)
    else:
        inner = size("mamba_d_ssm", size("mamba_expand", 2) * hidden)
    mixed, chunk = inner + 2 * groups * state, size("mamba_chunk_size", size("chunk_size", 256))
    shared = 8 * groups * state + 12 * heads * chunk + 8 * inner * state // chunk + 30 * heads
    linears = (("in_proj", inner + mixed + heads, hidden), ("out_proj", hidden, inner))
    vectors = kernel * mixed + 3 * heads
    vectors += mixed if settings.get("use_conv_bias" if kind_is_nemotron else "mamba_conv_bias", True) else 0
    is_normed = settings.get("mamba_rms_norm", settings["model_type"] != "falcon_h1")
    vectors += inner if is_normed else 0
    if settings.get("mamba_proj_bias") or settings.get("use_bias"):
        vectors += inner + mixed + heads + hidden
    return (
        linears,
        vectors,
        MixerShape(
            kept=(48 if is_normed else 35) * inner + 20 * heads * state + shared,
            working=16 * inner + 4 * heads * state,
            forward=32 * inner + 18 * heads * state + shared,
            operations=2 * chunk * (heads * state + inner) + 4 * inner * state,
            state=inner * state,
            convolution=(kernel - 1) * mixed,
        ),
    )


def _convolution(hidden: int, size: Callable[..., int], settings: Mapping[str, Any]) -> tuple[Linears, int, MixerShape]:
    """Short convolutions of LFM2."""
    kernel = size("conv_L_cache", 3)
    linears = (("in_proj", 3 * hidden, hidden), ("out_proj", hidden, hidden))
    vectors = hidden * kernel + (5 * hidden if settings.get("conv_bias") else 0)
    return linears, vectors, MixerShape(12 * hidden, 4 * hidden, 12 * hidden, convolution=(kernel - 1) * hidden)
