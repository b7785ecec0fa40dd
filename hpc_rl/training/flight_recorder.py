"""torch's flight recorder: what each rank's latest collectives were, in a file of the attempt if one times out.

For NCCL, torch writes the file itself (TORCH_NCCL_DUMP_ON_TIMEOUT). For gloo, torch only keeps the record, and
fine-tuning calls `write`. `hpc-rl explain` reads the files: hpc_rl/doctor/flight_recorder.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

_FILE = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path of the file, to which torch appends the rank."""
_OF_A_COLLECTIVE = re.compile(r"gloo.*(Timed out|timeout|Connection closed by peer|Connection reset)", re.IGNORECASE)


def prepare(attempt: Path | None, pool: str | None = None) -> None:
    """Choose where the record of this process goes. Call this before the process group starts.

    Args:
        attempt: the attempt's folder; None for torch's own choice.
        pool: name of the pool, whose ranks count from 0.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if attempt is not None:
        os.environ.setdefault(_FILE, str(attempt / f"flight-{f'{pool}-' if pool else ''}rank"))


def write(error: Exception) -> None:
    """Write the record of this rank after an error of a collective in gloo."""
    prefix = os.environ.get(_FILE)
    if prefix is None or not dist.is_initialized() or not _OF_A_COLLECTIVE.search(str(error)):
        return
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is not None:  # older versions of torch have it for NCCL only
        Path(f"{prefix}{dist.get_rank()}").write_bytes(dump())
