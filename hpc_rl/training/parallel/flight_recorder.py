"""torch's flight recorder: what each rank's latest collectives were, in a file of the attempt if the job hangs.

For NCCL, torch writes the file itself when a collective times out (TORCH_NCCL_DUMP_ON_TIMEOUT). For gloo, torch only
keeps the record, and fine-tuning calls `write`. Both are written when the node entry asks a rank for its stacks, also
while its main thread waits for a GPU: torch releases Python's lock there. Each library has a record of its own, so that
a rank on a GPU leaves two files. `hpc-rl explain` and the node entry read them: hpc_rl/liveness/flight_records.py.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_rl.liveness import stacks
from hpc_rl.liveness.flight_records import OF_GLOO
from hpc_rl.system.files import replacing

_FILE = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path of the file, to which torch appends the rank."""
_OF_A_COLLECTIVE = re.compile(
    r"^(?>.*?gloo).*(Timed out|timeout|Connection closed by peer|Connection reset)", re.IGNORECASE | re.MULTILINE
)


def prepare(attempt: Path | None, pool: str | None = None) -> None:
    """Choose where the record of this process goes. Call this before the process group starts.

    Args:
        attempt: the attempt's folder; None for torch's own choice.
        pool: name of the pool, whose ranks count from 0.
    """
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if attempt is not None:
        os.environ.setdefault(_FILE, str(attempt / f"flight-{f'{pool}-' if pool else ''}rank"))
    stacks.on_request(functools.partial(dump, places=False))
    stacks.on_request(dump, is_slow=True)


def write(error: Exception) -> None:
    """Write the record of this rank after an error of a collective in gloo."""
    if _OF_A_COLLECTIVE.search(str(error)):
        dump()


def dump(places: bool = True) -> None:
    """Write the records of this rank, if it is in a process group.

    Args:
        places: whether they contain the places in the program where collectives were called. For the first ones, torch
            reads the symbols of its libraries: 4.6 s of one core, for which the report of a hang does not wait.
    """
    prefix = os.environ.get(_FILE)
    if prefix is None or not dist.is_initialized():
        return
    for name, suffix in _records():
        if record := getattr(torch._C._distributed_c10d, name, None):  # older versions of torch have it for NCCL only
            with replacing(Path(f"{prefix}{dist.get_rank()}{suffix}")) as partial, partial.open("xb") as file:
                file.write(record(includeStackTraces=places))


def _records() -> Iterator[tuple[str, str]]:
    """Yield torch's function and the end of the file's name for the record of each library."""
    of_nccl = dist.is_nccl_available() and "nccl" in str(dist.get_backend_config())
    if of_nccl:
        yield "_dump_nccl_trace", ""
    yield "_dump_fr_trace", OF_GLOO if of_nccl else ""
