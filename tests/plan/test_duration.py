"""The work of a step, counted by hand, and the time that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_rl.formats.gpu_models import GpuModel
from hpc_rl.plan.duration import Duration, PlannedWork, gpus_of, items_of, operations, step_seconds, steps_of, work_of
from hpc_rl.plan.text import time_text
from tests.plan.configs import SHAPES, config

SHAPE = SHAPES["/7b"]
GPU = GpuModel("", "", 80, tflops=1000.0, bandwidth=3.0)
BODY = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944 + 2 * 3584 + 3584 + 2 * 512)
HEAD = 152064 * 3584


def attention(length: int) -> float:
    """Return the operations of a token's attention in a forward pass."""
    return 4 * 28 * 3584 * length


def operations_of(kind: str, *words: str) -> list[float]:
    return [work.operations for work in work_of(config(kind, *words), SHAPES, 80e9)]


def test_operations_of_passes() -> None:
    assert SHAPE.blocks == BODY
    assert operations(SHAPE, 10, 100, 3, 3) == 10 * (6 * (BODY + HEAD) + 3 * attention(100))
    assert operations(SHAPE, 10, 100, 2, 3, head=False) == 10 * (4 * BODY + 3 * attention(100))


@pytest.mark.parametrize(
    ("kind", "words", "passes", "attended", "head"),
    [
        ("sft", (), 6, 3, 1),
        ("sft", ("model.enable_gradient_checkpointing=true",), 8, 4, 1),
        ("sft", ("model.enable_gradient_checkpointing=half",), 7, 3.5, 1),
        ("sft", ("model.lora.rank=8",), 4, 3, 1),
        ("rm", (), 6, 3, 0),
    ],
)
def test_a_step_of_fine_tuning(kind: str, words: tuple[str, ...], passes: int, attended: float, head: int) -> None:
    job = config(kind, *words)
    length = job.data.longest
    (found,) = operations_of(kind, *words)
    assert found == 1024 * length * (passes * (BODY + head * HEAD) + attended * attention(length))


@pytest.mark.parametrize(("words", "part"), [((), 0.5), (("ref.precompute_logprobs=false",), 1.0)])
def test_a_reference_is_one_forward_pass(words: tuple[str, ...], part: float) -> None:
    _, reference = operations_of("dpo", "trainer.total_epochs=2", "trainer.micro_tokens=4096", *words)
    assert reference == part * 1024 * 2048 * (2 * (BODY + HEAD) + attention(2048))
    assert len(operations_of("dpo", "algorithm.loss=simpo", "trainer.micro_tokens=4096")) == 1


def test_a_teacher_on_ranks_of_its_own() -> None:
    words = ("teacher.path=/other", "teacher.ranks_per_node=2", "trainer.nnodes=2")
    student, teacher = work_of(config("distill", *words), SHAPES, 80e9)
    assert (student.gpus, student.pool, teacher.gpus, teacher.pool) == (12, "", 4, "teacher")
    assert teacher.operations == 1024 * 1024 * (2 * (BODY / 2 + HEAD) + attention(1024) / 2)
    _, beside = work_of(config("distill", "teacher.path=/other"), SHAPES, 80e9)
    assert (beside.gpus, beside.pool) == (8, "")


def test_a_step_of_reinforcement_learning() -> None:
    words = ("data.max_prompt_length=200", "data.max_response_length=800", "actor.ppo_epochs=2", "rollout.n=2")
    actor, critic, prompts, answers = sorted(
        work_of(config("ppo", *words), SHAPES, 80e9), key=lambda work: -work.operations
    )[:4]
    tokens = 2048 * 1000
    forward = 2 * (BODY + HEAD) + attention(1000)
    assert actor.operations == tokens * (forward + 2 * 3 * forward)
    assert critic.operations == tokens * 7 * (forward - 2 * HEAD)
    generated = sorted([prompts, answers], key=lambda work: work.reads)
    assert generated[0].operations == 1024 * 200 * (2 * BODY + attention(200))
    assert generated[1].operations == 2048 * 800 * (2 * (BODY + HEAD) + attention(600))


def test_adapters_compute_the_reference_with_the_actor() -> None:
    words = ("algorithm.advantage=grpo", "rollout.n=2", "model.lora.rank=8", "data.max_prompt_length=200")
    with_kl, without = (
        max(operations_of("ppo", *words, "data.max_response_length=800", *kl))
        for kl in (("algorithm.kl.where=loss", "algorithm.kl.estimator=k3"), ("algorithm.kl.where=none",))
    )
    assert with_kl - without == pytest.approx(2048 * 1000 * (2 * (BODY + HEAD) + attention(1000)))


def test_bytes_that_an_engine_reads() -> None:
    """256 responses for each of 8 engines, all at once: weights and half-full caches are read for each token."""
    words = ("data.max_prompt_length=200", "data.max_response_length=800", "rollout.n=2")

    def reads(*more: str) -> float:
        return max(work.reads for work in work_of(config("ppo", *words, *more), SHAPES, 80e9))

    weights, cache = 2 * SHAPE.total, 600 * 2 * 28 * 512 * 2
    assert reads() == pytest.approx(800 * (weights + 256 * cache))
    assert reads("rollout.max_num_seqs=128") == pytest.approx(2 * 800 * (weights + 128 * cache))
    assert reads("rollout.tensor_parallel_size=2", "rollout.max_num_seqs=512") == pytest.approx(
        800 * (weights / 2 + 512 * cache / 2)
    )


def test_a_cache_that_is_short_makes_waves() -> None:
    lengths = ("data.max_prompt_length=1000", "data.max_response_length=30000", "trainer.micro_tokens=31000")
    words = (*lengths, "rollout.n=2")
    small = max(work.reads for work in work_of(config("ppo", *words), SHAPES, 60e9))
    large = max(work.reads for work in work_of(config("ppo", *words), SHAPES, 80e9))
    assert small > large


def test_the_slower_of_computing_and_reading_counts() -> None:
    work = PlannedWork("", 4, operations=8e15, reads=3e12)
    assert work.seconds(GPU, 0.5, 1.0) == pytest.approx(4.0)
    assert work.seconds(GPU, 1.0, 0.1) == pytest.approx(10.0)


def test_the_range_of_a_step() -> None:
    found = step_seconds(config("sft"), SHAPES, GPU, 80e9)
    assert found is not None
    at_peak = operations_of("sft")[0] / (8 * 1e15)
    assert found == (pytest.approx(at_peak / 0.55), pytest.approx(at_peak / 0.12))


def test_pools_work_one_after_the_other_unless_responses_may_be_older() -> None:
    pools = ("pools.spec={a: [4], b: [4]}", "pools.roles.rollout=b", "data.train_batch_size=64", "rollout.n=2")
    algorithm = ("algorithm.advantage=grpo", "algorithm.kl.where=none")
    found = step_seconds(config("ppo", *pools, *algorithm), SHAPES, GPU, 80e9)
    older = step_seconds(config("ppo", *pools, *algorithm, "rollout.staleness=1"), SHAPES, GPU, 80e9)
    assert found is not None
    assert older is not None
    parts = list(work_of(config("ppo", *pools, *algorithm), SHAPES, 80e9))
    trained = sum(work.seconds(GPU, 0.55, 0.75) for work in parts if work.pool == "a")
    generated = sum(work.seconds(GPU, 0.55, 0.75) for work in parts if work.pool == "b")
    assert found[0] == pytest.approx(trained + generated)
    assert older[0] == pytest.approx(max(trained, generated))


def test_an_engine_in_the_training_processes_has_no_known_speed() -> None:
    assert step_seconds(config("ppo", "rollout.name=hf"), SHAPES, GPU, 80e9) is None


@pytest.mark.parametrize(
    ("kind", "words", "rows", "expected"),
    [
        ("sft", (), None, None),
        ("sft", ("trainer.total_epochs=3",), 1025, 6),
        ("sft", ("trainer.total_training_steps=7",), None, 7),
        ("ppo", ("trainer.total_epochs=3",), 2047, 3),
        ("generate", (), None, None),
        ("generate", ("data.max_prompts=500",), None, 0.5),
        ("generate", ("data.max_prompts=500",), 200, 0.2),
        ("generate", (), 2500, 2.5),
    ],
)
def test_steps(kind: str, words: tuple[str, ...], rows: int | None, expected: float | None) -> None:
    assert steps_of(config(kind, *words), rows) == expected


def test_items_and_gpus() -> None:
    assert items_of(config("sft")) == 1024
    assert items_of(config("ppo", "rollout.n=4")) == 4096
    assert items_of(config("generate", "rollout.n=4")) == 4000
    assert gpus_of(config("sft", "trainer.nnodes=2")) == 16
    assert gpus_of(config("ppo", "trainer.nnodes=2", "pools.spec={a: [8], b: [4]}", "pools.roles.rollout=b")) == 12


def time(step: tuple[float, float], steps: float | None = None) -> Any:
    return Duration(step, steps, nodes=4, basis="because")


def test_the_time_of_a_run() -> None:
    assert time((1, 2)).run is None
    assert time((1, 2)).node_hours is None
    assert time((1.0, 2.5), 3600).run == (3600, 9000)
    assert time((1.0, 2.5), 3600).node_hours == (4, 10)


@pytest.mark.parametrize(
    ("found", "generates_only", "expected"),
    [
        (time((0.5, 1.25)), False, ["0.5 to 1.2 s for a step (because)"]),
        (time((90, 150)), False, ["90 s to 2.5 min for a step (because)"]),
        (time((99.4, 99.7)), False, ["99 to 100 s for a step (because)"]),
        (time((12, 12), 1), False, ["12 s for a step (because)", "12 s for 1 step: 0.013 node hours"]),
        (
            time((60, 240), 1000),
            False,
            ["60 s to 4 min for a step (because)", "17 to 67 h for 1,000 steps: 67 to 267 node hours"],
        ),
        (time((60, 60), 2.5), True, ["60 s for 1,000 prompts (because)", "2.5 min: 0.17 node hours"]),
    ],
)
def test_sentences(found: Any, generates_only: bool, expected: list[str]) -> None:
    assert time_text(found, generates_only) == expected
