"""The GPU paths of the training checks on simulated GPUs: devices, types, shapes and collectives, but no numbers.

Checkpoints and torch.compile need memory and kernels, and the checks on a Ray cluster need vLLM's own processes: these
lines run on CPUs only (tests/e2e/test_doctor_on_slurm.py), where the GPU's are skipped with a reason.
"""

from pathlib import Path
from typing import Any

import pytest

from hpc_rl.probes.acceptance.network import BETWEEN, WITHIN
from hpc_rl.probes.acceptance.table import modes
from tests.probes import simulated
from tests.probes.test_table import GPUS
from tests.simulated_gpu.process import simulate


@pytest.mark.parametrize(
    "changes",
    [{}, {"trainer.packing": False}, {"model.enable_gradient_checkpointing": True}]
    + [{"trainer.sharding": mode} for mode in modes(GPUS)],
    ids=str,
)
def test_the_steps_that_are_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = simulate(simulated.first_steps, tmp_path, changes)
    assert found.losses == 2
    assert found.gradients["model.embed_tokens.weight"] == ((320, simulated.HIDDEN), "torch.float32", "cpu")
    assert {(dtype, device) for _, dtype, device in found.gradients.values()} == {("torch.float32", "cpu")}
    assert len(found.gradients) == 2 * 11 + 3
    assert sum(found.calls.values()) > 0


def test_the_speed_has_a_utilisation(tmp_path: Path) -> None:
    assert "% MFU" in simulate(simulated.speed, tmp_path)


def test_the_attention_kernels_run_in_bfloat16(tmp_path: Path) -> None:
    state, words = simulate(simulated.kernels, tmp_path)
    assert state == "failed" and words.endswith("scale None in torch.bfloat16; at most 2e-02 is expected")


@pytest.mark.parametrize("where", [WITHIN, BETWEEN])
def test_the_bandwidth_uses_the_devices_backend(tmp_path: Path, where: str) -> None:
    found, calls = simulate(simulated.bandwidth, tmp_path, where)
    assert found.startswith(f"nccl, {4 if where == WITHIN else 2} ranks in each group: ")
    assert calls["allreduce_"] >= 12
