"""Which models are in the memory of a GPU in which phase, for every kind of job."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_rl.plan.engines import cache_of, cache_tokens
from hpc_rl.plan.memory import Phase, adapter_parameters, micro_tokens, models_of, phases, placed_models
from hpc_rl.plan.plan import plan_of
from hpc_rl.plan.shape import shape_of
from tests.marks import since_5
from tests.plan.configs import SHAPES, config
from tests.plan.families import config_json

P = SHAPES["/7b"].total
CRITIC = SHAPES["/7b"].total_as_classifier
KL = ("algorithm.kl.where=loss", "algorithm.kl.estimator=k3")
GPU = 80e9
APART = ("pools.roles.actor=one", "pools.roles.rollout=one", "pools.roles.critic=two")


def planned(job: Any) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases(job, SHAPES, GPU)}


def test_sft_has_one_model() -> None:
    found = planned(config("sft"))
    assert list(found) == ["load", "update", "save"]
    assert all(phase.resident == {"model": 12 * P / 8} for phase in found.values())
    assert found["load"].peak == 12 * P / 8


def test_models_that_wait_in_host_memory() -> None:
    words = ("algorithm.kl.where=loss", "algorithm.kl.estimator=k3", "trainer.micro_tokens=1024")
    found = planned(config("ppo", *words, "trainer.offload=all"))
    nothing = {"actor": 0, "critic": 0, "ref": 0}
    assert found["generation"].resident == nothing
    assert found["reference"].resident == {**nothing, "ref": 2 * P / 8, "sleeping engine": 2e9}
    assert found["update of the actor"].resident == {**nothing, "actor": 4 * P / 8, "sleeping engine": 2e9}
    assert found["weight sync"].resident == {**nothing, "actor": 4 * P / 8}
    assert found["load"].working == found["save"].working == {"all of the actor": 12 * P / 8}
    some = planned(config("ppo", *words, "trainer.offload=optimizer"))
    states = {"actor": 4 * P / 8, "critic": 4 * CRITIC / 8, "ref": 2 * P / 8}
    assert some["generation"].resident == states
    assert some["save"].working == {"all of the actor": 8 * P / 8}


def test_moments_of_fine_tuning_wait_in_host_memory() -> None:
    found = planned(config("sft", "trainer.offload=optimizer"))
    assert found["load"].resident == found["save"].resident == {"model": 12 * P / 8}
    assert found["update"].resident == {"model": 4 * P / 8}


def test_moments_in_8_bits() -> None:
    """All but norms and biases have them: 28 x (2 x 3584 + 3584 + 2 x 512) + 3584 of the parameters have none."""
    vectors = 28 * (2 * 3584 + 3584 + 2 * 512) + 3584
    saved = (P - vectors) * (3 - 4 / 256)
    found = planned(config("sft", "optim.moments=8bit"))
    assert found["load"].resident == {"model": pytest.approx((12 * P - 2 * saved) / 8)}
    assert found["load"].peak == pytest.approx(6.03 * P / 8, rel=0.001)
    half = planned(config("sft", "optim.moments=8bit", "model.dtype=bfloat16"))
    assert half["load"].peak == pytest.approx((6 * P - 2 * (P - vectors) * (1 - 4 / 256)) / 8)
    saved_twice = plan_of(config("sft", "optim.moments=8bit"), SHAPES, GPU)
    assert saved_twice.checkpoints == pytest.approx(3 * (12 * P - 2 * saved))
    away = plan_of(config("sft", "optim.moments=8bit", "trainer.offload=optimizer"), SHAPES, GPU)
    assert away.offloaded == pytest.approx(8 * P - 2 * saved)
    roles = planned(config("ppo", "critic.optim.moments=8bit"))["load"].resident
    assert roles["actor"] == 12 * P / 8
    assert roles["critic"] == pytest.approx(6.03 * CRITIC / 8, rel=0.001)


def test_moments_of_adapters_in_8_bits() -> None:
    """One of the two matrices of an adapter has rows of its rank, and no 8 bits if this is less than 16."""

    def saving(rank: int) -> float:
        options = (f"model.lora={{rank: {rank}, target_modules: [q_proj]}}", "model.dtype=bfloat16")
        jobs = (config("sft", *options, f"optim.moments={moments}") for moments in ("float32", "8bit"))
        exact, rounded = (planned(job)["load"].peak for job in jobs)
        return 8 * (exact - rounded)

    count = 28 * 3584
    assert saving(8) == pytest.approx(2 * count * 8 * (3 - 4 / 256))
    assert saving(32) == pytest.approx(2 * count * 32 * (3 - 4 / 256 + 3 - 4 / 32))


def test_dpo_loads_the_reference_first() -> None:
    found = planned(config("dpo", "trainer.micro_tokens=4096"))
    assert list(found) == ["reference", "load", "update", "save"]
    assert found["reference"].resident == {"reference": 2 * P / 8}
    assert "reference" not in found["update"].resident


def test_dpo_may_keep_another_reference() -> None:
    job = config("dpo", "ref.precompute_logprobs=false", "ref.path=/other")
    assert models_of(job) == {"model.path": "/7b", "ref.path": "/other"}
    assert planned(job)["update"].resident["reference"] == 2 * SHAPES["/other"].total / 8


@pytest.mark.parametrize("words", [("algorithm.loss=simpo",), ("model.lora.rank=8",)])
def test_dpo_without_a_reference_of_its_own(words: tuple[str, ...]) -> None:
    assert list(planned(config("dpo", *words))) == ["load", "update", "save"]


def test_reward_model_has_no_logits() -> None:
    found = planned(config("rm"))["update"]
    assert found.resident == {"model": 12 * CRITIC / 8}
    assert "logits" not in found.working


def test_distillation_holds_the_teacher() -> None:
    job = config("distill", "teacher.path=/other")
    assert planned(job)["update"].resident["teacher"] == 2 * SHAPES["/other"].total / 8
    root = 2 * (2 * 152064 * 3584 + 3584)
    assert planned(job)["update"].working["gathered weights of the teacher"] == root
    apart = config("distill", "teacher.path=/other", "teacher.ranks_per_node=2")
    assert planned(apart)["update"].resident == {"model": 12 * P / 6}


def test_ppo_shares_its_gpus_with_an_engine() -> None:
    found = planned(config("ppo", *KL))
    states = {"actor": 12 * P / 8, "critic": 12 * CRITIC / 8, "ref": 2 * P / 8}
    assert found["generation"] == Phase("generation", states, {"engine": 40e9})
    assert found["update of the actor"].resident == {**states, "sleeping engine": 2e9}
    assert found["weight sync"].working["weights of the engine"] == 2 * P + 2e9
    assert found["weight sync"].working["buckets"] == 512e6
    assert found["weight sync"].working["a whole weight"] == 2 * 152064 * 3584
    assert list(found) == [
        "load",
        "generation",
        "log-probabilities",
        "reference",
        "values",
        "update of the critic",
        "update of the actor",
        "weight sync",
        "save",
    ]


def test_an_engine_in_the_training_processes() -> None:
    found = planned(config("ppo", "rollout.name=hf", "data.max_prompt_length=100", "data.max_response_length=400"))
    assert found["generation"].working == {"engine": 2 * P + 500 * 2 * 28 * 512 * 2}
    assert "sleeping engine" not in found["load"].resident
    assert cache_tokens(config("ppo", "rollout.name=hf"), SHAPES, GPU) is None


def test_arguments_of_the_engine_itself() -> None:
    own = config("generate", "rollout.engine_kwargs={gpu_memory_utilization: 0.25}")
    assert planned(own)["generation"].peak == 20e9
    assert cache_tokens(own, SHAPES, GPU) == pytest.approx((20e9 - 2e9 - 2 * P) / (2 * 28 * 512 * 2))
    assert cache_tokens(config("generate", "rollout.engine_kwargs={quantization: fp8}"), SHAPES, GPU) is None
    text = config("generate", "rollout.engine_kwargs={gpu_memory_utilization: high}")
    assert planned(text)["generation"].peak == 72e9
    wide = config("generate", "rollout.dtype=float32")
    assert cache_tokens(wide, SHAPES, GPU) == pytest.approx((72e9 - 2e9 - 4 * P) / (2 * 28 * 512 * 2))


def test_the_cache_of_layers_with_windows_and_latents() -> None:
    """A window keeps its tokens only, and a latent is whole on each GPU."""
    assert cache_of(SHAPES["/7b"], 1000) == 1000 * 2 * 28 * 512 * 2
    assert cache_of(SHAPES["/7b"], 1000, gpus=8) == 1000 * 2 * 28 * 512 * 2 / 4
    windows = shape_of(config_json("gpt_oss"), "m")
    assert cache_of(windows, 1000) == 2 * (1000 + 128) * 2 * 8 * 64 * 2
    latent = shape_of(config_json("deepseek_v3"), "m")
    assert cache_of(latent, 1000, gpus=8) == 1000 * 4 * (512 + 64) * 2


@since_5
def test_the_cache_of_layers_with_states_and_of_shared_ones() -> None:
    """A state does not grow."""
    states = shape_of(config_json("qwen3_5_text"), "m")
    own = 3 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 2048 + 4096))
    assert cache_of(states, 1000) == 1000 * 2 * 4 * 256 * 2 + own
    shared = shape_of({**config_json("gemma4_text"), "num_kv_shared_layers": 2}, "m")
    assert cache_of(shared, 100) == 100 * 2 * 2 * 4 * 256 * 2


def test_ppo_with_pools() -> None:
    job = config("ppo", *KL, "trainer.nnodes=2", "pools.spec={train: [8], rollout: [8]}", "pools.roles.rollout=rollout")
    found = list(phases(job, SHAPES, GPU))
    assert [phase.pool for phase in found if phase.name in ("generation", "load")] == ["train", "rollout"]
    (generation,) = [phase for phase in found if phase.name == "generation"]
    assert (generation.resident, generation.working) == ({}, {"engine": 72e9})
    assert not any("sleeping engine" in phase.resident for phase in found)


def test_adapters_need_neither_reference_nor_moments_of_the_model() -> None:
    job = config("ppo", *KL, "algorithm.advantage=grpo", "rollout.n=2", "model.lora.rank=8", "model.dtype=bfloat16")
    found = planned(job)["load"].resident
    adapters = 28 * 8 * (2 * (3584 + 3584) + 2 * (512 + 3584) + 3 * (18944 + 3584))
    assert adapter_parameters(SHAPES["/7b"], job.model.lora) == adapters
    assert found["actor"] == pytest.approx(2 * P / 8 + 12 * adapters / 8)
    assert "ref" not in found
    other = job.model.lora.model_copy(update={"target_modules": ["query_key_value"]})
    assert adapter_parameters(SHAPES["/7b"], other) == adapters
    some = job.model.lora.model_copy(update={"target_modules": ["q_proj"]})
    assert adapter_parameters(SHAPES["/7b"], some) == 28 * 8 * (3584 + 3584)


def test_generation_has_an_engine_only() -> None:
    found = planned(config("generate"))
    assert list(found) == ["generation"]
    assert found["generation"].working == {"engine": 72e9}
    assert planned(config("generate", "rollout.gpu_memory_utilization=0.5"))["generation"].peak == 40e9


@pytest.mark.parametrize(
    ("words", "shards"),
    [
        (("trainer.sharding=full",), 16),
        (("trainer.sharding=hybrid",), 8),
        ((), 8),
        (("trainer.sharding=gradients",), 16),
        (("trainer.sharding=none",), 1),
    ],
)
def test_shards_on_two_nodes(words: tuple[str, ...], shards: int) -> None:
    """`auto` is hybrid: 16 bytes x 7.6 x 10^9 / 8 are less than a quarter of 80 x 10^9."""
    assert planned(config("sft", "trainer.nnodes=2", *words))["load"].peak == 12 * P / shards


def test_auto_is_full_on_small_gpus() -> None:
    job = config("sft", "trainer.nnodes=2")
    assert next(iter(phases(job, SHAPES, 60e9))).peak == 12 * P / 16


def test_tokens_of_a_micro_batch() -> None:
    assert micro_tokens(config("sft", "trainer.micro_tokens=16384"), 8) == 16384
    assert micro_tokens(config("sft", "trainer.micro_tokens=16384", "data.train_batch_size=64"), 8) == 8192
    assert micro_tokens(config("sft", "trainer.packing=false", "trainer.micro_tokens=16384"), 8) == 1024
    job = config("ppo", "trainer.micro_tokens=16384", "data.max_prompt_length=1000", "data.max_response_length=1000")
    assert micro_tokens(job, 8) == 16384
    fewer = job.updated("actor.mini_batch_size", 40)
    assert micro_tokens(fewer, 8) == 5 * 2000


def test_ranks_that_share_rows_hold_a_slice_each() -> None:
    split = ("trainer.n_gpus_per_node=8", "trainer.micro_tokens=16384", "trainer.sequence_parallel=4")
    assert micro_tokens(config("sft", *split), 8) == 16384
    # 8 ranks are 2 groups, of which each has 32 of 64 samples with 1,024 tokens.
    assert micro_tokens(config("sft", *split, "data.train_batch_size=64"), 8) == 32 * 1024 / 4
    assert micro_tokens(config("sft", *split, "data.max_length=65535"), 8) == 16384
    job = config("ppo", *split, "data.max_prompt_length=1000", "data.max_response_length=1000")
    assert micro_tokens(job.updated("actor.mini_batch_size", 40), 8) == 10000


@pytest.mark.parametrize("kind", ["sft", "dpo", "rm"])
def test_128k_tokens_of_7b_fit_on_8_gpus(kind: str) -> None:
    """The 28 query heads of this model allow 4 ranks per row; a pair of DPO has two samples."""
    length, samples = 131_072, 1 if kind == "sft" else 2
    words = (
        *(f"data.max_length={length}", f"trainer.micro_tokens={samples * length // 4}", "trainer.sequence_parallel=4"),
        *("model.enable_gradient_checkpointing=true", "data.train_batch_size=16"),
    )
    found = plan_of(config(kind, *words), SHAPES, GPU)
    assert found.verdict != "does not fit", found.fullest
    assert found.fullest.name == "update"
    alone = (*words, f"trainer.micro_tokens={samples * length}", "trainer.sequence_parallel=1")
    assert plan_of(config(kind, *alone), SHAPES, GPU).verdict == "does not fit"


def test_128k_tokens_of_8b_on_8_gpus_that_share_each_row() -> None:
    llama = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    heads = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    shapes = {"/7b": shape_of({**llama, **heads}, "/7b")}
    job = config(
        "sft",
        *("data.max_length=131072", "trainer.micro_tokens=16384", "trainer.sequence_parallel=8"),
        "model.enable_gradient_checkpointing=true",
    )
    assert plan_of(job, shapes, GPU).verdict == "fits"


@pytest.mark.parametrize(("pools", "blocks"), [((), 1), (("pools.spec={one: [4], two: [4]}", *APART), 2)])
def test_models_of_one_pool_share_memory_for_inputs(pools: tuple[str, ...], blocks: int) -> None:
    words = ("model.enable_gradient_checkpointing=true", "model.enable_activation_offload=true")
    job = config("ppo", *words, "trainer.micro_tokens=4096", *pools)
    plan = plan_of(job, SHAPES, GPU)
    size, count = next(one for one in placed_models(job, SHAPES, GPU) if one.held.trained).held.inputs(4096)
    assert plan.offloaded == blocks * (8 // blocks) * size * count
