"""Steps of an optimizer on some of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def only(optimizer: torch.optim.Optimizer, chosen: Set[nn.Parameter]) -> Iterator[None]:
    """Leave all other parameters out of the optimizer's groups, until the end of the block."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    for group, parameters in zip(groups, whole, strict=True):
        group["params"] = [parameter for parameter in parameters if parameter in chosen]
    try:
        yield
    finally:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters
