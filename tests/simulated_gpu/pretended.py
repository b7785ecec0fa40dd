"""CUDA's part of torch without a GPU, in one rank: devices, memory, and recorded streams and events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hpc_rl.training.models.attention import packed_attention
from tests.simulated_gpu import streams
from tests.simulated_gpu.patches import GPU_BYTES, GPU_NAME
from tests.simulated_gpu.record import note


@contextmanager
def pretended_gpu(local_rank: int, on_node: int) -> Iterator[None]:
    """Let this process see the GPUs of its node, and use the one of its rank."""
    with ExitStack() as stack:
        for owner, values in _replacements(local_rank, on_node):
            stack.enter_context(mock.patch.multiple(owner, **values))
        yield


def _replacements(local_rank: int, on_node: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    device = [local_rank]

    def index_of(chosen: Any) -> int:
        return chosen if isinstance(chosen, int) else torch.device(chosen).index or 0

    def properties(chosen: Any = None) -> Any:
        index = device[0] if chosen is None else index_of(chosen)
        return SimpleNamespace(
            name=GPU_NAME, uuid=f"GPU-{index}", total_memory=GPU_BYTES, major=9, minor=0, multi_processor_count=132
        )

    def choose(chosen: Any) -> None:
        device[0] = index_of(chosen)

    of_streams = {
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.StreamContext,
        "current_stream": streams.current_stream,
        "synchronize": lambda *_: note("synchronize", "device"),
    }
    memory = (GPU_BYTES, GPU_BYTES)
    yield (
        torch.cuda,
        {
            **of_streams,
            "default_stream": streams.default_stream,
            "set_stream": streams.set_stream,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: on_node,
            "current_device": lambda: device[0],
            "set_device": choose,
            "empty_cache": lambda: None,
            "ipc_collect": lambda: None,
            "mem_get_info": lambda *_: memory,
            "max_memory_allocated": lambda *_: 0,
            "memory_allocated": lambda *_: 0,
            "get_device_name": lambda *_: GPU_NAME,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": properties,
            "is_bf16_supported": lambda *_, **__: True,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *_: None,
            "manual_seed_all": lambda _: None,
        },
    )
    yield torch, {"Stream": streams.Stream, "Event": streams.Event}
    yield (
        torch.accelerator,
        {
            "current_stream": streams.current_stream,
            "set_stream": streams.set_stream,
            "synchronize": of_streams["synchronize"],
            "is_available": lambda: True,
            "device_count": lambda: on_node,
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "current_device_index": lambda: device[0],
            "set_device_index": choose,
            "empty_cache": lambda: None,
            "max_memory_allocated": lambda *_: 0,
            "memory_allocated": lambda *_: 0,
            "get_memory_info": lambda *_: memory,
        },
    )
    yield torch.Tensor, {"record_stream": lambda _, stream: note("record_stream", stream.name)}
    yield torch.UntypedStorage, {"resize_": _resize(torch.UntypedStorage.resize_)}
    yield packed_attention, {"varlen_attn": _varlen_attention}


def _resize(on_cpu: Any) -> Any:
    def resize(storage: torch.UntypedStorage, size: int) -> None:
        if storage.device.type == "cpu":
            on_cpu(storage, size)
        else:
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            torch.ops.simulated.resize_storage(there, size)

    return resize


def _varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *bounds: Any, window_size: Any, **options: Any
) -> torch.Tensor:
    """Stands for torch's kernel: [tokens, heads, size] of rows whose samples begin at the first of `bounds`."""
    assert window_size == (-1, 0)
    lengths = bounds[0].diff().tolist()
    samples = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    return torch.cat([_causal(*(x.transpose(0, 1) for x in sample), **options).transpose(0, 1) for sample in samples])


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool = False, scale: float | None = None
) -> torch.Tensor:
    if enable_gqa:
        key, value = (x.repeat_interleave(len(query) // len(x), dim=0) for x in (key, value))
    scores = (query @ key.transpose(1, 2)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(value.dtype) @ value
