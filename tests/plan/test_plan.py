"""Verdicts, nodes, host memory and disk space of a plan, and its sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_rl.plan.memory import Phase
from hpc_rl.plan.plan import Engine, Plan, plan_of, plan_of_lent
from hpc_rl.plan.text import arithmetic, cache_text, gigabytes, problem
from tests.plan.configs import SHAPES, config

P = SHAPES["/7b"].total
PLAN = Plan(
    (Phase("load", {"model": 10e9}, {}), Phase("update", {"model": 10e9}, {"logits": 3e9})), 20e9, None, 0, 0, 0, 0, 0
)


@pytest.mark.parametrize(
    ("gpu", "verdict"),
    [(20e9, "fits"), (15.3e9, "fits"), (15.1e9, "is tight"), (13.7e9, "is tight"), (13.6e9, "does not fit")],
)
def test_verdict(gpu: float, verdict: str) -> None:
    """13 x 10^9 bytes of 95 % of a GPU; tight above 90 % of that."""
    assert replace(PLAN, gpu=gpu).verdict == verdict


def test_headroom() -> None:
    assert (PLAN.fullest.name, PLAN.usable, PLAN.headroom) == ("update", 19e9, 6e9)
    assert arithmetic(PLAN) == (
        "the phase `update` needs 13.0 GB on each GPU (model 10.0, logits 3.0), and of 20.0 GB about 19.0 are usable"
    )


def test_an_engine_needs_a_cache_for_one_response() -> None:
    short = replace(PLAN, engine=Engine(cache=999, sequence=1000, sequences=8))
    assert (short.verdict, replace(PLAN, engine=Engine(1000, 1000, 8)).verdict) == ("does not fit", "fits")
    assert problem(short) == cache_text(short) == (
        "the cache of an engine holds 999 tokens: 0 of its 8 responses (rollout.max_num_seqs) at their full length of "
        "1,000 tokens with the prompt"
    )  # fmt: skip
    assert "all of its 8 responses" in cache_text(replace(PLAN, engine=Engine(9000, 1000, 8)))
    none = replace(PLAN, engine=Engine(-5, 1000, 8))
    assert cache_text(none) == "the weights of the model do not fit into an engine's part of a GPU"


HOST_INPUTS = ("model.enable_gradient_checkpointing=true", "model.enable_activation_offload=true")


def test_host_memory_for_inputs_of_layers() -> None:
    """A rank has 28 blocks of 2^25 bytes for 4,096 tokens of 7B: 2 x 4096 x 3584 bytes, rounded up."""

    def offloaded(kind: str, *words: str) -> float:
        return plan_of(config(kind, *words), SHAPES, 80e9).offloaded

    assert offloaded("sft", *HOST_INPUTS) == 8 * 28 * 2**25
    assert offloaded("sft", *HOST_INPUTS, "trainer.offload=optimizer") == pytest.approx(8 * P + 8 * 28 * 2**25)
    assert offloaded("sft", HOST_INPUTS[0]) == 0
    assert offloaded("sft", *HOST_INPUTS, "trainer.micro_tokens=8192") == 8 * 28 * 2**26
    # Actor and critic take turns, with the same blocks if they are equally wide.
    assert offloaded("ppo", *HOST_INPUTS) == 8 * 28 * 2**25
    assert offloaded("ppo", *HOST_INPUTS, "critic.path=/other") == 8 * 28 * 2**25
    narrow = {**SHAPES, "/other": replace(SHAPES["/other"], hidden=1000)}
    apart = config("ppo", *HOST_INPUTS, "critic.path=/other")
    assert plan_of(apart, narrow, 80e9).offloaded == 8 * (28 * 2**25 + 14 * 2**23)
    two = config("sft", *HOST_INPUTS).updated("trainer.n_gpus_per_node", 2)
    assert plan_of(two, SHAPES, 80e9).offloaded == 2 * 28 * 2**25
    assert offloaded("generate", "reward.model=/other") == 0


def test_memory_of_the_training_processes_is_without_the_engine() -> None:
    found = plan_of(config("ppo"), SHAPES, 80e9)
    update = next(phase for phase in found.phases if phase.name == "update of the actor")
    assert found.fullest.name == "generation"
    assert found.training == pytest.approx(update.peak - 2e9)


@pytest.mark.parametrize("share", [0.9, 0.98])
def test_an_engine_alone_takes_the_part_that_it_is_told_to_take(share: float) -> None:
    found = plan_of(config("generate", f"rollout.gpu_memory_utilization={share}"), SHAPES, 80e9)
    assert (found.verdict, found.fullest.name) == ("fits", "generation")
    apart = config("ppo", "trainer.nnodes=2", "pools.spec={train: [8], rollout: [8]}", "pools.roles.rollout=rollout")
    assert plan_of(apart.updated("rollout.gpu_memory_utilization", share), SHAPES, 80e9).fullest.pool == "train"


def test_problem_of_memory_comes_first() -> None:
    full = replace(PLAN, gpu=5e9, engine=Engine(0, 1000, 8))
    assert problem(full) == arithmetic(full)


def test_cache_of_an_engine() -> None:
    """Of half of 80 x 10^9 bytes, the weights take 2 P and the engine itself 2 x 10^9; a token takes 57,344 bytes."""
    found = plan_of(config("ppo"), SHAPES, 80e9).engine
    assert found is not None
    assert found.cache == pytest.approx((40e9 - 2e9 - 2 * P) / (2 * 28 * 512 * 2))
    split = plan_of(config("ppo", "rollout.tensor_parallel_size=8"), SHAPES, 80e9).engine
    assert split is not None
    assert split.cache == pytest.approx((38e9 - 2 * P / 8) / (2 * 28 * 512 * 2 / 4))  # 4 key heads
    assert plan_of(config("sft"), SHAPES, 80e9).engine is None


def test_disk_and_host_memory() -> None:
    found = plan_of(config("sft"), SHAPES, 80e9)
    assert found.checkpoints == 3 * 12 * P  # two are kept, and a third one is written
    assert found.export == 2 * P
    assert found.host == pytest.approx(8 * 5e9 + 12 * P)
    assert plan_of(config("sft", "trainer.save_async=false", "trainer.export=false"), SHAPES, 80e9).host == 8 * 5e9
    assert plan_of(config("sft", "trainer.export=false"), SHAPES, 80e9).export == 0
    ppo = plan_of(config("ppo"), SHAPES, 80e9)
    assert ppo.host == pytest.approx(16 * 5e9 + 12 * (P + SHAPES["/7b"].total_as_classifier))
    assert (found.offloaded, ppo.offloaded) == (0, 0)
    pools = ("trainer.nnodes=2", "pools.spec={a: [8], b: [4, 4]}", "pools.roles={critic: b, rollout: b}")
    apart = plan_of(config("ppo", *pools, "trainer.offload=optimizer", "algorithm.kl.where=none"), SHAPES, 80e9)
    assert apart.offloaded == pytest.approx(8 * P / 8 * 8 + 8 * SHAPES["/7b"].total_as_classifier / 8 * 4)
    moments = plan_of(config("sft", "trainer.save_async=false", "trainer.offload=optimizer"), SHAPES, 80e9)
    assert moments.offloaded == 8 * P
    assert moments.host == pytest.approx(8 * 5e9 + 8 * P)
    assert plan_of(config("generate"), SHAPES, 80e9).checkpoints == 0


def test_disk_of_a_window() -> None:
    stream = ("data.train_files=me/Sums", "data.stream_rows=2000", "trainer.total_training_steps=9")
    assert plan_of(config("sft", *stream, "data.max_length=300"), SHAPES, 80e9).window == 2000 * 300 * 4
    pairs = (*stream, "data.max_length=300", "ref.precompute_logprobs=false")
    assert plan_of(config("dpo", *pairs), SHAPES, 80e9).window == 2000 * 600 * 4
    assert [plan_of(config(kind), SHAPES, 80e9).window for kind in ("sft", "generate")] == [0, 0]


@pytest.mark.parametrize(
    ("size", "text"), [(4e7, "0.04"), (1.23e8, "0.1"), (3.14e9, "3.1"), (1.2e11, "120"), (-2e9, "-2.0")]
)
def test_gigabytes(size: float, text: str) -> None:
    assert gigabytes(size) == text


def test_a_lent_gpu_has_an_engine_and_nothing_else() -> None:
    """0.9 of a GPU, 2 GB for vLLM itself, weights of 2 bytes and 56 kB for a token."""
    ours = config("ppo", "data.max_prompt_length=512", "data.max_response_length=512", "trainer.nnodes=2")
    engine = plan_of_lent(ours, SHAPES, 24e9).engine
    assert engine is not None and engine.cache == pytest.approx((0.9 * 24e9 - 2e9 - 2 * P) / (2 * 28 * 512 * 2))
    assert plan_of_lent(ours, SHAPES, 24e9).fits() and not plan_of_lent(ours, SHAPES, 16e9).fits()
    own = ours.updated("rollout.name", "hf")
    assert plan_of_lent(own, SHAPES, 17e9).fits()
    small = plan_of_lent(own, SHAPES, 16e9)
    assert not small.fits() and problem(small).startswith("the phase `generation` needs 15.3 GB on each GPU (engine")


def test_a_run_without_engines_has_none_on_its_gpus() -> None:
    own, lent = (config("ppo", "rollout.name=vllm", f"rollout.engines={engines}") for engines in ("own", "lent"))
    assert plan_of(own, SHAPES, 80e9).engine is not None and plan_of(lent, SHAPES, 80e9).engine is None
    phases = {phase.name: phase for phase in plan_of(lent, SHAPES, 80e9).phases}
    assert "generation" not in phases and "sleeping engine" not in phases["load"].resident
    assert plan_of(lent, SHAPES, 80e9).host < plan_of(own, SHAPES, 80e9).host
    assert plan_of_lent(lent, SHAPES, 80e9).engine is not None
