"""The memory of GPUs by the names that clusters give them."""

from __future__ import annotations

import pytest

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.plan.hardware import gpu_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", 80),
        ("nvidia_h100_80gb_hbm3", 80),
        ("H200", 141),
        ("a100_80gb", 80),
        ("a100_3g.20gb", 20),
        ("NVIDIA-A40", 48),
        ("l40s", 48),
        ("l4", 24),
        ("rtx_3090", 24),
        ("rtx4090", 24),
        ("mi250", 64),
        ("b200", 180),
        ("a100", None),
        ("gh200", None),
        ("nvidia_gh200_480gb", None),
        ("nvidia_h100_nvl", 94),
        ("H100-NVL", 94),
        ("", None),
    ],
)
def test_memory_in_a_name(name: str, expected: float | None) -> None:
    assert gpu_bytes(SlurmConfig(gpu_type=name or None)) == (None if expected is None else expected * 1e9)


def test_the_profile_comes_before_a_model_and_after_a_size() -> None:
    def of(name: str) -> float | None:
        return gpu_bytes(SlurmConfig.model_validate({"gpu_type": name, "node": {"gpu_gb": 94}}))

    assert (of("h100"), of("a100"), of("a100_80gb"), of("a100_3g.20gb")) == (94e9, 94e9, 80e9, 20e9)
