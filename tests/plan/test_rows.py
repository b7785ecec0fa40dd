"""What trainer.micro_tokens=auto is: for models and GPUs, and after a measurement."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_rl.plan.memory import phases
from hpc_rl.plan.plan import plan_of
from hpc_rl.plan.rows import MICRO_TOKENS, MOST, RowChoice, chosen, corrected, is_auto, least, usual
from hpc_rl.plan.shape import shape_of
from hpc_rl.plan.text import rows_text
from tests.plan.configs import SHAPES, config
from tests.simulated_gpu.shapes import Shape, sizes

AUTO = "trainer.micro_tokens=auto"
RECOMPUTE = "model.enable_gradient_checkpointing=true"
GRPO = ("algorithm.advantage=grpo", "rollout.n=8", RECOMPUTE)
LORA = ("model.lora.rank=32", "model.dtype=bfloat16")
GPUS = (24e9, 40e9, 80e9, 141e9)


def rows_of(job: Any, gpu: float, name: Shape = "7B") -> RowChoice:
    rows = chosen(job, {"/7b": shape_of(sizes(name), name)}, gpu)
    assert rows is not None
    return rows


@pytest.mark.parametrize(
    ("name", "kind", "words", "expected"),
    [
        ("Qwen3-0.6B", "sft", (), (8192, 8192, 16384, 32768)),
        ("Qwen3-0.6B", "sft", (RECOMPUTE,), (32768, 32768, 32768, 32768)),
        ("1.5B", "sft", LORA, (4096, 8192, 16384, 32768)),
        ("7B", "sft", (), (1024, 2048, 4096, 8192)),
        ("7B", "sft", (RECOMPUTE,), (2048, 16384, 32768, 32768)),
        ("7B", "dpo", (), (2048, 2048, 4096, 8192)),
        ("7B", "ppo", GRPO, (1024, 16384, 32768, 32768)),
        ("7B", "sft", LORA, (2048, 4096, 8192, 16384)),
        ("14B", "sft", (), (1024, 1024, 2048, 4096)),
        ("32B", "ppo", GRPO, (1024, 1024, 1024, 32768)),
    ],
)
def test_rows_of_models_on_8_gpus(name: Shape, kind: str, words: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert tuple(rows_of(config(kind, AUTO, *words), gpu, name).tokens for gpu in GPUS) == expected


@pytest.mark.parametrize("kind", ["sft", "dpo", "rm", "ppo"])
@pytest.mark.parametrize("gpu", [40e9, 60e9, 80e9, 141e9])
def test_rows_fit_and_longer_ones_do_not(kind: str, gpu: float) -> None:
    """Against plans of fixed numbers, whose verdict is `fits` up to 90 % of the usable memory."""
    job = config(kind, AUTO)
    rows = rows_of(job, gpu)
    assert plan_of(job, SHAPES, gpu).rows == rows
    assert rows.reason == "memory" and rows.longer is not None and rows.longer[0] == 2 * rows.tokens
    same = plan_of(config(kind, f"{MICRO_TOKENS}={rows.tokens}"), SHAPES, gpu)
    longer = plan_of(config(kind, f"{MICRO_TOKENS}={2 * rows.tokens}"), SHAPES, gpu)
    assert same.phases == plan_of(job, SHAPES, gpu).phases
    assert same.fits() or rows.tokens == least(job)
    assert max(phase.peak for phase in longer.phases if phase.computes) == rows.longer[1]
    assert rows.longer[1] > (0.95 * gpu if 2 * rows.tokens <= 4096 else 0.855 * gpu)


def test_usual_rows_may_fill_a_gpu_and_longer_ones_leave_room() -> None:
    """Shorter ones than 4,096 would be slow. An update on 7B takes 47.3 GB with 4,096, and 73.7 GB with 8,192."""
    job = config("sft", AUTO)
    assert [rows_of(job, gpu).tokens for gpu in (49.6e9, 50e9)] == [2048, 4096]
    assert [rows_of(job, gpu).tokens for gpu in (86e9, 86.5e9)] == [4096, 8192]


@pytest.mark.parametrize(
    ("words", "gpu", "expected"),
    [
        (("data.max_length=9000",), 80e9, (9000, "memory")),  # no power of two fits
        (("data.max_length=9000", RECOMPUTE), 141e9, (32768, "speed")),
        (("data.max_length=40000", RECOMPUTE), 141e9, (65536, "speed")),
        (("data.max_length=32768", "trainer.sequence_parallel=4"), 141e9, (8192, "memory")),
        (("data.train_batch_size=24",), 141e9, (4096, "part")),  # 3 samples of 1,024 on each of 8 ranks
        (("data.train_batch_size=8",), 141e9, (1024, "part")),
        (("trainer.packing=false",), 141e9, (1024, "part")),
        ((RECOMPUTE, "model.enable_activation_offload=true"), 141e9, (4096, "host")),
        ((RECOMPUTE, "model.enable_activation_offload=true", "data.max_length=5000"), 141e9, (8192, "host")),
    ],
)
def test_bounds_of_rows(words: tuple[str, ...], gpu: float, expected: tuple[int, str]) -> None:
    rows = rows_of(config("sft", AUTO, *words), gpu)
    assert (rows.tokens, rows.reason) == expected


def test_a_mini_batch_is_the_part_of_a_batch() -> None:
    words = ("data.max_prompt_length=500", "data.max_response_length=524", *GRPO)
    assert rows_of(config("ppo", AUTO, *words, "actor.mini_batch_size=64"), 141e9).tokens == 8192
    assert rows_of(config("ppo", AUTO, *words), 141e9).tokens == MOST


def test_a_phase_that_does_not_depend_on_rows_does_not_shorten_them() -> None:
    """The phase with the engine may need nearly all memory."""
    job = config("ppo", AUTO, *GRPO, "rollout.gpu_memory_utilization=0.8", "trainer.offload=all")
    plan = plan_of(job, SHAPES, 80e9)
    assert plan.fullest.name == "generation" and plan.rows is not None and plan.rows.tokens == MOST


def test_rows_of_a_reward_model() -> None:
    job = config("generate", AUTO, "reward.model=/7b")
    assert rows_of(job, 80e9).tokens == MOST
    (computing,) = (phase for phase in phases(job.updated(MICRO_TOKENS, 8192), SHAPES, 80e9) if phase.computes)
    assert computing.working["activations"] == 2 * 8192 * (3 * 18944 + 4 * 3584)
    assert not is_auto(config("generate", AUTO))  # nothing computes rows
    assert plan_of(config("generate", AUTO), SHAPES, 80e9).rows is None


def test_a_number_stays() -> None:
    assert chosen(config("sft", f"{MICRO_TOKENS}=5000"), SHAPES, 80e9) is None
    assert plan_of(config("sft", f"{MICRO_TOKENS}=5000"), SHAPES, 80e9).rows is None


@pytest.mark.parametrize(
    ("length", "expected"), [(1024, 4096), (4096, 4096), (4097, 8192), (8192, 8192), (100000, 131072)]
)
def test_rows_on_cpus_hold_the_longest_sample(length: int, expected: int) -> None:
    assert usual(config("sft", AUTO, f"data.max_length={length}")) == expected


def test_the_choice_is_explained() -> None:
    assert rows_text(rows_of(config("sft", AUTO), 80e9), 80e9) == (
        "trainer.micro_tokens=auto: 4,096 tokens in each pass of a rank. The phase `update` needs 47.3 GB, and with "
        "8,192 it would need 73.7 GB; a plan may use 68.4 of 80.0 GB"
    )
    assert rows_text(rows_of(config("sft", AUTO, RECOMPUTE), 141e9), 141e9) == (
        "trainer.micro_tokens=auto: 32,768 tokens in each pass of a rank; longer rows are hardly faster. The phase "
        "`update` needs 39.9 GB; a plan may use 121 of 141 GB"
    )
    small = rows_of(config("sft", AUTO, "data.train_batch_size=8"), 80e9)
    assert "1,024 tokens in each pass of a rank, which hold a rank's whole part of a batch. The" in rows_text(
        small, 80e9
    )


def planned(job: Any, tokens: int, name: str = "update", pool: str = "") -> float:
    found = phases(job.updated(MICRO_TOKENS, tokens), SHAPES, 80e9)
    return next(phase.training for phase in found if phase.name == name and phase.pool == pool)


@pytest.mark.parametrize(
    ("gpu", "tokens", "more", "expected"),
    [
        (80e9, 4096, 0.0, 4096),
        (80e9, 4096, -5e9, 4096),  # 8,192 would need 68.7 GB, and the limit is 90 % of 76 GB
        (80e9, 4096, -6e9, 8192),
        (80e9, 4096, 28e9, 4096),  # 75.3 GB
        (80e9, 4096, 29e9, 2048),
        (80e9, 4096, 60e9, 1024),
        (141e9, 8192, 50e9, 8192),  # 123.7 GB, more than the 90 % of a plan, and less than 95 % of 134 GB
        (141e9, 8192, 53e9, 8192),
        (141e9, 8192, 54e9, 4096),
    ],
)
def test_rows_after_a_measurement(gpu: float, tokens: int, more: float, expected: int) -> None:
    """An update on 7B is planned with 47.3 GB for 4,096 tokens, and 73.7 GB for 8,192."""
    job = config("sft", AUTO)
    assert corrected(job, SHAPES, gpu, tokens, tokens, {"": planned(job, tokens) + more}) == expected


def test_rows_that_were_not_full_do_not_show_that_longer_ones_fit() -> None:
    job = config("sft", AUTO)
    less = {"": planned(job, 2048) - 10e9}
    assert corrected(job, SHAPES, 80e9, 4096, 2048, less) == 8192
    less = {"": planned(job, 2000) - 10e9}
    assert corrected(job, SHAPES, 80e9, 4096, 2000, less) == 4096


def test_a_phase_without_rows_may_need_the_most_memory() -> None:
    """Whole states come to the GPU to be saved. A measurement between the phases shows nothing about rows."""
    job = config("ppo", AUTO, "trainer.offload=all", RECOMPUTE, "trainer.sharding=none")
    update, save = planned(job, 4096, "update of the actor"), planned(job, 4096, "save")
    assert update < save
    gpu = (planned(job, 8192, "update of the actor") + 2e9 - 1e9) / 0.855  # 8,192 would fit with 1 GB less
    for measured, expected in (
        (update - 1.1e9, 8192),
        (update - 0.9e9, 4096),
        ((update + save) / 2, 4096),
        (save, 4096),
    ):
        assert corrected(job, SHAPES, gpu, 4096, 4096, {"": measured}) == expected


def test_the_pool_with_the_most_unplanned_memory_counts() -> None:
    words = ("pools.spec={one: [4], two: [4]}", "pools.roles.actor=one", "pools.roles.rollout=one")
    job = config("ppo", AUTO, *words, "pools.roles.critic=two", "data.train_batch_size=4096")
    rows = rows_of(job, 141e9)
    actor = planned(job, rows.tokens, "update of the actor", "one")
    critic = planned(job, rows.tokens, "update of the critic", "two")
    exact = {"one": actor, "two": critic}
    assert corrected(job, SHAPES, 141e9, rows.tokens, rows.tokens, exact) == rows.tokens
    for pool in exact:
        more = corrected(job, SHAPES, 141e9, rows.tokens, rows.tokens, {**exact, pool: exact[pool] + 100e9})
        assert more < rows.tokens
