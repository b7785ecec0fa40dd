"""torch's flight recorder: what each rank's latest collectives were, in a file of the attempt if the job hangs.

For NCCL, torch writes the file itself when a collective times out (TORCH_NCCL_DUMP_ON_TIMEOUT). For gloo, torch only
keeps the record, and fine-tuning calls `write`. Both are written when the node entry asks a rank for its stacks.
`hpc-rl explain` reads the files: hpc_rl/doctor/flight_recorder.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_rl.host import stacks

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
    stacks.on_request(dump)


def write(error: Exception) -> None:
    """Write the record of this rank after an error of a collective in gloo."""
    if _OF_A_COLLECTIVE.search(str(error)):
        dump()


def dump() -> None:
    """Write the record of this rank, if it is in a process group."""
    prefix = os.environ.get(_FILE)
    if prefix is None or not dist.is_initialized():
        return
    of_nccl = dist.is_nccl_available() and "nccl" in str(dist.get_backend_config())
    # Older versions of torch have it for NCCL only.
    record = getattr(torch._C._distributed_c10d, "_dump_nccl_trace" if of_nccl else "_dump_fr_trace", None)
    if record is not None:
        Path(f"{prefix}{dist.get_rank()}").write_bytes(record())
