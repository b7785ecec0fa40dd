"""What the training loop asks of an objective: its data, its model, its loss and its metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpc_rl.config.training.finetune import FinetuneTrainerConfig
from hpc_rl.data.lazy import LazyRows, Sizes
from hpc_rl.data.tokenized import Form, Tokenize
from hpc_rl.run_dir import RunDir
from hpc_rl.training.batching import Bin, plan_batch
from hpc_rl.training.models.causal_lm import PackedModel
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Found(NamedTuple):
    """The result of a micro-batch, which all ranks of a sequence group compute."""

    loss: torch.Tensor
    """The scaled sum of its losses, a scalar."""
    sums: torch.Tensor
    """Sums over its items that `Objective.metrics` needs, [K], without a gradient. K is the same for each batch."""


@dataclass(frozen=True)
class Work:
    """The amount of work in a global batch."""

    lengths: list[int]
    """Tokens of each item, by which micro-batches are packed."""
    sample_lengths: list[int]
    """Tokens of each sample that is trained on; an item has one or more."""
    targets: int
    """Target tokens of these samples."""

    @classmethod
    def of(cls, sizes: Sizes, trained: int | None = None) -> Work:
        """Count the tokens of items of these sizes.

        Args:
            trained: how many samples of each item are trained on, the first ones. None: all.
        """
        lengths, targets = sizes
        return cls(
            lengths=lengths.sum(axis=1).tolist(),
            sample_lengths=lengths[:, :trained].flatten().tolist(),
            targets=int(targets[:, :trained].sum()),
        )

    @property
    def tokens(self) -> int:
        """Tokens of all samples that are trained on."""
        return sum(self.sample_lengths)

    def plan(self, world: World, trainer: FinetuneTrainerConfig) -> list[list[Bin]]:
        """Return the items of each micro-batch of each sequence group. All groups have the same number of these."""
        return plan_batch(self.lengths, world.size // trainer.sequence_parallel, trainer.row_tokens, trainer.packing)

    def micro_batches(self, world: World, trainer: FinetuneTrainerConfig) -> list[Bin]:
        """Return the items of each micro-batch of this rank's sequence group."""
        return self.plan(world, trainer)[world.rank // trainer.sequence_parallel]


class Objective(ABC):
    """An objective of a run. The loss of a global batch is the sum over its items, divided by `divisor`, so that it
    does not depend on how the items were split into micro-batches and ranks."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def join(self, world: World) -> World | None:
        """Return the ranks that train, if this is one of them. Any other rank gets None, and calls `serve`. Every rank
        calls this first."""
        return world

    def serve(self) -> int:
        """Serve the ranks that train until they are done, and return their exit code."""
        raise NotImplementedError

    def leave(self, exit_code: int) -> None:  # noqa: B027 - may be left out
        """Let the ranks that do not train end. Every rank that trains calls this at the end of a run."""

    @property
    @abstractmethod
    def form(self) -> Form[Any]:
        """What an item of the tokenized data consists of."""

    @property
    def untemplated_data(self) -> Any:
        """The options of data without the file of the chat template, which may change: the tokenizer has its text."""
        return self.config.data.updated("chat_template", None)

    @abstractmethod
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Tokenize:
        """Return the function that tokenizes rows, with the tokenizer's chat template.

        Raises:
            UserError: the tokenizer cannot be used.
        """

    def items(self, rows: LazyRows[Any]) -> Sequence[Any]:
        """Return the items that are trained on, in the order of the data."""
        return rows

    @abstractmethod
    def model(self) -> Pretrained[Any]:
        """Return the model that is trained, to be loaded."""

    def load(self, world: World) -> Any:
        """Load the model that is trained. Every rank calls this."""
        return load_sharded(self.model(), world, self.config.trainer)

    @abstractmethod
    def collate(self, items: Sequence[Any]) -> Any:
        """Build a micro-batch; without items, one that has no loss and no gradient."""

    @abstractmethod
    def loss(self, model: Any, batch: Any, scale: float) -> Found:
        """Return `scale` times the sum of a micro-batch's losses.

        The scale divides by `divisor` and corrects for FSDP's average over ranks.
        """

    def prepare(
        self, train: Sequence[Any], val: Sequence[Any], sizes: Sizes, run: RunDir, world: World, stopping: Stopping
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the items with what has to be computed before training. Every rank calls this, before the model is
        loaded.

        Args:
            sizes: of the items of `train`, and after them of `val`.

        Raises:
            Stopped: the run stops during this computation; every rank raises it.
        """
        return train, val

    def work(self, sizes: Sizes) -> Work:
        """Count the tokens of a global batch."""
        return Work.of(sizes)

    def begin(self, model: PackedModel, batches: Iterable[Any], world: World) -> None:  # noqa: B027 - may be left out
        """Compute what the losses of a global batch have in common, from this rank's micro-batches. Every rank calls
        this."""

    def divisor(self, work: Work) -> float:
        """Return the number that the sum of a global batch's losses is divided by: its items."""
        return len(work.lengths)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return metrics from `Found.sums`, added up over a global batch."""
        return {}
