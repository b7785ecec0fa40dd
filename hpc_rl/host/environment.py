"""Environment of training processes, and the tokens of Ray clusters. Standard library only."""

from __future__ import annotations

import secrets
from pathlib import Path

TOKEN_BYTES = 32


def threads_per_process(cpus: int, processes: int) -> int:
    """Return the OpenMP threads of each process: the node's CPUs in equal parts, at least 1."""
    return max(1, cpus // processes)


def process_defaults(*, interface: str | None = None, threads: int | None = None) -> dict[str, str]:
    """Return the variables of every training process. A variable that the user exported takes precedence.

    Args:
        interface: network interface between the nodes. If it is None, NCCL and Gloo choose one.
        threads: OpenMP threads of each process. If it is None, OMP_NUM_THREADS is left as it is.
    """
    defaults = {
        "NCCL_CUMEM_ENABLE": "0",  # saves memory if vLLM and a trainer share a GPU; verl and OpenRLHF set it too
        "NCCL_DEBUG": "WARN",
        "TOKENIZERS_PARALLELISM": "true",
    }
    if threads is not None:
        defaults["OMP_NUM_THREADS"] = str(threads)
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    if interface not in (None, "lo"):  # NCCL does not accept the loopback, and a job on one node does not need it
        defaults["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without the equals sign it is a prefix
    return defaults


def ray_process_defaults(*, interface: str | None = None, threads: int | None = None) -> dict[str, str]:
    """Return the variables of every process of a job on Ray: those above, and vLLM's log level."""
    return {**process_defaults(interface=interface, threads=threads), "VLLM_LOGGING_LEVEL": "WARN"}


def write_token(path: Path) -> bytes:
    """Write a new random token to a file that only this user can read, and return it."""
    token = secrets.token_hex(TOKEN_BYTES).encode()
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(token)
    return token
