"""The models of GPUs, by the names of clusters and of torch."""

from __future__ import annotations

import pytest

from hpc_rl.formats.gpu_models import is_part, named_gb, reported, requested


@pytest.mark.parametrize(
    ("name", "tflops", "bandwidth"),
    [
        ("h100", 989, 3.35),
        ("nvidia_h100_80gb_hbm3", 989, 3.35),
        ("H100-NVL", 835, 3.9),
        ("h100_pcie", 756, 2.0),
        ("H200", 989, 4.8),
        ("gh200", 989, 4.0),
        ("a100_80gb", 312, 1.555),
        ("a10", 125, 0.6),
        ("a10g", 125, 0.6),
        ("l40s", 362, 0.864),
        ("l40", 181, 0.864),
        ("l4", 121, 0.3),
        ("rtx4090", 165.2, 1.008),
        ("mi250x", 191.5, 1.6),
    ],
)
def test_names_of_clusters(name: str, tflops: float, bandwidth: float) -> None:
    model = requested(name)
    assert model is not None
    assert (model.tflops, model.bandwidth) == (tflops, bandwidth)


@pytest.mark.parametrize("name", ["", "gpu", "a1000", "xh100"])
def test_names_that_leave_the_model_open(name: str) -> None:
    assert requested(name) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A10G", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GeForce RTX 3090", 71),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_names_that_torch_reports(name: str, tflops: float) -> None:
    model = reported(name)
    assert model is not None
    assert model.tflops == tflops


def test_a_device_that_is_not_in_the_table() -> None:
    assert reported("NVIDIA GeForce GTX 1080") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a100_80gb", 80.0),
        ("A100_3g.20gb", 20.0),
        ("h100", 80.0),
        ("a100", None),
        ("gh200_480gb", None),
        ("", None),
    ],
)
def test_memory_by_name(name: str, expected: float | None) -> None:
    assert named_gb(name) == expected


@pytest.mark.parametrize(
    ("name", "gb", "part"),
    [
        ("h100-47", 47, True),
        ("h100-96", 96, False),
        ("a100-40", 40, False),
        ("A100_80", 80, False),
        ("a100-sxm4-80", 80, False),
        ("v100-32", 32, False),
        ("h100-8", 80, False),
        ("rtx-3090", 24, False),
        ("gh200-480", None, False),
        ("a100_1g.5gb", 5, True),
    ],
)
def test_bare_numbers_are_memory_and_small_ones_are_parts(name: str, gb: float | None, part: bool) -> None:
    assert (named_gb(name), is_part(name)) == (gb, part)
