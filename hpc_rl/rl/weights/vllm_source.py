"""The policy's weights as the WeightSource of vLLM's own transfers, whose interface changed with version 0.33."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from hpc_rl.rl.weights.base import WeightSource


def vllm_source(weights: WeightSource) -> Any:
    """Return the weights as a `vllm.distributed.weight_transfer.WeightSource`.

    Every rank owns every parameter: all of them iterate together, because sharded tensors are gathered on the way.
    """
    from vllm.distributed.weight_transfer import base

    described = [base.ParamMeta(entry.name, entry.dtype, entry.shape) for entry in weights.metadata()]

    if hasattr(base.WeightSource, "iter_full"):  # from version 0.33

        class Source(base.WeightSource):
            @cached_property
            def metadata(self) -> list[Any]:
                return described

            def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
                return iter(weights)
    else:

        class Source(base.WeightSource):  # type: ignore[no-redef]
            def metadata(self) -> list[Any]:
                return described

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return iter(weights)

    return Source()
