"""Random batches for hypothesis, and the way from lists to flat tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from hypothesis import strategies as st

Rows = list[list[float]]

"""The first call into torch takes longer than hypothesis allows one example."""

numbers = st.floats(-3, 3, width=32)
scores = st.sampled_from([0.0, 1.0, 0.1, -0.5, 0.7]) | numbers
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=7)


def rows(of: st.SearchStrategy[float], lengths: list[int]) -> st.SearchStrategy[Rows]:
    return st.tuples(*(st.lists(of, min_size=n, max_size=n) for n in lengths)).map(list)


@st.composite
def grouped(draw: st.DrawFn, smallest: int = 1) -> tuple[list[float], list[int]]:
    """Scores and groups: of different sizes, in any order, numbered in no order."""
    names = draw(st.lists(st.integers(-5, 10**12), min_size=1, max_size=4, unique=True))
    groups = [name for name in names for _ in range(draw(st.integers(smallest, 5)))]
    groups = draw(st.permutations(groups))
    return draw(st.lists(scores, min_size=len(groups), max_size=len(groups))), groups


def flat(rows: Rows) -> torch.Tensor:
    return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.float32)


def tokens(*parts: Rows) -> Iterator[tuple[float, ...]]:
    """What the parts have for each token, response after response."""
    return zip(*(chain.from_iterable(part) for part in parts), strict=True)


def lengths_of(rows: Rows) -> torch.Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int64)


def weighted_sum(values_N: torch.Tensor, weights_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of value times the weight of the token's response: a scalar; 0 of no tokens."""
    return (values_N * weights_B.repeat_interleave(lengths_B, output_size=len(values_N))).sum()
