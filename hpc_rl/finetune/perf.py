"""How fast a step was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_rl.data.sft_dataset import Sample
from hpc_rl.training.distributed import World
from hpc_rl.training.model import Flops
from hpc_rl.training.perf import Clock, max_memory_gb, peak_flops


@dataclass(frozen=True)
class Work:
    """What a global batch holds."""

    lengths: list[int]
    """Tokens of each sample."""
    targets: int
    """Target tokens of all samples."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Work:
        lengths = [len(sample.input_ids) for sample in samples]
        return cls(lengths, sum(int(sample.loss_mask.sum()) for sample in samples))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def perf_metrics(work: Work, clock: Clock, flops: Flops, world: World) -> dict[str, float]:
    """Speed of a step, all ranks together unless said otherwise; saving and validation left out.

    perf/mfu is there only for devices in PEAK_TFLOPS.
    """
    seconds = sum(clock.seconds.values())
    metrics = {
        "perf/time_per_step": seconds,
        "perf/tokens_per_s": work.tokens / seconds,
        "perf/throughput": work.tokens / seconds / world.size,
        "perf/max_memory_gb": max_memory_gb(world.device),
    }
    peak = peak_flops(world.device)
    if peak:
        metrics["perf/mfu"] = flops.of(work.lengths, work.targets) / seconds / world.size / peak
    return metrics
