"""Steps with adapters on simulated GPUs: the model is frozen, sharded and in bfloat16, and has no gradients."""

from __future__ import annotations

from dataclasses import replace

from tests.simulated_gpu.models import parameters
from tests.simulated_gpu.process import simulate
from tests.simulated_gpu.scenarios import Job, rl_step, sft_step

P = parameters("tiny")
LORA = ("model.lora.rank=8", "model.dtype=bfloat16", "trainer.sharding=full")
JOB = Job(micro_tokens=512, length=128, micro_batches=3, options=LORA)


def test_memory_and_traffic_of_a_step() -> None:
    found = simulate(sft_step, JOB)
    trained = found["update"].traffic["_reduce_scatter_base_"] // (4 * 3)
    assert 0 < trained < P / 10
    states = (2 * (P) + 12 * trained) / JOB.ranks
    assert states <= found["load"].live < 1.1 * states
    assert found["update"].live < 1.1 * states
    whole = simulate(sft_step, replace(JOB, options=("trainer.sharding=full",)))
    assert found["update"].peak < whole["update"].peak
    assert found["update"].traffic["_allgather_base_"] < 1.1 * whole["update"].traffic["_allgather_base_"]


def test_policy_and_critic_make_a_step() -> None:
    options = (*LORA, "algorithm.kl={where: loss, estimator: k3}")
    found = simulate(rl_step, replace(JOB, options=options))
    assert "load ref" not in found
    trained = [found[f"update {role}"].traffic["_reduce_scatter_base_"] // (4 * 3) for role in ("actor", "critic")]
    assert all(0 < number < P / 10 for number in trained)
