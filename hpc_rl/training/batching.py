"""The division of a global batch into equal work for every rank: pure functions on lengths.

A plan is `plan[rank][micro_batch] = [sample, ...]`, where a sample is an index into the list of lengths. All ranks get
the same number of micro-batches, because each one is a round of FSDP collectives that every rank must join.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hpc_rl.errors import UserError

Bin = list[int]


def plan_batch(lengths: Sequence[int], ranks: int, micro_tokens: int, packing: bool = True) -> list[list[Bin]]:
    """Assign the samples of one global batch to ranks and micro-batches.

    With packing, a micro-batch holds as many samples as fit, and all micro-batches are about equally full. Without
    packing, it holds one sample. The loads of two ranks differ by at most the longest sample's tokens. A micro-batch is
    empty only if there are fewer samples than ranks times micro-batches. The plan depends on the arguments only, so
    every rank computes the same one.

    Args:
        lengths: tokens of each sample, at least 1.
        micro_tokens: largest number of tokens in one micro-batch.

    Raises:
        UserError: a single sample is longer than micro_tokens.
    """
    longest = max(lengths, default=0)
    if packing and longest > micro_tokens:
        raise UserError(
            f"a sample of {longest} tokens is over trainer.micro_tokens {micro_tokens}: raise trainer.micro_tokens"
        )
    bins = pack(lengths, ranks, micro_tokens) if packing else [[sample] for sample in range(len(lengths))]
    return assign_bins(bins, lengths, ranks)


def pack(lengths: Sequence[int], multiple: int, budget: int) -> list[Bin]:
    """Fill the fewest bins of at most `budget` tokens; the number of bins is a multiple of `multiple`.

    The samples go, longest first, each into the emptiest bin (Graham 1969, "Bounds on multiprocessing timing
    anomalies"), so that the fullest bin exceeds the emptiest by at most the longest sample.
    """
    order = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
    count = max(1, -(-sum(lengths) // (budget * multiple))) * multiple
    while True:
        bins: list[Bin] = [[] for _ in range(count)]
        heap = [(0, number) for number in range(count)]
        for sample in order:
            load, number = heap[0]
            if load + lengths[sample] > budget:
                break
            bins[number].append(sample)
            heapq.heapreplace(heap, (load + lengths[sample], number))
        else:
            return [sorted(samples) for samples in bins]
        count += multiple


def assign_bins(bins: Sequence[Bin], lengths: Sequence[int], ranks: int) -> list[list[Bin]]:
    """Assign bins to ranks, fullest first, in rounds that alternate direction; empty bins complete the last round.

    Since a round takes bins that are next to each other in size, the n-th micro-batches of all ranks are about equally
    full, and no rank waits long for another.
    """
    loads = [sum(lengths[sample] for sample in samples) for samples in bins]
    order = sorted(range(len(bins)), key=lambda number: (-loads[number], bins[number]))
    plan: list[list[Bin]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        around = [list(bins[number]) for number in order[start : start + ranks]]
        around += [[] for _ in range(ranks - len(around))]
        if (start // ranks) % 2:
            around.reverse()
        for rank, samples in enumerate(around):
            plan[rank].append(samples)
    return plan
