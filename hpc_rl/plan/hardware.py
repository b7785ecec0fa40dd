"""The memory of a cluster's GPUs, from the site profile or from the name that Slurm has for them."""

from __future__ import annotations

import re

from hpc_rl.config.slurm import SlurmConfig

USABLE = 0.95
"""Assumed: the part of a GPU's memory that tensors can use. CUDA's own memory and gaps between tensors take the
rest."""
TIGHT = 0.9
"""A job that needs more than this part of the usable memory may fail on longer samples or with another version of
torch."""

MEMORY_GB: dict[str, int] = {
    r"b200": 180,  # https://www.nvidia.com/en-us/data-center/dgx-b200/
    r"h200": 141,  # https://www.nvidia.com/en-us/data-center/h200/
    r"h100_nvl": 94,  # https://www.nvidia.com/en-us/data-center/h100/
    r"h100": 80,  # the same page
    r"l40s?": 48,  # https://www.nvidia.com/en-us/data-center/l40s/
    r"a40": 48,  # https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf
    r"a10g?|a30|l4|rtx_?[34]090": 24,  # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    r"mi300x": 192,  # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    r"mi250x?": 64,  # https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html (one of two dies)
}
"""Pattern of a word in Slurm's name of a GPU -> its memory, in 10^9 bytes, if the name leaves no doubt. An A100 has 40
or 80."""
_SUPERCHIP = re.compile(r"g[bh]200")
"""Their names state the memory of the CPU."""
_STATED = re.compile(r"(\d+)gb")
"""a100_80gb; of a100_3g.20gb, a part of an A100, the last one."""


def gpu_bytes(slurm: SlurmConfig) -> float | None:
    """Return the memory of one GPU of a job, in bytes; None if it is unknown.

    A size in the name of the requested GPUs comes first, because a profile may describe others. A model comes last.
    """
    name = (slurm.gpu_type or "").lower().replace("-", "_")
    stated = [] if _SUPERCHIP.search(name) else _STATED.findall(name)
    gigabytes = float(stated[-1]) if stated else slurm.node.gpu_gb or _model_gb(name)
    return None if gigabytes is None else gigabytes * 1e9


def _model_gb(name: str) -> float | None:
    word = r"(?<![a-z0-9])(?:{})(?![a-z0-9])"
    return next((float(size) for kind, size in MEMORY_GB.items() if re.search(word.format(kind), name)), None)
