"""Everything is an argument or a result of a call to a rank: numpy arrays, which Ray's object store passes on without a
copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.rl.carriers.base import Carrier, ColumnHandle, ColumnSink, FlatColumns, Parcel, parcels_by_rank
from hpc_rl.rl.loop.assignment import Assignment, Shard


@dataclass(frozen=True)
class EnclosedColumns:
    """One rank's part of token columns."""

    parts: dict[str, list[NDArray[np.float32]]]
    """Column -> the parts of the rank's responses, which Ray reads where the driver has them."""

    def open(self) -> FlatColumns:
        """Put the parts together."""
        empty = np.zeros(0, np.float32)
        return {name: np.concatenate([empty, *own]) for name, own in self.parts.items()}


class RayCarrier(Carrier):
    """Sends everything from the driver, and all columns to it. It needs nothing on the nodes."""

    def __init__(self, nodes: Sequence[str] = ()) -> None: ...

    def shards(self, experience: TensorDict, assignment: Assignment) -> list[Parcel[Shard]]:
        """Return parcels with the responses."""
        return [*parcels_by_rank(experience, assignment)]

    def columns(
        self, assignment: Assignment, token_columns: Mapping[str, torch.Tensor | ColumnHandle]
    ) -> list[Parcel[FlatColumns]]:
        """Return parcels with the columns."""
        parts = {}
        for name, column in token_columns.items():
            assert isinstance(column, torch.Tensor)  # this carrier keeps none
            parts[name] = assignment.split(column.values().numpy())
        ranks = range(len(assignment.orders))
        return [EnclosedColumns({name: part[rank] for name, part in parts.items()}) for rank in ranks]

    def kept(self, assignment: Assignment, lengths_B: torch.Tensor) -> tuple[list[ColumnSink], ColumnHandle] | None:
        """Return None: this carrier keeps no column."""
        return None
