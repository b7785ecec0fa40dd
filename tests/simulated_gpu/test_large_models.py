"""Steps of 7B and 32B models on simulated GPUs: `make test-large`. Each takes one to three minutes of one core.

The printed peaks are the figures of docs/sft.md and docs/engines.md.
"""

from __future__ import annotations

import pytest

from tests.simulated_gpu.process import simulate
from tests.simulated_gpu.scenarios import Job, Phase, rl_step, sft_step

pytestmark = [pytest.mark.large, pytest.mark.slow, pytest.mark.timeout(900)]

REFERENCE = ("algorithm.kl.where=loss", "algorithm.kl.estimator=k3")


def show(job: Job, found: dict[str, Phase]) -> dict[str, Phase]:
    """Print the peaks of a job's phases."""
    print(f"\n{job.shape}, {job.ranks} GPUs, {job.micro_tokens:,} tokens, {' '.join(job.options)}; in 10^9 bytes:")
    for name, phase in found.items():
        traffic = ", ".join(f"{collective} {size / 1e9:.1f}" for collective, size in phase.traffic.items())
        print(f"  {name}: peak {phase.peak / 1e9:.1f}, kept {phase.live / 1e9:.1f}, {traffic or 'no traffic'}")
    return found


def test_ppo_of_7b_on_8_gpus() -> None:
    """Actor, critic and reference on the same GPUs."""
    job = Job("7B", ranks=8, micro_tokens=16384, length=1024, options=REFERENCE)
    found = show(job, simulate(rl_step, job))
    for role in ("actor", "critic"):
        assert found[f"update {role}"].peak < 46e9
    assert found["logprobs"].peak < 32e9


def test_grpo_of_32b_on_32_gpus() -> None:
    """Actor and reference."""
    grpo = (*REFERENCE, "algorithm.advantage=grpo", "rollout.n=2")
    job = Job("32B", ranks=32, micro_tokens=8192, length=1024, options=grpo)
    found = show(job, simulate(rl_step, job))
    assert found["update actor"].peak < 42e9


@pytest.mark.parametrize(("sharding", "limit_gb"), [("full", 32), ("gradients", 70), ("none", 150)])
def test_sft_of_7b_on_8_gpus(sharding: str, limit_gb: float) -> None:
    job = Job("7B", ranks=8, micro_tokens=16384, length=1024, options=(f"trainer.sharding={sharding}",))
    assert show(job, simulate(sft_step, job))["update"].peak < limit_gb * 1e9


def test_sft_of_7b_on_two_nodes_shards_over_all_gpus() -> None:
    job = Job("7B", ranks=16, micro_tokens=16384, length=1024, options=("trainer.sharding=full",))
    assert show(job, simulate(sft_step, job))["update"].peak < 24e9


def test_sft_of_7b_on_two_nodes_keeps_parameters_within_each_node() -> None:
    job = Job("7B", ranks=16, micro_tokens=16384, length=1024)
    found = show(job, simulate(sft_step, job))["update"]
    assert found.peak < 32e9
    # Only an eighth of the float32 gradient travels between nodes: 4 bytes x 7.6 x 10^9 / 8.
    assert 3.7e9 < found.traffic["allreduce_"] < 3.9e9
