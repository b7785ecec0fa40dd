"""Settings with which a job fits: cheap ones first, and adapters last."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_rl.plan import advice
from hpc_rl.plan.advice import MEASURES, Advice, advise, fewest, more_nodes, with_settings, words
from hpc_rl.plan.plan import fits, plan_of
from hpc_rl.plan.shape import shape_of
from hpc_rl.plan.text import remedies
from tests.plan.configs import SHAPES, config
from tests.simulated_gpu.shapes import sizes

RECOMPUTE = "model.enable_gradient_checkpointing=true"
HOST_INPUTS = {"model.enable_gradient_checkpointing": True, "model.enable_activation_offload": True}
LORA = {"model.lora.rank": 32, "model.dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "options", "gpu", "expected"),
    [
        ("sft", (), 40e9, {"trainer.micro_tokens": 2048}),
        ("sft", ("data.max_length=4096",), 40e9, {"model.enable_gradient_checkpointing": "half"}),
        ("sft", ("data.max_length=4096",), 34e9, {"model.enable_gradient_checkpointing": True}),
        ("sft", (RECOMPUTE, "trainer.micro_tokens=32768", "data.max_length=32768"), 39e9, HOST_INPUTS),
        ("sft", ("trainer.micro_tokens=32768", "data.max_length=32768"), 39e9, HOST_INPUTS),
        ("sft", ("trainer.sharding=none", RECOMPUTE), 80e9, {"trainer.sharding": "full"}),
        ("sft", ("trainer.micro_tokens=65536", RECOMPUTE), 40e9, {"trainer.micro_tokens": 16384}),
        ("sft", (RECOMPUTE,), 15e9, LORA),
        ("ppo", ("trainer.n_gpus_per_node=4", RECOMPUTE), 80e9, {"rollout.gpu_memory_utilization": 0.3}),
        ("sft", (RECOMPUTE, "trainer.micro_tokens=1024"), 20e9, {"trainer.offload": "optimizer"}),
        ("generate", (), 16e9, {"rollout.tensor_parallel_size": 2}),
    ],
)
def test_advice(kind: str, options: tuple[str, ...], gpu: float, expected: dict[str, object]) -> None:
    job = config(kind, *options)
    assert not fits(job, SHAPES, gpu)
    found = advise(job, SHAPES, gpu)
    assert found is not None
    assert found.settings == expected
    changed = with_settings(job, found.settings)
    assert changed is not None
    assert fits(changed, SHAPES, gpu)
    assert len(found.reasons) == 1


def test_advice_for_less_memory_of_the_training_processes() -> None:
    """The part of an engine is not what the training processes take."""
    job = config("ppo", "algorithm.advantage=grpo", "rollout.n=2", "model.enable_gradient_checkpointing=true")
    before = plan_of(job, SHAPES, 80e9).training
    found = advise(job, SHAPES, 80e9, limit=0.85 * before)
    assert found is not None
    changed = with_settings(job, found.settings)
    assert changed is not None
    assert plan_of(changed, SHAPES, 80e9).training <= 0.85 * before


def test_no_advice_for_a_gpu_that_is_much_too_small() -> None:
    assert advise(config("sft"), SHAPES, 1e9) is None
    assert remedies(None, None) == ["GPUs with more memory, or a smaller model"]


def test_more_nodes_with_the_settings_that_they_need() -> None:
    two = config("sft", "model.enable_gradient_checkpointing=true").updated("trainer.n_gpus_per_node", 2)
    assert nodes_of(more_nodes(two, SHAPES, 40e9)) == {"trainer.nnodes": 2, "trainer.offload": "optimizer"}
    kept = config("sft").updated("trainer.n_gpus_per_node", 2)
    assert nodes_of(more_nodes(kept, SHAPES, 40e9)) == {
        "trainer.nnodes": 2,
        "trainer.micro_tokens": 2048,
        "trainer.offload": "optimizer",
    }
    assert more_nodes(two, SHAPES, 5e9) is None


def test_more_nodes_alone_if_settings_alone_are_enough_too() -> None:
    job = config("sft", "data.max_length=4096")
    found = more_nodes(job, SHAPES, 40e9)
    assert found is not None
    assert list(found.settings) == ["trainer.nnodes"]
    assert not fits(job.updated("trainer.nnodes", found.settings["trainer.nnodes"] - 1), SHAPES, 40e9)


def test_fewest_nodes() -> None:
    """The states of 7B take 11.4 x 10^9 bytes on each of 8 GPUs, so that 40 x 10^9 are enough with recomputation."""
    small = config("sft", "model.enable_gradient_checkpointing=true", "trainer.nnodes=3")
    assert nodes_of(fewest(small, SHAPES, 40e9, first=1, may_change=False)) == {"trainer.nnodes": 1}
    assert nodes_of(fewest(small, SHAPES, 40e9, first=2, may_change=False)) == {"trainer.nnodes": 2}
    kept = config("sft", "data.max_length=4096")
    assert nodes_of(fewest(kept, SHAPES, 40e9, first=1, may_change=True)) == {
        "trainer.nnodes": 1,
        "model.enable_gradient_checkpointing": "half",
    }


def nodes_of(advice: Advice | None) -> dict[str, object]:
    """Return the settings of an advice that exists."""
    assert advice is not None
    return dict(advice.settings)


def test_pools_state_their_nodes() -> None:
    job = config("ppo", "trainer.nnodes=2", "pools.spec={train: [8], rollout: [8]}", "pools.roles.rollout=rollout")
    assert more_nodes(job, SHAPES, 10e9) is None
    assert fewest(job, SHAPES, 80e9, first=1, may_change=True) is None


def test_settings_that_are_not_valid_together() -> None:
    assert with_settings(config("sft"), {"trainer.micro_tokens": 8}) is None
    assert with_settings(config("ppo"), {"model.lora.dropout": 0.1}) is None


def test_words_of_a_command() -> None:
    assert words({"a.b": True, "c": 0.3, "d": 4, "e": "full"}) == ["a.b=true", "c=0.3", "d=4", "e=full"]
    way = Advice({"a": 1}, ("because", "so"))
    assert remedies(way, None) == ["a=1 (because; so)"]


def test_measures_that_do_not_apply() -> None:
    job = config("generate")
    applies = [measure.reason for measure in MEASURES if list(measure.settings(job, SHAPES))]
    assert applies == ["split each engine's model over several GPUs"]
    done = config("sft", "trainer.sharding=full", "model.enable_gradient_checkpointing=true", "model.lora.rank=8")
    offloaded = done.updated("trainer.offload", "optimizer").updated("model.enable_activation_offload", True)
    applies = [measure.reason for measure in MEASURES if list(measure.settings(offloaded, SHAPES))]
    assert applies == ["use smaller micro-batches", "keep AdamW's moments in 8 bits, which changes the result slightly"]
    rounded = offloaded.updated("optim.moments", "8bit")
    assert [one.reason for one in MEASURES if list(one.settings(rounded, SHAPES))] == applies[:1]
    (inputs,) = (measure.settings for measure in MEASURES if "inputs" in measure.reason)
    assert list(inputs(done, SHAPES)) == [HOST_INPUTS]
    recompute = next(measure.settings for measure in MEASURES if "third" in measure.reason)
    key = "model.enable_gradient_checkpointing"
    assert list(recompute(config("sft"), SHAPES)) == [{key: "half"}, {key: True}]
    assert list(recompute(config("sft", f"{key}=half"), SHAPES)) == [{key: True}]
    (offload,) = (measure.settings for measure in MEASURES if "states in host memory" in measure.reason)
    assert list(offload(done, SHAPES)) == [{"trainer.offload": "optimizer"}]
    assert [one["trainer.offload"] for one in offload(config("ppo"), SHAPES)] == ["optimizer", "all"]
    assert list(MEASURES[2].settings(done, SHAPES)) == [{"trainer.micro_tokens": 2048}, {"trainer.micro_tokens": 1024}]


def test_moments_in_8_bits_if_exact_settings_are_not_enough() -> None:
    """They need no host memory, and while a model is loaded, less of a GPU than float32: 1.5B parameters take
    18.5 x 10^9 bytes then, and 9.3 with 8 bits."""
    job = config("sft", RECOMPUTE, "trainer.micro_tokens=1024")
    eight, offload = {"optim.moments": "8bit"}, {"trainer.offload": "optimizer"}
    assert advise(job, SHAPES, 20e9, host=60e9) == Advice(eight, (MEASURES[-2].reason,))
    for exact in (advise(job, SHAPES, 20e9), advise(job, SHAPES, 20e9, change_training=False)):
        assert exact is not None and exact.settings == offload
    assert advise(job, SHAPES, 20e9, change_training=False, host=60e9) is None
    small = {"/7b": shape_of(sizes("1.5B"), "1.5B")}
    alone = job.updated("trainer.n_gpus_per_node", 1)
    both = advise(alone, small, 18e9)
    assert both is not None and both.settings == offload | eight
    assert advise(alone, small, 18e9, change_training=False) is None
    measure = MEASURES[-2].settings
    assert list(measure(config("ppo"), SHAPES)) == [{"actor.optim.moments": "8bit", "critic.optim.moments": "8bit"}]
    actor = config("ppo", "actor.optim.moments=8bit")
    assert list(measure(actor, SHAPES)) == [{"critic.optim.moments": "8bit"}]
    grpo = config("ppo", "algorithm.advantage=grpo", "rollout.n=2")
    assert list(measure(grpo, SHAPES)) == [{"actor.optim.moments": "8bit"}]


def test_rows_are_divided_for_long_samples_only() -> None:
    """7B has 28 query heads, so that 8 GPUs cannot share its rows, but 2 or 4 can."""
    dividing = next(measure.settings for measure in MEASURES if "row" in measure.reason)
    for length, counts in {16383: [], 16384: [2], 32768: [2, 4], 131072: [2, 4]}.items():
        job = config("sft", f"data.max_length={length}", f"trainer.micro_tokens={length}")
        expected = [{"trainer.sequence_parallel": size, "trainer.micro_tokens": length // size} for size in counts]
        assert list(dividing(job, SHAPES)) == expected
    two = config("sft", "data.max_length=32768", "trainer.micro_tokens=16384", "trainer.sequence_parallel=2")
    assert list(dividing(two, SHAPES)) == [{"trainer.sequence_parallel": 4, "trainer.micro_tokens": 8192}]
    smaller = next(measure.settings for measure in MEASURES if "smaller" in measure.reason)
    wide = two.updated("trainer.micro_tokens", 30000)
    assert [one["trainer.micro_tokens"] for one in smaller(wide, SHAPES)] == [16384]
    apart = config("ppo", "data.max_prompt_length=1", "data.max_response_length=32767", "trainer.micro_tokens=32768")
    assert [one["trainer.sequence_parallel"] for one in dividing(apart, SHAPES)] == [2, 4]


def test_advice_for_samples_of_128k_tokens() -> None:
    """A sample of 131,072 tokens fits if inputs of layers are in host memory; longer ones only if GPUs share them."""
    length = 131_072
    job = config("sft", f"data.max_length={length}", f"trainer.micro_tokens={length}", RECOMPUTE)
    assert not fits(job, SHAPES, 80e9)
    found = advise(job, SHAPES, 80e9, change_training=False)
    assert found is not None
    assert found.settings == HOST_INPUTS
    longer = config("sft", f"data.max_length={2 * length}", f"trainer.micro_tokens={2 * length}", RECOMPUTE)
    found = advise(longer, SHAPES, 80e9, change_training=False)
    assert found is not None
    assert found.settings["trainer.sequence_parallel"] in (2, 4)
    job = longer
    changed = with_settings(job, found.settings)
    assert changed is not None
    assert fits(changed, SHAPES, 80e9)


RL = (RECOMPUTE, "data.max_prompt_length=1024", "data.max_response_length=3072", "rollout.n=8")


def test_few_gpus() -> None:
    """PPO of 7B on four GPUs with 80 GB, and GRPO of 1.5B on one with 24 GB."""
    ppo = config("ppo", *RL, "algorithm.kl.where=reward", "trainer.micro_tokens=8192", "trainer.offload=all")
    plan = plan_of(ppo.updated("trainer.n_gpus_per_node", 4), SHAPES, 80e9)
    assert plan.verdict == "fits"
    assert plan.offloaded == pytest.approx(4 * (12 * 7.6e9 + 12 * 7.1e9 + 2 * 7.6e9) / 4, rel=0.01)

    small = {"/7b": shape_of(sizes("1.5B"), "1.5B")}
    kl = ("algorithm.kl.where=loss", "algorithm.kl.estimator=k3", "algorithm.advantage=grpo")
    grpo = config("ppo", *RL, *kl).updated("trainer.n_gpus_per_node", 1)
    assert not fits(grpo, small, 24e9)
    found = advise(grpo, small, 24e9, change_training=False)
    assert found is not None
    assert found.settings == {"trainer.offload": "all"}
    needed = plan_of(grpo.updated("trainer.offload", "all"), small, 24e9).offloaded
    assert advise(grpo, small, 24e9, change_training=False, host=needed) is None
    assert advise(grpo, small, 24e9, change_training=False, host=needed + 1) == found
    assert nodes_of(fewest(grpo, small, 24e9, 1, may_change=True, host=needed + 1))["trainer.nnodes"] == 1
    assert more_nodes(grpo, small, 24e9, host=1e9) == fewest(grpo, small, 24e9, 2, may_change=True, host=1e9)


def test_what_host_memory_cannot_hold_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice answers at once if a job would fit the GPUs only with more host memory than there is."""
    tried: list[Any] = []

    def counted(*job: Any) -> Any:
        tried.append(job)
        return plan_of(*job)

    monkeypatch.setattr(advice, "plan_of", counted)
    job = config("ppo", *RL, "algorithm.kl.where=reward", "trainer.micro_tokens=8192")
    assert advise(job, SHAPES, 24e9, change_training=False) is not None
    tried.clear()
    assert advise(job, SHAPES, 24e9, change_training=False, host=1e9) is None
    assert len(tried) < 50
