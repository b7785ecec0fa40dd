"""Options of the selection of responses as a job (`submit select`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hpc_rl.config.base import Section, SomeFiles
from hpc_rl.config.job import JobConfig

Method = Literal["best-of-n", "pairs", "all-pairs", "threshold"]


class SelectionConfig(Section):
    responses: SomeFiles
    """Files with scored responses: the responses.jsonl of `submit generate` or `submit eval`."""
    method: Method
    """What is selected. best-of-n: the best response to each prompt. pairs: the best and the worst response to each
    prompt. all-pairs: all pairs of responses to a prompt with different scores. threshold: all responses with a score
    of at least select.threshold."""
    threshold: float | None = None
    """Lowest score of a selected response, for method=threshold."""

    def problems(self) -> Iterator[str]:
        if (self.method == "threshold") != (self.threshold is not None):
            yield "select.threshold belongs to select.method=threshold: set both, or neither"


class SelectConfig(JobConfig):
    select: SelectionConfig

    def problems(self) -> Iterator[str]:
        trainer = self.trainer
        if trainer.nnodes * trainer.n_gpus_per_node > 1 or trainer.computes_on != "cpu":
            yield (
                f"the job has {trainer.nnodes} x {trainer.n_gpus_per_node} processes (trainer.device="
                f"{trainer.device}), but a selection is the work of one CPU: leave out --nodes, --gpus-per-node and "
                "trainer.device"
            )
