"""How fast a step was."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hpc_rl.data.sft_dataset import Sample
from hpc_rl.engine.distributed import World
from hpc_rl.engine.model import Flops

PEAK_TFLOPS = {
    r"B200": 2250.0,  # https://www.nvidia.com/en-us/data-center/hgx/ (dense is half of the figure with sparsity)
    r"H200|GH200|H100 80GB HBM3|H100 SXM": 989.0,  # https://www.nvidia.com/en-us/data-center/h200/
    r"H100 NVL": 835.0,  # https://www.nvidia.com/en-us/data-center/h100/
    r"H100 PCIe": 756.0,  # https://www.nvidia.com/content/dam/en-zz/Solutions/gtcs22/data-center/h100/PB-11133-001_v01.pdf
    r"A100": 312.0,  # https://www.nvidia.com/en-us/data-center/a100/
    r"A40\b": 149.7,  # https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf
    r"L40S": 362.0,  # https://www.nvidia.com/en-us/data-center/l40s/
    r"\bL4\b": 121.0,  # https://www.nvidia.com/en-us/data-center/l4/
    r"MI300X": 1307.4,  # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    r"MI250X": 383.0,  # https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html
}
"""Dense bfloat16 peak of devices by a pattern of their name, 10^12 operations per second."""


class Clock:
    """Wall time of the phases of a step: `with clock("data"): ...` fills seconds["timing_s/data"]."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[f"timing_s/{phase}"] = time.perf_counter() - start


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


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations per second of a device; None where unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for pattern, peak in PEAK_TFLOPS.items() if re.search(pattern, name)), None)


def max_memory_gb(device: torch.device) -> float:
    """Most memory that this rank has held so far, in 10^9 bytes: of the GPU's, or of the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
