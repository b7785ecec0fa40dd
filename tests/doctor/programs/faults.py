"""A torchrun program that fails in the way that its argument names. Rank 1 fails, and rank 0 waits for it."""

import os
import resource
import socket
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

MINUTE = timedelta(seconds=60)


def module() -> None:
    import flash_attn  # noqa: F401


def shapes() -> None:
    torch.nn.Linear(32, 8)(torch.ones(4, 16))


def dtypes() -> None:
    torch.nn.Linear(32, 8, dtype=torch.bfloat16)(torch.ones(4, 32))


def raises() -> None:
    raise ValueError("the teacher's answer has no final number")


def port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        dist.TCPStore("127.0.0.1", first.getsockname()[1], is_master=True)


def files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with ExitStack() as opened:
        for _ in range(100):
            opened.enter_context(Path("/dev/null").open())


def hangs() -> None:
    time.sleep(20)


def killed() -> None:
    os.kill(os.getpid(), 9)


def segfault() -> None:
    import ctypes

    ctypes.string_at(0)


def cuda() -> None:
    torch.ones(1, device="cuda")


def disk() -> None:
    with Path("/dev/full").open("w") as full:
        full.write("x" * 100_000)


def permission() -> None:
    with Path("/sys/kernel/notes").open("w") as file:
        file.write("x")


def main(fault: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=5) if fault == "hangs" else MINUTE)
    for step in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"step {step}", flush=True)
    if dist.get_rank() == 1:
        globals()[fault]()
    dist.all_reduce(torch.ones(1))


main(sys.argv[1])
