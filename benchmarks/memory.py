"""Peak memory of a loss and its backward pass, each variant in a process of its own.

On the CPU the figure is the process's largest resident size minus its size before the loss, when the inputs are already
in memory; on a GPU it is torch's count of allocated bytes, measured in the same way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.common import publish, table

TOKENS, VOCABULARY, HIDDEN = 4096, 151_936, 896
Loss = TypeVar("Loss")


def compare(
    name: str,
    about: str | None,
    variants: Mapping[str, Loss],
    measure: Callable[[Loss, int, torch.device], dict[str, float]],
    plain: Callable[[str], str],
    base: str,
) -> None:
    """Measure every variant, print the table and write the results; or measure the one that `--variant` names.

    Args:
        name: of the benchmark's module.
        measure: returns the peak memory in GiB and the seconds of one variant for a number of tokens.
        plain: name of a variant -> the variant that it is compared with.
        base: heading of the column with the comparison.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="(default: %(default)s)")
    parser.add_argument("--variant", choices=list(variants), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"benchmarks.{name}: torch does not find a CUDA device")
    if arguments.variant:
        print(json.dumps(measure(variants[arguments.variant], arguments.tokens, torch.device(arguments.device))))
        return
    options = ["--device", arguments.device, "--tokens", str(arguments.tokens)]
    results = {variant: _in_own_process(name, variant, options) for variant in variants}
    rows = []
    for variant, found in results.items():
        ratio = found["gib"] / results[plain(variant)]["gib"]
        rows.append([variant, f"{found['gib']:.2f}", f"{ratio:.0%}", f"{found['seconds']:.1f}"])
    publish(name, table(["", "peak GiB", base, "seconds"], rows), results, ["torch"])


def peak(loss: Callable[[], torch.Tensor], device: torch.device) -> dict[str, float]:
    """Return the peak memory in GiB of a loss and its backward pass beyond what is in use, and the wall time."""
    before = _memory_gib(device, reset=True)
    start = time.perf_counter()
    loss().backward()
    after = _memory_gib(device)
    return {"gib": after - before, "seconds": time.perf_counter() - start}


def _in_own_process(name: str, variant: str, options: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--variant", variant]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def _memory_gib(device: torch.device, reset: bool = False) -> float:
    """Return the largest size so far; with reset, start counting again from the present size."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**30
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20
