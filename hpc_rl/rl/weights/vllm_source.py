"""The policy's weights as the WeightSource of vLLM's own transfers, whose interface changed with version 0.33."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from hpc_rl.rl.weights.base import WeightSource


def has_iter_full() -> bool:
    """Whether vLLM has the interface of version 0.33 and later."""
    from vllm.distributed.weight_transfer import base

    return hasattr(base.WeightSource, "iter_full")


def settled(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor when the GPU has computed it on the default stream, whichever stream the caller uses.

    vLLM's transfer over NCCL takes the tensors inside of a stream of its own, between broadcasts of another
    communicator. If gathers ran there, they would depend on broadcasts that only rank 0 takes part in, while the other
    ranks are ahead on their default streams. That can end in a deadlock.
    """
    default = torch.cuda.default_stream()
    while True:
        with torch.cuda.stream(default):
            found = next(weights, None)
        if found is None:
            return
        default.synchronize()
        # The memory belongs to the default stream, which must not use it again before the caller's stream has read it.
        found[1].record_stream(torch.cuda.current_stream())
        yield found


def vllm_source(weights: WeightSource) -> Any:
    """Return the weights as a `vllm.distributed.weight_transfer.WeightSource`.

    Every rank owns every parameter: all of them iterate together, because sharded tensors are gathered on the way.
    """
    from vllm.distributed.weight_transfer import base

    described = [base.ParamMeta(entry.name, entry.dtype, entry.shape) for entry in weights.metadata()]

    if has_iter_full():

        class Source(base.WeightSource):
            @cached_property
            def metadata(self) -> list[Any]:
                return described

            def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
                return settled(iter(weights))
    else:

        class Source(base.WeightSource):  # type: ignore[no-redef]
            def metadata(self) -> list[Any]:
                return described

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return settled(iter(weights))

    return Source()
