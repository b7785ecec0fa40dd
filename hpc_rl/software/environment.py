"""Environment variables of libraries that run in every training process. A variable that the user exported wins.

Each policy has one function here, so that torchrun jobs, Ray jobs and local runs agree. Those of the collective
libraries are in `hpc_rl.system.accelerators`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpc_rl.errors import UserError

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch reads the first of these that is set."""


def openmp_defaults(threads: int) -> dict[str, str]:
    """Return OpenMP's variables for a process that may use `threads` CPUs."""
    return {"OMP_NUM_THREADS": str(max(1, threads))}


def tokenizer_defaults() -> dict[str, str]:
    """Let fast tokenizers use threads without a warning after a fork."""
    return {"TOKENIZERS_PARALLELISM": "true"}


def refuse_expandable_segments(environ: Mapping[str, str]) -> None:
    """Check the options of torch's allocator, if engines take weights out of the trainer's GPU memory (CUDA IPC).

    Raises:
        UserError: they enable expandable segments. To share such memory, a process takes file descriptors of another
            one (pidfd_getfd(2)), which many nodes and containers forbid: https://github.com/pytorch/pytorch/issues/165685
            vLLM's sleep mode alone is no obstacle: vLLM switches them off for its pool (device_allocator/cumem.py).
    """
    name = next((name for name in _ALLOCATOR if environ.get(name)), None)
    options = [option.strip().lower() for option in environ[name].split(",")] if name else []
    if "expandable_segments:true" in options:
        raise UserError(
            f"{name}={environ[str(name)]}: rollout engines on the policy's GPUs read its weights by CUDA IPC, which "
            "many nodes forbid for expandable segments: remove expandable_segments:True, or give the engines GPUs of "
            "their own (pools)"
        )
