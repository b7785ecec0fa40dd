"""Environment variables of libraries that run in every training process. A variable that the user exported wins.

Each policy has one function here, so that torchrun jobs, Ray jobs and local runs agree. Those of the collective
libraries are in `hpc_rl.host.accelerators`.
"""

from __future__ import annotations


def openmp_defaults(threads: int) -> dict[str, str]:
    """Return OpenMP's variables for a process that may use `threads` CPUs."""
    return {"OMP_NUM_THREADS": str(max(1, threads))}


def tokenizer_defaults() -> dict[str, str]:
    """Let fast tokenizers use threads without a warning after a fork."""
    return {"TOKENIZERS_PARALLELISM": "true"}
