"""The tokenized data set: each rank tokenizes a share, and every rank gets the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpc_rl.data.pairs import Preference
from hpc_rl.data.sft_dataset import Counts, Sample
from hpc_rl.errors import AgreedError
from hpc_rl.training.distributed import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.finetune.base import Objective


def load_items(
    objective: Objective, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, split: str, world: World
) -> list[Any]:
    """Return all items of some files, in their order. Rank 0 prints their counts.

    Raises:
        AgreedError: a file is not valid, or nothing has a target token.
    """
    share, counts = world.together(lambda: objective.tokenize(files, tokenizer, split, world.rank, world.size))
    items = objective.gather(share, world)
    totals = world.gather_rows([float(value) for value in asdict(counts).values()]).sum(dim=0)
    counts = Counts(**{name: int(total) for name, total in zip(asdict(counts), totals, strict=True)})
    if not items:
        raise AgreedError(
            f"{', '.join(files)}: no row has a target token within data.max_length ({counts}): raise data.max_length"
        )
    if world.is_main:
        print(f"{'training' if split == 'train' else 'validation'} data: {counts}", flush=True)
    return items


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


def gather_preferences(
    share: Sequence[Preference | None], world: World, width: int, values: int = 1
) -> list[Preference]:
    """Combine the ranks' shares into one list, without the dropped rows (None).

    Args:
        width: samples of each preference.
        values: margins or labels of each preference.
    """
    columns = [gather_samples([row and row.samples[place] for row in share], world) for place in range(width)]
    none = (math.nan,) * values
    own = torch.tensor([none if row is None else row.values for row in share], dtype=torch.float64)
    by_rank = [flat.view(-1, values) for flat in world.gather_varied(own.flatten())]
    rows = [by_rank[row % world.size][row // world.size] for row in range(sum(map(len, by_rank)))]
    kept = [tuple(row.tolist()) for row in rows if not row[0].isnan()]
    return [Preference(tuple(samples), found) for *samples, found in zip(*columns, kept, strict=True)]
