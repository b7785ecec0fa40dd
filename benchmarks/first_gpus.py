"""The first GPUs that this shell may use, for CUDA_VISIBLE_DEVICES: `python -m benchmarks.first_gpus 4`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.system.accelerators import find_accelerators, visible_devices


def first_gpus(count: int, environ: Mapping[str, str]) -> str:
    """Return the names of the first GPUs, separated by commas.

    Raises:
        UserError: there are fewer, or none is of type cuda.
    """
    device, found = find_accelerators(environ)
    if device != "cuda" or found < count:
        raise UserError(
            f"GPUS={count}: this shell may use {counted(found if device == 'cuda' else 0, 'GPU')} of type cuda "
            "(nvidia-smi -L, CUDA_VISIBLE_DEVICES): set GPUS to a lower number, or use a machine with more"
        )
    return ",".join((visible_devices(environ, device) or list(map(str, range(found))))[:count])


if __name__ == "__main__":
    try:
        print(first_gpus(int(sys.argv[1]), os.environ))
    except UserError as error:
        sys.exit(f"{error}")
