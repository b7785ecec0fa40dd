"""Responses and columns are rows in TransferQueue's storage units: the driver puts each once, and ranks fetch theirs.

One partition per step; response i of the step is row i. Whole responses are put at the first `hold` of the step; other
pools, and passes over shuffled mini-batches, fetch the same rows. Columns that only the ranks need never reach the
driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.rl.actors.calls import ActorCall
from hpc_rl.rl.carriers.base import Carrier, ColumnHandle, ColumnSink, FlatColumns, Parcel, row_lengths, row_names
from hpc_rl.rl.carriers.transfer_queue.client import Client, Connection, Server, client_of
from hpc_rl.rl.loop.assignment import Assignment, Shard, ShardParcel


@dataclass(frozen=True)
class StoredShard:
    """One rank's responses, which it fetches."""

    connection: Connection
    partition: str
    names: list[str]
    order: NDArray[np.int64]
    mini_batches: list[list[int]]

    def open(self) -> Shard:
        """Fetch the rows and put them together."""
        rows = client_of(self.connection).get(self.partition, self.order, self.names)
        return ShardParcel(self.mini_batches, *(rows[name] for name in self.names)).open()


@dataclass(frozen=True)
class StoredColumns:
    """One rank's part of token columns, which it fetches."""

    connection: Connection
    partition: str
    fields: dict[str, str]
    """Name of the field in the storage units, by the name of the column."""
    order: NDArray[np.int64]

    def open(self) -> FlatColumns:
        """Fetch the rows and put them together."""
        rows = client_of(self.connection).get(self.partition, self.order, list(self.fields.values()))
        empty = np.zeros(0, np.float32)
        return {name: np.concatenate([empty, *rows[field]]) for name, field in self.fields.items()}


@dataclass(frozen=True)
class StorageSink:
    """Where one rank puts a column for the other ranks."""

    connection: Connection
    partition: str
    field: str
    order: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Length of each row, in this order."""

    def send(self, column_N: NDArray[np.float32]) -> None:
        """Put the rows. The driver receives nothing."""
        client = client_of(self.connection)
        client.put(self.partition, self.order, {self.field: self.lengths}, {self.field: column_N})


class NullSink(ColumnSink):
    """A column that another rank of the sequence group sends."""

    def send(self, column_N: NDArray[np.float32]) -> None:
        """Do nothing."""


class TransferQueueCarrier(Carrier):
    """The driver's side.

    Args:
        nodes: Ray's ids of the nodes that store the rows.

    Raises:
        UserError: the package is missing, or has another version.
        RunError: its processes did not start.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._server = Server(nodes)
        self._client = Client(self._server.connection, self._server.check)
        self._step = 0
        self._fields = 0
        self._has_rows = False

    def shards(self, experience: TensorDict, assignment: Assignment) -> list[Parcel[Shard]]:
        """See Carrier. The first call of a step puts the rows."""
        names = row_names(experience)
        if not self._has_rows:
            lengths = {name: row_lengths(experience, name) for name in names}
            rows = {name: experience[name].values().numpy() for name in names}
            self._client.put(self._partition, np.arange(len(experience)), lengths, rows)
            self._has_rows = True
        return [
            StoredShard(self._server.connection, self._partition, names, order, sizes)
            for order, sizes in zip(assignment.orders, assignment.sizes, strict=True)
        ]

    def columns(
        self, assignment: Assignment, token_columns: Mapping[str, torch.Tensor | ColumnHandle]
    ) -> list[Parcel[FlatColumns]]:
        """See Carrier. Columns that the ranks have put stay where they are."""
        fields, lengths, new = {}, {}, {}
        for name, column in token_columns.items():
            if isinstance(column, ColumnHandle):
                fields[name] = column.field
                continue
            fields[name] = self._new_field(name)
            lengths[fields[name]] = column.offsets().diff().numpy()
            new[fields[name]] = column.values().numpy()
        if new:
            self._client.put(self._partition, np.arange(assignment.responses), lengths, new)
        return [StoredColumns(self._server.connection, self._partition, fields, order) for order in assignment.orders]

    def kept(self, assignment: Assignment, lengths_B: torch.Tensor) -> tuple[list[ColumnSink], ColumnHandle] | None:
        field, lengths = self._new_field("kept"), lengths_B.numpy()
        sinks: list[ColumnSink] = []
        for rank, order in enumerate(assignment.orders):
            stored = StorageSink(self._server.connection, self._partition, field, order, lengths[order])
            sinks.append(NullSink() if rank % assignment.sequence_parallel else stored)
        return sinks, ColumnHandle(field)

    def clear(self) -> None:
        if self._fields or self._has_rows:
            self._client.clear(self._partition)
        self._step, self._fields, self._has_rows = self._step + 1, 0, False

    @property
    def watched(self) -> Sequence[ActorCall]:
        return self._server.watched

    def close(self) -> None:
        self._client.close()
        self._server.close()

    @property
    def _partition(self) -> str:
        return f"step-{self._step}"

    def _new_field(self, name: str) -> str:
        """Return a name that no other field of the step has: updates that run at the same time have columns of the same
        name."""
        self._fields += 1
        return f"{name}-{self._fields}"
