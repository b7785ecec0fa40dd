"""Environment variables of libraries that run in every training process. A variable that the user exported wins.

Each policy has one function here, so that torchrun jobs, Ray jobs and local runs agree.
"""

from __future__ import annotations


def nccl_defaults(interface: str | None = None) -> dict[str, str]:
    """Return NCCL's variables (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).

    Args:
        interface: network interface between the nodes; None if it is not known, or if there is one node.
    """
    defaults = {
        "NCCL_CUMEM_ENABLE": "0",  # saves memory if vLLM and a trainer share a GPU; verl and OpenRLHF set it too
        "NCCL_DEBUG": "WARN",
    }
    if interface not in (None, "lo"):  # NCCL rejects the loopback interface
        defaults["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without the sign, NCCL takes it as a prefix
    return defaults


def openmp_defaults(threads: int) -> dict[str, str]:
    """Return OpenMP's variables for a process that may use `threads` CPUs."""
    return {"OMP_NUM_THREADS": str(max(1, threads))}


def tokenizer_defaults() -> dict[str, str]:
    """Let fast tokenizers use threads without a warning after a fork."""
    return {"TOKENIZERS_PARALLELISM": "true"}
