"""The table of vendors: detection with programs and device files that are made up, and the names that Ray uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_rl.system.accelerators import (
    ACCELERATORS,
    DEVICES,
    ENV_RAY_HIDES,
    collective_defaults,
    extension_of,
    find_accelerators,
    of_one_vendor,
    ray_resource,
    show_assigned,
    unrestricted_by_ray,
    visible_devices,
    visible_variable,
)


def program(folder: Path, name: str, lines: list[str], code: int = 0) -> dict[str, str]:
    """Write a program that prints these lines, and return an environment that finds it."""
    file = folder / name
    file.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n")
    file.chmod(0o755)
    return {"PATH": str(folder)}


def test_nvidias_program_lists_gpus(tmp_path: Path) -> None:
    listed = ["GPU 0: NVIDIA A100 (UUID: GPU-1)", "  MIG 1g.5gb Device 0: (UUID: MIG-1)", "GPU 1: NVIDIA A100"]
    environ = program(tmp_path, "nvidia-smi", listed)
    assert find_accelerators(environ, tmp_path) == ("cuda", 2)
    for visible, count in {"0,2": 2, "": 0, "-1": 0, "NoDevFiles": 0, "MIG-1,MIG-2,MIG-3": 3}.items():
        expected = ("cuda", count) if count else ("cpu", 0)
        assert find_accelerators({**environ, "CUDA_VISIBLE_DEVICES": visible}, tmp_path) == expected
    assert find_accelerators(program(tmp_path, "nvidia-smi", [], code=9), tmp_path) == ("cpu", 0)


def test_intels_program_lists_gpus(tmp_path: Path) -> None:
    environ = program(tmp_path, "xpu-smi", ["Device ID", "0", "1"])
    assert find_accelerators(environ, tmp_path) == ("xpu", 2)
    assert find_accelerators({"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, tmp_path) == ("xpu", 3)


def test_device_files_of_other_vendors(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    (dev / "dri").mkdir(parents=True)
    for name in ("dri/renderD128", "dri/renderD129", "davinci0"):
        (dev / name).touch()
    nowhere = {"PATH": str(tmp_path)}
    assert find_accelerators(nowhere, tmp_path) == ("cpu", 0), "an integrated GPU is not AMD's compute driver"
    (dev / "davinci_manager").touch()
    assert find_accelerators(nowhere, tmp_path) == ("npu", 1)
    (dev / "kfd").touch()
    assert find_accelerators(nowhere, tmp_path) == ("cuda", 2)


def test_each_library_gets_the_interface_in_its_own_words() -> None:
    assert collective_defaults("cuda", "ib0") == {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert collective_defaults("npu", "ib0") == {"HCCL_SOCKET_IFNAME": "=ib0"}
    assert collective_defaults("xpu", "ib0") == {"CCL_LOG_LEVEL": "warn", "CCL_KVS_IFACE": "ib0"}
    assert collective_defaults("cpu", "ib0") == {}
    assert collective_defaults("cuda") == collective_defaults("cuda", "lo") == {"NCCL_DEBUG": "WARN"}


def test_devices_of_a_process() -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "4,5"}, "cuda") == ["4", "5"]
    assert visible_devices({"ROCR_VISIBLE_DEVICES": "1"}, "cuda") == ["1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "4,5"}, "npu") is None
    assert visible_variable({"HIP_VISIBLE_DEVICES": "0"}, "cuda") == "HIP_VISIBLE_DEVICES"
    assert [visible_variable({}, device) for device in DEVICES[:3]] == [
        "CUDA_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
    ]
    assert [ray_resource(device) for device in DEVICES] == ["GPU", "NPU", "GPU", "CPU"]
    assert [extension_of(device) for device in DEVICES] == [None, "torch_npu", None, None]


def test_ray_uses_the_names_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    managers = pytest.importorskip("ray._private.accelerators")
    by_vendor = {
        "NVIDIA": managers.NvidiaGPUAcceleratorManager,
        "AMD": managers.AMDGPUAcceleratorManager,
        "Intel": managers.IntelGPUAcceleratorManager,
        "Huawei Ascend": managers.NPUAcceleratorManager,
    }
    for row in ACCELERATORS:
        manager = by_vendor[row.vendor]
        assert (manager.get_resource_name(), manager.get_visible_accelerator_ids_env_var()) == (
            row.resource,
            row.visible[0],
        )
        environ: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", environ)
        manager.set_current_process_visible_accelerator_ids(["3"])
        assert environ == {row.visible[0]: "3"}
        assert visible_devices(environ, row.device) == ["3"]
        environ.clear()
        environ[f"RAY_EXPERIMENTAL_NOSET_{row.noset[0]}"] = "1"
        manager.set_current_process_visible_accelerator_ids(["3"])
        assert row.visible[0] not in environ
        assert unrestricted_by_ray(environ) == row


def test_a_process_without_devices_sees_those_of_no_vendor() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4,5", "PATH": "/bin"}
    show_assigned(environ, [])
    assert environ == {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "-1",
        "ZE_AFFINITY_MASK": "-1",
        "ASCEND_RT_VISIBLE_DEVICES": "-1",
        "PATH": "/bin",
    }
    assert all(visible_devices(environ, device) == [] for device in DEVICES[:3])


def test_a_process_sees_its_own_devices_also_if_the_user_stops_ray() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3"}
    show_assigned(environ, ["3"])
    assert environ == {"CUDA_VISIBLE_DEVICES": "3"}  # Ray has done it
    noset = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    environ = {**noset, "CUDA_VISIBLE_DEVICES": "4,5,7"}
    show_assigned(environ, ["5", "7"])
    assert environ == {**noset, "CUDA_VISIBLE_DEVICES": "5,7"}


def test_ray_has_the_variable_that_hides_devices() -> None:
    accelerators = pytest.importorskip("ray._private.accelerators")
    assert accelerators.RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR == ENV_RAY_HIDES


def test_zero_does_not_stop_ray() -> None:
    assert unrestricted_by_ray({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}) is None


def test_torch_has_the_devices_and_their_backends() -> None:
    torch = pytest.importorskip("torch")
    backends = torch.distributed.Backend.default_device_backend_map
    for row in ACCELERATORS:
        if row.extension is None:
            assert torch.get_device_module(row.device).get_rng_state
            assert row.device in backends


# What Slurm sets on a node whose GPUs it does not detect (gres.conf without AutoDetect).
BY_SLURM = {
    name: "2,3" for name in ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
}
NVIDIA, AMD = "dev/nvidiactl", "dev/kfd"


@pytest.mark.parametrize(
    ("device", "driver", "environ", "expected"),
    [
        ("cuda", NVIDIA, BY_SLURM, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("cuda", AMD, BY_SLURM, {"HIP_VISIBLE_DEVICES": "2,3"}),
        ("cuda", None, BY_SLURM, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("xpu", None, BY_SLURM, {"ZE_AFFINITY_MASK": "2,3"}),
        ("npu", None, BY_SLURM, {}),
        ("cpu", NVIDIA, BY_SLURM, BY_SLURM),
        ("cuda", AMD, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "3"}),
        ("cuda", AMD, {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"}, {"HIP_VISIBLE_DEVICES": "2,3"}),
        ("cuda", AMD, {"CUDA_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "1"}),
        ("cuda", AMD, {"ROCR_VISIBLE_DEVICES": ""}, {"HIP_VISIBLE_DEVICES": ""}),
        ("cuda", AMD, {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": ""}, {"HIP_VISIBLE_DEVICES": "-1"}),
        ("cuda", None, {"ROCR_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": "1"}),
        ("cuda", None, {}, {}),
    ],
)
def test_each_process_gets_the_variables_of_one_vendor(
    tmp_path: Path, device: str, driver: str | None, environ: dict[str, str], expected: dict[str, str]
) -> None:
    (tmp_path / "dev").mkdir()
    if driver is not None:
        (tmp_path / driver).touch()
    found, said = of_one_vendor({**environ, "PATH": "/bin"}, device, tmp_path)
    assert found == {**expected, "PATH": "/bin"}
    assert bool(said) == (found != {**environ, "PATH": "/bin"})
    assert all(f"{name}={value}" in said[0] for name, value in (environ | expected).items() if environ != expected)
    again, silent = of_one_vendor(found, device, tmp_path)
    assert (again, silent) == (found, []), "a process may start another one"


def test_the_devices_are_those_that_the_node_has_whatever_slurm_sets(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    environ = BY_SLURM | program(tmp_path / "bin", "xpu-smi", ["0", "1", "2", "3"])
    assert find_accelerators(environ, tmp_path) == ("xpu", 2)
    environ = BY_SLURM | program(tmp_path / "bin", "nvidia-smi", ["GPU 0: x"]) | {"ZE_AFFINITY_MASK": ""}
    assert find_accelerators(environ, tmp_path) == ("cuda", 2)
