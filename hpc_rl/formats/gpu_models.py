"""The models of GPUs: memory and speed, by the names that clusters and torch have for them. One table.

To add a model, add a row. The first row whose pattern matches counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SUPERCHIP = re.compile(r"g[bh]200")
"""Their names state the memory of the CPU."""
_STATED = re.compile(r"(?<!\d)(\d+)gb")
"""a100_80gb; of a100_3g.20gb, a part of an A100, the last one."""
_BARE = re.compile(r"[a-z]\d+[a-z]{0,8}(?:[-_][a-z]{1,16}\d{0,4}){0,4}[-_](\d{2,3})$")
"""h100-47, a part of an H100 with 47 GB, and a100-80. A single digit is a number of GPUs or slices."""
_MIG = re.compile(r"(?<!\d)\d+g\.\d+gb")
"""NVIDIA's names of MIG devices: slices, then memory."""
_PART = 0.75
"""A GPU with less than this share of its model's memory is a part of one."""


@dataclass(frozen=True)
class GpuModel:
    """One model of GPUs, as its vendor describes it."""

    slurm: str
    """Pattern of a word in the lower-case name that Slurm has for it, with _ for -."""
    torch: str
    """Pattern of the name that torch reports."""
    memory_gb: int | None
    """Memory in 10^9 bytes; None if there are several sizes."""
    tflops: float
    """Dense bfloat16 peak in 10^12 operations per second."""
    bandwidth: float
    """Bandwidth of the memory in 10^12 bytes per second; the smaller one if there are several."""


GPU_MODELS: tuple[GpuModel, ...] = (
    # https://www.nvidia.com/en-us/data-center/hgx/ (dense is half of the figure with sparsity, here and below)
    GpuModel("b200", r"B200", 180, 2250.0, 7.7),
    # https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/
    GpuModel("gh200", r"GH200", None, 989.0, 4.0),
    # https://www.nvidia.com/en-us/data-center/h200/
    GpuModel("h200", r"H200", 141, 989.0, 4.8),
    # https://www.nvidia.com/en-us/data-center/h100/
    GpuModel("h100_nvl", r"H100 NVL", 94, 835.0, 3.9),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/gtcs22/data-center/h100/PB-11133-001_v01.pdf
    GpuModel("h100_pcie", r"H100 PCIe", 80, 756.0, 2.0),
    GpuModel("h100", r"H100 80GB HBM3|H100 SXM", 80, 989.0, 3.35),
    # https://www.nvidia.com/en-us/data-center/a100/
    GpuModel("a100", r"A100", None, 312.0, 1.555),
    # https://www.nvidia.com/en-us/data-center/l40s/ and l40/
    GpuModel("l40s", r"L40S", 48, 362.0, 0.864),
    GpuModel("l40", r"L40\b", 48, 181.0, 0.864),
    # https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf
    GpuModel("a40", r"A40\b", 48, 149.7, 0.696),
    # https://www.nvidia.com/en-us/data-center/products/a10-gpu/ and a30-gpu/
    GpuModel("a10g?", r"A10G?\b", 24, 125.0, 0.6),
    GpuModel("a30", r"A30\b", 24, 165.0, 0.933),
    # https://www.nvidia.com/en-us/data-center/l4/
    GpuModel("l4", r"\bL4\b", 24, 121.0, 0.3),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    GpuModel("rtx_?3090", r"RTX 3090", 24, 71.0, 0.936),
    GpuModel("rtx_?4090", r"RTX 4090", 24, 165.2, 1.008),
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    GpuModel("mi300x", r"MI300X", 192, 1307.4, 5.3),
    # https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html (one of two dies)
    GpuModel("mi250x?", r"MI250X", 64, 191.5, 1.6),
)


def requested(name: str) -> GpuModel | None:
    """Return the model that Slurm's name of a GPU has as a word; None if the name leaves it open."""
    word = r"(?<![a-z0-9])(?:{})(?![a-z0-9])"
    plain = name.lower().replace("-", "_")
    return next((model for model in GPU_MODELS if re.search(word.format(model.slurm), plain)), None)


def stated_gb(name: str) -> float | None:
    """Return the memory that Slurm's name of a GPU states, in 10^9 bytes; None if it states none."""
    stated = [] if _SUPERCHIP.search(name.lower()) else _STATED.findall(name.lower()) or _BARE.findall(name.lower())
    return float(stated[-1]) if stated else None


def is_part(name: str) -> bool:
    """Return whether Slurm's name of a GPU is that of a part of one, such as a MIG device."""
    model, stated = requested(name), stated_gb(name)
    whole = model.memory_gb if model else None
    return bool(_MIG.search(name)) or (whole is not None and stated is not None and stated < _PART * whole)


def named_gb(name: str) -> float | None:
    """Return the memory of a GPU, in 10^9 bytes, by its name in Slurm; None if the name leaves it open."""
    model = requested(name)
    return stated_gb(name) or (model.memory_gb if model else None)


def reported(name: str) -> GpuModel | None:
    """Return the model of a device by the name that torch reports; None if it is not in the table."""
    return next((model for model in GPU_MODELS if re.search(model.torch, name)), None)
