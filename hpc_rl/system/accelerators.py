"""The kinds of accelerators: one table with everything that depends on the vendor, and their detection on this machine.

To add a vendor whose devices torch supports, add a row to `ACCELERATORS`. Memory and speed of each
model are in `hpc_rl.formats.gpu_models`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DeviceName = Literal["cuda", "npu", "xpu", "cpu"]
DEVICES: tuple[DeviceName, ...] = ("cuda", "npu", "xpu", "cpu")
"""torch's names of the devices that a job can run on."""
LIST_TIMEOUT_S = 20
"""Time limit of the program: a faulty driver answers late or never."""


@dataclass(frozen=True)
class Accelerator:
    """Describe the devices of one vendor."""

    vendor: str
    device: DeviceName
    """torch's name of the devices. AMD's are called cuda too."""
    visible: tuple[str, ...]
    """Variables that list the devices of a process, the one that Ray sets first."""
    noset: tuple[str, ...]
    """Variables with which a user stops Ray from setting it (ray/_private/accelerators), without their prefix."""
    interface: str
    """Variable of the collective library for the network interface, with the form of an exact name."""
    hidden: str = "-1"
    """Value of the variables in `visible` that hides all devices. For HIP, an empty value hides all
    (rocclr/device/rocm/rocdevice.cpp). For CUDA, vLLM can read no other than -1 (vllm/platforms/interface.py)."""
    collectives: Mapping[str, str] = field(default_factory=dict)
    """Other variables of the collective library."""
    resource: str = "GPU"
    """Ray's name of the resource."""
    extension: str | None = None
    """Package that adds the devices to torch."""
    command: tuple[str, ...] = ()
    """Program that lists the devices of a node, if the vendor has one with a stable form."""
    line: str = ""
    """Pattern of the lines of its output that stand for a device."""
    files: tuple[str, ...] = ()
    """Patterns of device files that exist on a node with devices. The last one matches a file for each device."""
    driver: str = ""
    """A file that exists where the vendor's driver does, and not for graphics alone."""


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator(
        vendor="NVIDIA",
        device="cuda",
        visible=("CUDA_VISIBLE_DEVICES",),
        noset=("CUDA_VISIBLE_DEVICES",),
        hidden="",
        interface="NCCL_SOCKET_IFNAME==",  # without the second sign, NCCL takes the name as a prefix
        collectives={"NCCL_DEBUG": "WARN"},
        command=("nvidia-smi", "-L"),
        line=r"GPU ",
        driver="dev/nvidiactl",
    ),
    Accelerator(
        vendor="AMD",
        device="cuda",
        visible=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        noset=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        interface="NCCL_SOCKET_IFNAME==",  # RCCL reads NCCL's variables
        collectives={"NCCL_DEBUG": "WARN"},
        files=("dev/kfd", "dev/dri/renderD*"),
        driver="dev/kfd",
    ),
    Accelerator(
        vendor="Intel",
        device="xpu",
        visible=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
        noset=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
        interface="CCL_KVS_IFACE=",
        collectives={"CCL_LOG_LEVEL": "warn"},
        command=("xpu-smi", "discovery", "--dump", "1"),
        line=r"\d+",
    ),
    Accelerator(
        vendor="Huawei Ascend",
        device="npu",
        visible=("ASCEND_RT_VISIBLE_DEVICES",),
        noset=("ASCEND_RT_VISIBLE_DEVICES",),
        interface="HCCL_SOCKET_IFNAME==",
        resource="NPU",
        extension="torch_npu",
        files=("dev/davinci_manager", "dev/davinci[0-9]*"),
        driver="dev/davinci_manager",
    ),
)
ENV_RAY_HIDES = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Variable with which Ray hides all devices (1), or leaves those of its node (0), to a process without any
(set_visible_accelerator_ids in ray/_private/utils.py). Its default depends on the version: 1 in 2.52, 0 in 2.60."""
_ANY_VENDOR = ("GPU_DEVICE_ORDINAL",)
"""Variables that Slurm sets beside those of the table. HIP applies this one to the devices that the others leave."""
_NOSET = "RAY_EXPERIMENTAL_NOSET_"
_NONE = ("", "-1", "NoDevFiles")
"""Values of the variables that hide all devices."""


def rows_of(device: str) -> list[Accelerator]:
    """Return the vendors whose devices have this name in torch; none for cpu."""
    return [row for row in ACCELERATORS if row.device == device]


def extension_of(device: str) -> str | None:
    """Return the package that adds these devices to torch, or None if torch has them."""
    return next((row.extension for row in rows_of(device)), None)


def ray_resource(device: str) -> str:
    """Return Ray's name of the resource: CPU, GPU or NPU."""
    return next((row.resource for row in rows_of(device)), "CPU")


def visible_devices(environ: Mapping[str, str], device: str) -> list[str] | None:
    """Return the devices that the environment leaves to a process; None if it does not restrict them."""
    for name in _visible_names(device):
        if name in environ:
            return _listed(environ[name])
    return None


def visible_variable(environ: Mapping[str, str], device: str) -> str:
    """Return the variable that restricts a process to some devices: the one that is set, or the usual one."""
    names = list(_visible_names(device))
    return next((name for name in names if name in environ), names[0])


def unrestricted_by_ray(environ: Mapping[str, str]) -> Accelerator | None:
    """Return the vendor whose devices Ray does not limit because of a variable of the user, or None.

    https://docs.ray.io/en/latest/ray-core/scheduling/accelerators.html
    """
    for row in ACCELERATORS:
        if any(environ.get(_NOSET + name, "") not in ("", "0") for name in row.noset):
            return row
    return None


def show_assigned(environ: MutableMapping[str, str], assigned: Sequence[str]) -> None:
    """Let a process see the devices that Ray assigned to it and no others. Call this before a library looks for them.

    Ray 2.60 leaves all devices of the node to a process without any. Ray 2.52 hides them by an empty list, which
    does not hide them from HIP. Both change nothing if the user has disabled this (`unrestricted_by_ray`).

    Args:
        assigned: their ids; empty if the process has none.
    """
    if not assigned:
        environ.update({row.visible[0]: row.hidden for row in ACCELERATORS})
    elif row := unrestricted_by_ray(environ):
        environ[row.visible[0]] = ",".join(assigned)


def of_one_vendor(environ: Mapping[str, str], device: str, root: Path = Path("/")) -> tuple[dict[str, str], list[str]]:
    """Return the environment with one variable for the devices, and sentences on what was changed.

    Where Slurm does not detect GPUs (gres.conf without AutoDetect), it sets the variables of all vendors. Ray changes
    only that of its own vendor in an actor, and HIP applies several, one to the result of the other.
    """
    row = _vendor(environ, device, root)
    if row is None:
        return dict(environ), []
    every = [name for each in ACCELERATORS for name in each.visible] + list(_ANY_VENDOR)
    visible = _joined(environ, row)
    kept = row.visible if len(visible) > 1 else tuple(visible)
    changed = [name for name in every if name in environ and environ[name] != visible.get(name)]
    found = {name: value for name, value in environ.items() if name not in every} | visible
    now = " and ".join(f"{name}={visible[name]}" for name in kept if name in visible) or "none of them"
    listed = ", ".join(f"{name}={environ[name]}" for name in changed)
    return found, [f"the devices are those of {row.vendor}: {now} holds, instead of {listed}"] if changed else []


def _joined(environ: Mapping[str, str], row: Accelerator) -> dict[str, str]:
    """Return the variables in which the devices of this vendor are listed; for AMD the one that Ray and HIP read."""
    if row.vendor != "AMD":
        return {name: environ[name] for name in row.visible if name in environ}
    outer = environ.get("ROCR_VISIBLE_DEVICES")
    inner = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES") if outer is None else None)
    if outer is None or inner is None:
        value = inner if outer is None else outer
        return {} if value is None else {row.visible[0]: value}
    devices, places = _listed(outer), _listed(inner)
    if inner != outer and all(place.isdigit() and int(place) < len(devices) for place in places):
        devices = [devices[int(place)] for place in places]  # HIP counts within what ROCR shows
    return {row.visible[0]: ",".join(devices) or row.hidden}


def _vendor(environ: Mapping[str, str], device: str, root: Path) -> Accelerator | None:
    """Return the vendor of these devices: by the driver on this node, or else by the variable that is set."""
    rows = rows_of(device)
    if len(rows) < 2:
        return rows[0] if rows else None
    driven = [row for row in rows if (root / row.driver).exists()]
    named = [row for row in rows if any(name in environ for name in row.visible)]
    return next(iter(driven if len(driven) == 1 else named), None)


def collective_defaults(device: str, interface: str | None = None) -> dict[str, str]:
    """Return variables of the collective library of these devices: NCCL, RCCL, oneCCL or HCCL.

    Args:
        interface: the network interface that the user configured; None to let the library choose. It finds fast
            networks by itself, and the interface of the default route is often a slow one.
    """
    found: dict[str, str] = {}
    for row in rows_of(device):
        found |= row.collectives
        if interface not in (None, "lo"):  # NCCL rejects the loopback interface
            name, _, sign = row.interface.partition("=")
            found[name] = f"{sign}{interface}"
    return found


def find_accelerators(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[DeviceName, int]:
    """Return the kind and the number of the devices of this machine that a process may use; ("cpu", 0) for none."""
    named = [row for row in ACCELERATORS if any(name in environ for name in row.visible)]
    rows: Sequence[Accelerator] = ACCELERATORS
    if len(named) > 1:  # Slurm sets them all if it does not detect GPUs: what counts is what the node has
        unnamed = {name: value for name, value in environ.items() if not any(name in row.visible for row in named)}
        rows = [row for row in named if _count(row, unnamed, root)] or named
    for row in rows:
        if count := _count(row, environ, root):
            return row.device, count
    return "cpu", 0


def _count(row: Accelerator, environ: Mapping[str, str], root: Path) -> int:
    for name in row.visible:
        if name in environ:
            return len(_listed(environ[name]))
    if row.command:
        return _count_lines(row, environ)
    matches = [list(root.glob(pattern)) for pattern in row.files]
    return len(matches[-1]) if all(matches) else 0


def _count_lines(row: Accelerator, environ: Mapping[str, str]) -> int:
    program = shutil.which(row.command[0], path=environ.get("PATH"))
    if program is None:
        return 0
    try:
        listed = subprocess.run(
            [program, *row.command[1:]], capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(re.match(row.line, line) is not None for line in listed.stdout.splitlines())


def _visible_names(device: str) -> Iterator[str]:
    return (name for row in rows_of(device) for name in row.visible)


def _listed(value: str) -> list[str]:
    return [name for name in value.split(",") if name.strip() not in _NONE]
