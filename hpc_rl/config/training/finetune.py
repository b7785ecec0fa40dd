"""Options that fine-tuning under torchrun has for every objective: `submit sft`, `dpo`, `rm` and `distill`."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from hpc_rl.config.base import Files, Path, Section, Table
from hpc_rl.config.job import JobConfig
from hpc_rl.config.training.common import ModelConfig, OptimConfig, TrainingConfig, gpu_problems, row_limit
from hpc_rl.config.training.mixtures import TrainFiles


class FinetuneDataConfig(Section):
    train_files: TrainFiles
    """Training data: one or more data files (jsonl, json, csv, tsv or parquet), or the name of one data set on the hub
    (its train split). A table {FILE: WEIGHT, FILE: WEIGHT} sets the share of each file in an epoch."""
    stream_rows: int | None = Field(None, ge=1)
    """Read the data set on the hub that train_files names while the run trains, in windows of N rows, instead of
    downloading it before. Rows are shuffled within a window. It needs trainer.total_training_steps, and internet on the
    first node. null: download it."""
    val_files: Files = []
    """Validation data, in the same forms (of a data set on the hub, its test split). Empty: no validation."""
    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the tokenizer's. null: the tokenizer's own template."""
    chat_template_kwargs: Table = {}
    """Variables of the chat template, such as {enable_thinking: false}."""
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
    def optimizers(self) -> dict[str, OptimConfig]:
        """The options of each trained model's optimizer, by the names of their sections."""
        return {"optim": self.optim}

    def problems(self) -> Iterator[str]:
        yield from gpu_problems(self.model, self.trainer)
        yield from self._sequence_problems()
        if self.data.stream_rows is not None:
            yield from self._stream_problems(self.data.stream_rows)
        longest = self.data.longest
        if not self.trainer.holds(longest):
            both = "" if longest == self.data.max_length else f" for each of two samples needs {longest} tokens, which"
            yield (
                f"data.max_length {self.data.max_length}{both} exceeds {row_limit(self.trainer)}: "
                f"a {'pair' if both else 'sample'} is never split, so raise micro_tokens or lower max_length"
            )

    def _stream_problems(self, rows: int) -> Iterator[str]:
        files, batch = self.data.train_files, self.data.train_batch_size
        if isinstance(files, dict):
            yield (
                f"data.stream_rows={rows} reads one data set from its beginning to its end, so data.train_files cannot "
                "have weights: name the data set alone, or remove data.stream_rows"
            )
        elif len(files) > 1:
            yield (
                f"data.stream_rows={rows} reads one data set on the hub, and data.train_files names {len(files)}: name "
                "one, or remove data.stream_rows"
            )
        elif again := next((file for file in self.data.val_files if _path_of(file) == _path_of(files[0])), None):
            yield (
                f"data.stream_rows={rows} is for a data set that is not downloaded, and data.val_files={again} would "
                "download it, because all of its splits are: use files for the validation"
            )
        if self.trainer.total_training_steps is None:
            yield (
                f"data.stream_rows={rows}: the rows of the data set are not counted before training, so that an epoch "
                "has no known number of steps: set trainer.total_training_steps instead of trainer.total_epochs"
            )
        if rows < batch:
            yield (
                f"data.stream_rows={rows} is smaller than data.train_batch_size={batch}, and a batch has rows of one "
                "window: raise data.stream_rows, better to thousands of batches"
            )

    def _sequence_problems(self) -> Iterator[str]:
        size, ranks = self.trainer.sequence_parallel, self.trainer.n_gpus_per_node
        if ranks % size:
            yield (
                f"trainer.sequence_parallel={size} does not divide the {ranks} ranks of a node "
                "(trainer.n_gpus_per_node): use a divisor of their number"
            )


def _path_of(name: str) -> str:
    """Return the name of a data set on the hub without its configuration."""
    return name.partition(":")[0]
