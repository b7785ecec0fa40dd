"""A small model's steps on simulated GPUs, in bytes and counts. Formulas: P parameters, R ranks, M micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.marks import long
from tests.simulated_gpu.models import REWARD_MODEL, parameters
from tests.simulated_gpu.process import simulate
from tests.simulated_gpu.scenarios import Job, Phase, rl_step, sft_step

P = parameters("tiny")
EMBEDDINGS = 2 * 1024 * 256 + 256
"""Parameters outside of the layers: input embeddings, LM head, last norm."""
HEAD = 256
"""Parameters of a critic's head, which replaces the LM head."""
SMALL = Job(micro_tokens=512, length=128)
TWO_NODES = replace(SMALL, ranks=16)
EVERY_ROLE = replace(
    SMALL,
    options=(
        "algorithm.kl.where=loss",
        "algorithm.kl.estimator=k3",
        "algorithm.entropy_coeff=0.01",
        "algorithm.tis_cap=2.0",
        f"reward.model={REWARD_MODEL}",
    ),
)


def sft(job: Job, *options: str, micro_batches: int = 3) -> dict[str, Phase]:
    return simulate(sft_step, replace(job, micro_batches=micro_batches, options=options))


@pytest.fixture(scope="module")
def every_role() -> dict[str, Phase]:
    return simulate(rl_step, replace(EVERY_ROLE, micro_batches=3))


@pytest.mark.parametrize(
    ("job", "sharding", "shards"),
    [
        (SMALL, "full", 8),
        long(SMALL, "auto", 8),
        (SMALL, "gradients", 8),
        long(SMALL, "none", 1),
        long(TWO_NODES, "full", 16),
        long(TWO_NODES, "hybrid", 8),
        (TWO_NODES, "auto", 8),
    ],
)
def test_memory_and_traffic_of_each_sharding(job: Job, sharding: str, shards: int) -> None:
    one = sft(job, f"trainer.sharding={sharding}", micro_batches=1)
    three = sft(job, f"trainer.sharding={sharding}")
    # Weight and two moments, each float32. Apart from these, there are only small tensors of one number.
    assert 12 * P / shards <= one["load"].live < 12.1 * P / shards
    assert three["update"].live < 12.1 * P / shards
    more = three["update"].peak - one["update"].peak
    traffic = three["update"].traffic
    if sharding in ("none", "gradients"):
        # The gradient of the whole model exists between micro-batches, and travels once.
        assert more > 2 * P
    else:
        # Only this rank's part does, and micro-batches have no other trace.
        assert more < 1.5 * 4 * P / shards
    reductions = 1 if sharding in ("none", "gradients") else 3
    scattered = 0 if sharding == "none" else 4 * P * reductions
    assert traffic.get("_reduce_scatter_base_", 0) == scattered
    gathers = {"none": 0, "gradients": 2 * P}.get(sharding, 3 * 2 * (2 * (P - EMBEDDINGS) + EMBEDDINGS))
    assert traffic.get("_allgather_base_", 0) == gathers
    # Between nodes only one part of the gradient travels, once per step.
    between = {"none": 4 * P}.get(sharding, 4 * P // shards if job is TWO_NODES and sharding != "full" else 0)
    assert traffic.get("allreduce_", 0) == between


@pytest.mark.parametrize(
    ("ranks", "sharding", "once"),
    [long(1, "auto", True), (8, "gradients", True), long(8, "none", True), (8, "full", False), long(1, "full", False)],
)
def test_weights_are_converted_once_per_step(ranks: int, sharding: str, once: bool) -> None:
    job, option = replace(SMALL, ranks=ranks, gpus_per_node=ranks), f"trainer.sharding={sharding}"
    one, three = (sft(job, option, micro_batches=number)["update"].launches for number in (1, 3))
    copies = ("aten::_foreach_copy_", "aten::copy_", "fsdp::all_gather_copy_in")
    more, there = (sum(launches.get(name, 0) for name in copies) for launches in (Counter(three) - Counter(one), one))
    assert there > 0
    assert more == (0 if once else 2 * there)


def test_operators_do_not_depend_on_the_number_of_samples() -> None:
    few, many = (
        sft(replace(SMALL, ranks=1, gpus_per_node=1, length=length), micro_batches=1)["update"] for length in (512, 32)
    )
    assert few.launches == many.launches


def test_gradients_travel_in_bfloat16_if_asked() -> None:
    traffic = sft(TWO_NODES, "trainer.sharding=hybrid", "trainer.reduce_dtype=bfloat16")["update"].traffic
    assert traffic["_reduce_scatter_base_"] == 3 * 2 * P
    # Sums over micro-batches stay float32, so that each micro-batch travels.
    assert traffic["allreduce_"] == 3 * 2 * P // 8


def test_memory_of_each_role(every_role: dict[str, Phase]) -> None:
    critic = P - 1024 * 256 + HEAD
    before = 0
    for role, expected in {"actor": 12 * P, "critic": 12 * critic, "ref": 2 * P, "reward": 2 * critic}.items():
        taken = every_role[f"load {role}"].live - before
        before = every_role[f"load {role}"].live
        # A head of one row is not divided: rank 0 has it, in float32 with its moments.
        assert expected / 8 <= taken < 1.01 * expected / 8 + 12 * HEAD + 2000, role


def test_an_update_holds_no_gradient_of_the_whole_model(every_role: dict[str, Phase]) -> None:
    one = simulate(rl_step, replace(EVERY_ROLE, micro_batches=1))
    for role in ("actor", "critic"):
        more = every_role[f"update {role}"].peak - one[f"update {role}"].peak
        assert more < 1.5 * 4 * P / 8, role


def test_forward_passes_leave_no_gathered_parameters(every_role: dict[str, Phase]) -> None:
    for phase in ("logprobs", "ref", "values", "scores"):
        found = every_role[phase]
        assert found.live == every_role["hold"].live, phase
        assert found.traffic.keys() == {"_allgather_base_"}, phase


def test_the_host_does_not_wait_in_micro_batches(every_role: dict[str, Phase]) -> None:
    for phase in ("logprobs", "ref", "values", "scores"):
        assert sum(every_role[phase].waits.values()) == 1, every_role[phase].waits
    for phase in ("update actor", "update critic"):
        # Loss, norm of the gradient, metrics: once per update.
        assert sum(every_role[phase].waits.values()) == 3, every_role[phase].waits
    assert sum(sft(SMALL)["update"].waits.values()) == 2


@pytest.mark.parametrize(
    "options",
    [("algorithm.loss=gspo",), ("algorithm.loss=cispo", "algorithm.clip_ratio_low=1", "model.dtype=bfloat16")],
)
def test_other_losses_and_types_compute_on_the_device(options: tuple[str, ...]) -> None:
    found = simulate(rl_step, replace(SMALL, micro_batches=1, options=options))
    assert found["update actor"].traffic["_reduce_scatter_base_"] == 4 * P
