"""From a global batch to equal work for every rank: pure functions on lengths.

A plan is `plan[rank][micro_batch] = [sample, ...]`, samples being positions in the list of lengths. All ranks get the
same number of micro-batches, because each one is a round of FSDP collectives that every rank must join.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hpc_rl.errors import UserError

Bin = list[int]
Plan = list[list[Bin]]


def plan_batch(lengths: Sequence[int], ranks: int, micro_tokens: int, packing: bool = True) -> Plan:
    """Deal the samples of one global batch to ranks and micro-batches.

    With packing, a micro-batch holds as many samples as fit, and all micro-batches are about equally full. Without, it
    holds one sample. Two ranks differ by at most the longest sample's tokens. Micro-batches stay empty only where there
    are fewer samples than ranks times micro-batches. The same lengths give the same plan, everywhere.

    Args:
        lengths: tokens of each sample, at least 1.
        micro_tokens: most tokens of one micro-batch.

    Raises:
        UserError: a sample alone is over micro_tokens.
    """
    longest = max(lengths, default=0)
    if packing and longest > micro_tokens:
        raise UserError(f"a sample of {longest} tokens is over trainer.micro_tokens {micro_tokens}: raise it")
    bins = pack(lengths, ranks, micro_tokens) if packing else [[sample] for sample in range(len(lengths))]
    return deal(bins, lengths, ranks)


def pack(lengths: Sequence[int], multiple: int, budget: int) -> list[Bin]:
    """Fill the fewest bins of at most `budget` tokens, their number being a multiple of `multiple`.

    Longest sample first, each into the emptiest bin (Graham 1969, "Bounds on multiprocessing timing anomalies"): the
    fullest bin then exceeds the emptiest by at most the longest sample.
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


def deal(bins: Sequence[Bin], lengths: Sequence[int], ranks: int) -> Plan:
    """Hand out bins, fullest first, in rounds that alternate direction; the last round is filled up with empty bins.

    The n-th micro-batches of all ranks are then about equally full too, so no rank waits long for another.
    """
    loads = [sum(lengths[sample] for sample in samples) for samples in bins]
    order = sorted(range(len(bins)), key=lambda number: (-loads[number], bins[number]))
    plan: Plan = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        around = [list(bins[number]) for number in order[start : start + ranks]]
        around += [[] for _ in range(ranks - len(around))]
        if (start // ranks) % 2:
            around.reverse()
        for rank, samples in enumerate(around):
            plan[rank].append(samples)
    return plan
