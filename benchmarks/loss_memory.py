"""Peak memory of the LM head's loss and its backward pass: `python -m benchmarks.loss_memory [--device cuda]`.

4,096 tokens, vocabulary 151,936, hidden size 896 (Qwen2.5-0.5B's). Each variant runs in a process of its own. On the
CPU the figure is the process's largest resident size minus its size before the loss, when hidden states and weight are
already in memory; on a GPU it is torch's count of allocated bytes, measured in the same way. It includes the gradients
of hidden states and weight, which both ways have to hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, log_softmax

from benchmarks.common import publish, table
from hpc_rl.training.models.lm_head import cross_entropy_sum, token_logprobs

TOKENS, VOCABULARY, HIDDEN = 4096, 151_936, 896
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain_loss(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return cross_entropy(hidden_NH @ weight_VH.t(), targets_N, reduction="sum")


def plain_logprobs(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return log_softmax(hidden_NH @ weight_VH.t(), dim=-1).gather(1, targets_N[:, None]).sum()


def chunked_logprobs(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden_NH, weight_VH, targets_N)[0].sum()


VARIANTS: dict[str, Loss] = {
    "loss, plain logits": plain_loss,
    "loss, hpc-rl": cross_entropy_sum,
    "log-probabilities, plain logits": plain_logprobs,
    "log-probabilities, hpc-rl": chunked_logprobs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.loss_memory: torch does not find a CUDA device")
    if arguments.variant:
        print(json.dumps(measure(VARIANTS[arguments.variant], torch.device(arguments.device))))
        return
    results = {name: in_own_process(name, arguments.device) for name in VARIANTS}
    rows = []
    for name, result in results.items():
        plain = results[f"{name.partition(',')[0]}, plain logits"]
        rows.append([name, f"{result['gib']:.2f}", f"{result['gib'] / plain['gib']:.0%}", f"{result['seconds']:.1f}"])
    publish("loss_memory", table(["", "peak GiB", "of plain", "seconds"], rows), results, ["torch"])


def in_own_process(name: str, device: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--device", device, "--variant", name]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def measure(loss: Loss, device: torch.device) -> dict[str, float]:
    """Return the peak memory in GiB beyond the inputs, and the wall time."""
    torch.manual_seed(0)
    hidden_NH = torch.randn(TOKENS, HIDDEN, device=device).requires_grad_()
    weight_VH = (torch.randn(VOCABULARY, HIDDEN, device=device) / HIDDEN**0.5).requires_grad_()
    targets_N = torch.randint(VOCABULARY, (TOKENS,), device=device)
    loss(hidden_NH[:2], weight_VH[:64], targets_N[:2] % 64).backward()  # libraries are loaded at first use
    hidden_NH.grad = weight_VH.grad = None
    before = memory_gib(device, reset=True)
    start = time.perf_counter()
    loss(hidden_NH, weight_VH, targets_N).backward()
    after = memory_gib(device)
    assert hidden_NH.grad is not None and weight_VH.grad is not None
    return {"gib": after - before, "seconds": time.perf_counter() - start}


def memory_gib(device: torch.device, reset: bool = False) -> float:
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


if __name__ == "__main__":
    main()
