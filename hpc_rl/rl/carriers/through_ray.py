"""Everything is an argument or a result of a call to a rank: numpy arrays, which Ray's object store passes on without a
copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from tensordict import TensorDict

from hpc_rl.rl.carriers.base import Carrier, FlatColumns, Kept, Parcel, Reply, dealt_shards
from hpc_rl.rl.dealing import Deal, Shard

T = TypeVar("T")


@dataclass(frozen=True)
class Enclosed(Generic[T]):
    """A parcel with its content."""

    content: T

    def open(self) -> T:
        """Return the content."""
        return self.content


class RayCarrier(Carrier):
    """Sends everything from the driver, and all columns to it."""

    def shards(self, experience: TensorDict, deal: Deal) -> list[Parcel[Shard]]:
        """Return parcels with the responses."""
        return [Enclosed(shard) for shard in dealt_shards(experience, deal)]

    def columns(self, deal: Deal, token_columns: Mapping[str, torch.Tensor | Kept]) -> list[Parcel[FlatColumns]]:
        """Return parcels with the columns."""
        parts = {}
        for name, column in token_columns.items():
            assert isinstance(column, torch.Tensor)  # this carrier keeps none
            parts[name] = deal.split(column.values().numpy())
        return [Enclosed({name: part[rank] for name, part in parts.items()}) for rank in range(len(deal.orders))]

    def kept(self, deal: Deal, lengths_B: torch.Tensor) -> tuple[list[Reply], Kept] | None:
        """Return None: this carrier keeps no column."""
        return None
