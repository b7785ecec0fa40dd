"""Options that fine-tuning under torchrun has for every objective: `submit sft`, `dpo`, `rm` and `distill`."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from hpc_rl.config.base import Files, Path, Section
from hpc_rl.config.job import JobConfig
from hpc_rl.config.mixtures import TrainFiles
from hpc_rl.config.training import ModelConfig, OptimConfig, TrainingConfig, gpu_problems, row_limit


class FinetuneDataConfig(Section):
    train_files: TrainFiles
    """Training data: one or more data files (jsonl, json, csv, tsv or parquet), or the name of one data set on the hub
    (its train split). A table {FILE: WEIGHT, FILE: WEIGHT} sets the share of each file in an epoch."""
    val_files: Files = []
    """Validation data, in the same forms (of a data set on the hub, its test split). Empty: no validation."""
    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the tokenizer's. null: the tokenizer's own template."""
    max_length: int = Field(1024, ge=2)
    """Longest sample, in tokens."""
    train_batch_size: int = Field(64, ge=1)
    """Samples per optimizer step, over all ranks."""
    shuffle: bool = True
    """Use a new random order in each epoch. The order does not depend on the number of ranks."""

    @property
    def columns(self) -> list[str]:
        """The columns that are read; empty: all."""
        return []

    @property
    def longest(self) -> int:
        """The largest number of tokens that cannot be split among micro-batches."""
        return self.max_length


class FinetuneTrainerConfig(TrainingConfig):
    packing: bool = True
    """Pack several samples into one micro-batch of at most micro_tokens tokens. false: one sample, or one pair, per
    micro-batch."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.offload == "all":
            yield (
                "trainer.offload=all moves the weights of models that wait for others, and in fine-tuning none waits: "
                "use trainer.offload=optimizer"
            )


class FinetuneConfig(JobConfig):
    model: ModelConfig
    data: FinetuneDataConfig
    optim: OptimConfig = OptimConfig()
    trainer: FinetuneTrainerConfig = FinetuneTrainerConfig()

    @property
    def hang_timeout_s(self) -> float:
        return self.trainer.hang_timeout_s

    def problems(self) -> Iterator[str]:
        yield from gpu_problems(self.model, self.trainer)
        yield from self._sequence_problems()
        longest, limit = self.data.longest, self.trainer.row_tokens
        if longest > limit:
            both = "" if longest == self.data.max_length else f" for each of two samples needs {longest} tokens, which"
            yield (
                f"data.max_length {self.data.max_length}{both} exceeds {row_limit(self.trainer)}: "
                f"a {'pair' if both else 'sample'} is never split, so raise micro_tokens or lower max_length"
            )

    def _sequence_problems(self) -> Iterator[str]:
        size, ranks = self.trainer.sequence_parallel, self.trainer.n_gpus_per_node
        if ranks % size:
            yield (
                f"trainer.sequence_parallel={size} does not divide the {ranks} ranks of a node "
                "(trainer.n_gpus_per_node): use a divisor of their number"
            )
