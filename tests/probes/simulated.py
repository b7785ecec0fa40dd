"""Training checks on simulated GPUs. Only what computes is run: a simulation has no numbers to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune import trainer
from hpc_rl.finetune.training_data import Epochs
from hpc_rl.probes import all_reduce
from hpc_rl.probes.acceptance import attention, network, training
from hpc_rl.probes.acceptance.bench import Bench, Layout
from hpc_rl.probes.acceptance.session import attempt
from hpc_rl.probes.tiny_model import make_tokenizer
from hpc_rl.run_dir import RunDir
from hpc_rl.training.parallel.distributed import World
from tests.simulated_gpu.gpu import simulated_gpus
from tests.simulated_gpu.models import untrained

RANKS = 8
HIDDEN = 64


@dataclass(frozen=True)
class Steps:
    """What the first steps of a run gave."""

    losses: int
    gradients: dict[str, tuple[tuple[int, ...], str, str]]
    """Name -> shape, type and device."""
    calls: dict[str, int]
    """Number of each collective's calls."""


def first_steps(folder: Path, changes: Mapping[str, Any]) -> Steps:
    """Take the steps with which a check compares, on rank 0 of 8 GPUs."""
    bench = _bench(folder)
    with simulated_gpus(RANKS) as gpu, _without_files():
        found = training.measure(bench.sft(changes), RunDir(folder / "run"), _world())
        shapes = {name: (tuple(one.shape), str(one.dtype), one.device.type) for name, one in found.gradients.items()}
        return Steps(len(found.losses), shapes, dict(gpu.calls))


def speed(folder: Path) -> str:
    """Measure the speed of a training step."""
    bench = _bench(folder)
    with simulated_gpus(RANKS), _without_files():
        return training.speed(bench, _world(), "")


def kernels(folder: Path) -> tuple[str, str]:
    """Run the attention kernels forward and backward; the comparison sees a one in place of each number."""
    with simulated_gpus(RANKS):
        return attempt(lambda: attention.kernels(_bench(folder), _world(), ""))


def bandwidth(folder: Path, where: str) -> tuple[str, dict[str, int]]:
    """Run the all-reduces of groups of ranks."""
    with simulated_gpus(RANKS) as gpu, mock.patch.object(all_reduce, "check_sum", lambda *_: None):
        found = network.bandwidth(Bench(Layout("cuda", 2, 4, frozenset()), folder, folder), _world(), where)
        return found, dict(gpu.calls)


def _bench(folder: Path) -> Bench:
    tokenizer = make_tokenizer(320)
    for size in ("small", "large"):
        tokenizer.save_pretrained(folder / size)
    return Bench(Layout("cuda", 1, RANKS, frozenset()), folder, folder)


def _world() -> World:
    return World(0, RANKS, torch.device("cuda", 0), ranks_per_node=RANKS)


@contextlib.contextmanager
def _without_files() -> Iterator[None]:
    """Let loads of models return untrained ones, let data be made up, and let all ranks agree with this one."""
    from transformers import Qwen3Config

    shape = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    mask = np.arange(40) >= 20
    samples = [Sample(input_ids=np.zeros(40, np.int32), loss_mask=mask) for _ in range(64 * RANKS)]
    with (
        untrained(Qwen3Config(**shape, **heads)),
        mock.patch.object(trainer, "load_training", lambda objective, *_: Epochs(samples, objective.config)),
        mock.patch.object(trainer, "agree", lambda *_, left: False),  # a simulated answer of rank 0 is a one: stop
    ):
        yield
