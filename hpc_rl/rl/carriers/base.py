"""What a carrier does: it brings a step's responses and token columns from the driver to the ranks, and columns back.

The driver assigns responses to the ranks (rl/loop/assignment.py) and calls them; a carrier decides what the calls
contain. Arguments are parcels, which a rank opens. What a rank computes goes into a column sink, whose result is what
the driver receives. All carriers bring the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.rl.actors.calls import ActorCall
from hpc_rl.rl.loop import experience as columns
from hpc_rl.rl.loop.assignment import Assignment, Shard, ShardParcel, shard_parcels

T_co = TypeVar("T_co", covariant=True)
FlatColumns = dict[str, NDArray[np.float32]]
"""One rank's part of token columns, by their names."""


class Parcel(Protocol[T_co]):
    """An argument of a call to a rank."""

    def open(self) -> T_co:
        """Return the content, on the rank."""


class ColumnSink(Protocol):
    """Where a rank puts a column that it has computed."""

    def send(self, column_N: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return what the call returns to the driver; None if the column stays with the carrier."""


@dataclass(frozen=True)
class ColumnHandle:
    """A token column that the ranks computed and the driver does not have; it stands for the column in a step's
    experience."""

    field: str
    """Name by which the carrier finds it."""

    def __getattr__(self, name: str) -> Any:
        # An AttributeError, because TensorDict asks every object that it stores for some attributes.
        raise AttributeError(
            f"the driver read .{name} of a column that stays with the carrier: add the column to `needed_by_driver` in "
            "hpc_rl/rl/loop/setup.py"
        )


class DirectSink(ColumnSink):
    """The call returns the column."""

    def send(self, column_N: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return the column."""
        return column_N


class Carrier(ABC):
    """Carries the experience of a run's steps; part of the driver."""

    @property
    def watched(self) -> Sequence[ActorCall]:
        """The calls that end only if a process of the carrier dies."""
        return ()

    @abstractmethod
    def shards(self, experience: TensorDict, assignment: Assignment) -> list[Parcel[Shard]]:
        """Return each rank's responses."""

    @abstractmethod
    def columns(
        self, assignment: Assignment, token_columns: Mapping[str, torch.Tensor | ColumnHandle]
    ) -> list[Parcel[FlatColumns]]:
        """Return each rank's part of token columns."""

    @abstractmethod
    def kept(self, assignment: Assignment, lengths_B: torch.Tensor) -> tuple[list[ColumnSink], ColumnHandle] | None:
        """Return where each rank puts a column that the driver does not need, and what stands for this column.

        Args:
            lengths_B: length of each response's row in a token column.

        Returns:
            None if this carrier brings every column to the driver.
        """

    def clear(self) -> None:  # noqa: B027  (only some carriers have to)
        """Forget the content of the step, which has ended."""

    def close(self) -> None:  # noqa: B027
        """End the processes of the carrier. A second call does nothing."""


def parcels_by_rank(experience: TensorDict, assignment: Assignment) -> list[ShardParcel]:
    """Return each rank's responses of a step."""
    return shard_parcels(assignment, *(columns.rows_of(experience[name]) for name in row_names(experience)))


def shards_of(experience: TensorDict, assignment: Assignment) -> list[Shard]:
    """Return each rank's responses of a step, put together."""
    return [rows.open() for rows in parcels_by_rank(experience, assignment)]


def row_names(experience: TensorDict) -> list[str]:
    """Return the columns with whole responses that a step has, in the order of the arguments of `shard_parcels`."""
    return [name for name in ("prompt_ids", "response_ids", "response_mask") if name in experience]


def row_lengths(experience: TensorDict, name: str) -> NDArray[np.int64]:
    """Return the length of each row of a column, [B]."""
    found: NDArray[np.int64] = columns.lengths(experience, name).numpy()
    return found
