"""Ranks that compute rows together get the results, losses and gradients of one rank."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.errors import AgreedError
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sequence_parallel import ALONE, SequenceGroup, join, repetitions
from hpc_rl.training.parallel.sharding import reduces_unused
from tests.finetune.jobs import spawn
from tests.helpers import make_tiny_model
from tests.marks import IS_TRANSFORMERS_4
from tests.training import sequence_ranks
from tests.training.models.test_families import make

LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 6, "logit_scale": 0.3},
    "deepseek_v3": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3n_text": {},
    "gemma4_text": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm4": {},
    "longcat_flash": {},
}
"""Other head sizes of values than of keys, layers with the keys of others, rotary embeddings of a part of each head."""
TWO_RANKS: dict[str, dict[str, Any]] = {
    "sft": {"role": "sft"},
    "sft, gradients": {"role": "sft", "sharding": "gradients"},
    "sft, one key head": {"role": "sft", "kind": "one key head"},
    "dpo": {"role": "dpo"},
    "dpo, none": {"role": "dpo", "sharding": "none", "kind": "windows"},
    "rm": {"role": "rm"},
    "actor, recomputed": {"role": "actor", "recompute": True},
    "actor, adapters": {"role": "actor", "lora": True},
    "actor, adapters, recomputed": {"role": "actor", "lora": True, "recompute": True},
    "critic": {"role": "critic"},
    "sft, experts": {"role": "sft", "kind": "experts", "recompute": True},
    "sft, experts, rows of each rank": {"role": "sft", "kind": "experts", "size": 1},
    "actor, sinks": {"role": "actor", "kind": "sinks"},
    "sft, longrope": {"role": "sft", "kind": "longrope"},
    "critic, longrope, recomputed": {"role": "critic", "kind": "longrope", "recompute": True},
    "dpo, dynamic": {"role": "dpo", "kind": "dynamic"},
    **{f"sft, {kind}": {"role": "sft", "kind": kind, "recompute": True} for kind in FAMILIES},
}
if not reduces_unused() and IS_TRANSFORMERS_4:
    TWO_RANKS = {name: case for name, case in TWO_RANKS.items() if case.get("kind") != "experts"}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "sft, two groups": {"role": "sft", "size": 2},
    "sft, two nodes": {"role": "sft", "size": 2, "sharding": "hybrid", "recompute": True},
    "critic, two nodes": {"role": "critic", "size": 2, "sharding": "hybrid"},
}


class Unconnected(SequenceGroup):
    """A rank whose group has no other ranks to add up with."""

    def total(self, own: torch.Tensor) -> torch.Tensor:
        return own


@st.composite
def packed_rows(draw: st.DrawFn) -> PackedBatch:
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=5))
    if not masks:
        return filler()
    ids = [np.arange(len(mask), dtype=np.int32) + 100 * number for number, mask in enumerate(masks)]
    return pack_samples(ids, [np.array([False, *mask[1:]]) for mask in masks])


@given(packed_rows(), st.integers(1, 8))
def test_slices_make_up_the_row(row: PackedBatch, size: int) -> None:
    slices = [Unconnected(tuple(range(size)), index).own(row) for index in range(size)]
    tokens, each = len(row.input_ids_T), len(slices[0].input_ids_T)
    assert all(len(one.input_ids_T) == len(one.position_ids_T) == each for one in slices)
    assert 0 <= each * size - tokens < size
    for name in ("input_ids_T", "position_ids_T"):
        whole = torch.cat([getattr(one, name) for one in slices])
        assert torch.equal(whole[:tokens], getattr(row, name))
        assert not whole[tokens:].any()
    assert torch.equal(torch.cat([one.targets_N for one in slices]), row.targets_N)
    assert torch.equal(torch.cat([one.rows_N + each * index for index, one in enumerate(slices)]), row.rows_N)
    for one in slices:
        assert one.rows.tolist() == one.rows_N.tolist()
        assert all(0 <= position < each for position in one.rows)
        padding = (each * size - tokens,) if each * size > tokens else ()
        assert one.lengths == (*row.lengths, *padding)
        assert one.cu_seqlens.tolist() == [0, *np.cumsum(one.lengths)]
        assert one.cu_seqlens.dtype == torch.int32


@given(packed_rows(), st.integers(1, 8), st.sampled_from([(), (3,)]))
def test_results_of_slices_make_up_those_of_the_row(row: PackedBatch, size: int, more: tuple[int, ...]) -> None:
    for batch in (row, row.last_tokens()):
        expected = torch.rand(len(batch.rows), *more)
        at = {position: value for position, value in zip(batch.rows.tolist(), expected, strict=True)}
        found = torch.zeros_like(expected)
        for index in range(size):
            group = Unconnected(tuple(range(size)), index)
            own = group.own(batch)
            start = index * len(own.input_ids_T)
            values = [at[position + start] for position in own.rows.tolist()]
            found += group.whole(torch.stack(values) if values else torch.zeros(0, *more), batch)
        assert torch.equal(found, expected)


def test_the_last_tokens_of_samples() -> None:
    row = pack_samples([np.arange(3), np.arange(5)], [np.arange(3) > 0, np.arange(5) > 0])
    assert row.rows.tolist() == [0, 1, 3, 4, 5, 6]
    assert row.last_tokens().rows.tolist() == row.last_tokens().rows_N.tolist() == [2, 7]


def test_a_rank_alone_changes_nothing() -> None:
    row, values = filler(), torch.ones(3)
    assert ALONE.own(row) is row
    assert ALONE.whole(values, row) is values
    assert ALONE.total(values) is values
    assert join(World(0, 1, torch.device("cpu")), 1) is ALONE


@pytest.mark.parametrize(("size", "ranks", "on_node"), [(2, 1, 1), (2, 3, 3), (2, 6, 3), (4, 12, 6)])
def test_groups_have_to_fit_into_nodes(size: int, ranks: int, on_node: int) -> None:
    with pytest.raises(
        AgreedError, match=rf"multiple of {size} ranks on each node, and a node has {on_node} of {ranks}"
    ):
        join(World(0, ranks, torch.device("cpu"), on_node), size)


@pytest.mark.parametrize(
    ("key_heads", "size", "times"), [(4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 8, 2), (1, 4, 4), (6, 4, 2), (8, 3, 3)]
)
def test_key_heads_are_repeated_until_ranks_can_share_them(key_heads: int, size: int, times: int) -> None:
    assert repetitions(key_heads, size) == times


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models with four query heads."""
    folder = tmp_path_factory.mktemp("models")
    settings: dict[str, dict[str, Any]] = {
        "two key heads": {},
        "one key head": {"num_key_value_heads": 1, "tie": True},
        "windows": {"kind": "mistral", "sliding_window": 6},
        "experts": {"kind": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "sinks": {"kind": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
        "longrope": {"kind": "llama", "rope_parameters": LONGROPE},
        "dynamic": {
            "kind": "llama",
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
            "max_position_embeddings": 8,
        },
    }
    for kind, more in FAMILIES.items():
        make(folder / kind, kind, **more)
    return {kind: str(folder / kind) for kind in FAMILIES} | {
        name: str(make_tiny_model(folder / str(number), num_attention_heads=4, **more))
        for number, (name, more) in enumerate(settings.items())
    }


def differences(
    cases: dict[str, dict[str, Any]], models: dict[str, str], ranks: int, ranks_per_node: int | None = None
) -> dict[str, dict[str, float]]:
    asked = [{"size": 2, **case, "path": models[case.get("kind", "two key heads")]} for case in cases.values()]
    ends = spawn([sequence_ranks.__file__, json.dumps(asked)], ranks, 600, ranks_per_node)
    assert [code for code, _, _ in ends] == [0] * ranks, ends
    found = [json.loads(out[out.rindex("found ") + 6 :]) for _, out, _ in ends]
    return {
        name: {kind: max(one[number][kind] for one in found) for kind in found[0][number]}
        for number, name in enumerate(cases)
    }


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str]) -> dict[str, dict[str, float]]:
    return differences(TWO_RANKS, models, ranks=2)


@pytest.mark.parametrize("name", list(TWO_RANKS))
def test_two_ranks_equal_one(name: str, two_ranks: dict[str, dict[str, float]]) -> None:
    assert {"losses", "gradients"} <= two_ranks[name].keys()
    assert max(two_ranks[name].values()) < sequence_ranks.TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.long
def test_two_ranks_equal_one_compiled(models: dict[str, str]) -> None:
    """Each layer is one graph, with the exchanges around attention."""
    found = differences({"compiled": {"role": "sft", "compile": True, "rows": 1}}, models, ranks=2)
    assert max(found["compiled"].values()) < sequence_ranks.TOLERANCE


def test_two_groups_of_two_equal_one_rank(models: dict[str, str]) -> None:
    found = differences(FOUR_RANKS, models, ranks=4, ranks_per_node=2)
    assert max(value for one in found.values() for value in one.values()) < sequence_ranks.TOLERANCE


def test_four_ranks_share_two_key_heads(models: dict[str, str]) -> None:
    found = differences({"four": {"role": "actor", "size": 4}}, models, ranks=4)
    assert max(found["four"].values()) < sequence_ranks.TOLERANCE
