"""The tokenized data set: each rank tokenizes a share, and every rank gets the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch

from hpc_rl.config.sft import DataConfig
from hpc_rl.data.sft_dataset import Counts, Sample, tokenize_files
from hpc_rl.errors import AgreedError
from hpc_rl.training.distributed import World


def load_samples(files: Sequence[str], data: DataConfig, tokenizer: object, split: str, world: World) -> list[Sample]:
    """Return all samples of some files, in their order. Rank 0 prints their counts.

    Raises:
        AgreedError: a file is not valid, or no sample has a target token.
    """
    share, counts = world.together(
        lambda: tokenize_files(list(files), data, tokenizer, split=split, rank=world.rank, world=world.size)  # type: ignore[arg-type]
    )
    samples = gather_samples(share, world)
    totals = world.gather_rows([float(value) for value in asdict(counts).values()]).sum(dim=0)
    counts = Counts(**{name: int(total) for name, total in zip(asdict(counts), totals, strict=True)})
    if not samples:
        raise AgreedError(
            f"{', '.join(files)}: no sample has a target token within data.max_length ({counts}): raise data.max_length"
        )
    if world.is_main:
        print(f"{'training' if split == 'train' else 'validation'} data: {counts}", flush=True)
    return samples


def gather_samples(share: Sequence[Sample | None], world: World) -> list[Sample]:
    """Combine the ranks' shares `rows[rank::world]` into one list, without the dropped rows (None)."""
    if world.size == 1:
        return [sample for sample in share if sample is not None]
    kept = [sample for sample in share if sample is not None]
    none = np.zeros(0, np.int32)
    lengths = np.array([0 if sample is None else len(sample.input_ids) for sample in share], np.int64)
    # One number per token: twice its id, plus 1 if it is a target.
    flat = np.concatenate([none, *(sample.input_ids * 2 + sample.loss_mask for sample in kept)], dtype=np.int32)
    all_lengths = [rows.numpy() for rows in world.gather_varied(torch.from_numpy(lengths))]
    all_tokens = [rows.numpy() for rows in world.gather_varied(torch.from_numpy(flat))]
    starts = [np.concatenate([[0], np.cumsum(rows)]) for rows in all_lengths]
    samples = []
    for row in range(sum(map(len, all_lengths))):
        rank, index = row % world.size, row // world.size
        tokens = all_tokens[rank][starts[rank][index] : starts[rank][index + 1]]
        if len(tokens):
            samples.append(Sample(input_ids=tokens >> 1, loss_mask=(tokens & 1).astype(bool)))
    return samples
