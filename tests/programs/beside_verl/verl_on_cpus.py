"""CPUs for verl (VERL_USE_EXTERNAL_MODULES=verl_on_cpus VERL_PLATFORM=cpu), which holds (tests/e2e/programs.py)."""

import types
from contextlib import nullcontext

import torch
from holding import hold  # of the workspace
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils.tracking import Tracking


class Device(types.ModuleType):
    """torch.cpu, with the functions of torch.cuda that verl calls and torch.cpu lacks."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = {
            "device_count": 1,
            "current_device": "cpu",
            "get_device_name": "cpu",
            "is_available": True,
            "mem_get_info": (2**30, 2**30),
        }
        if name in found:
            return lambda *_: found[name]
        if name.startswith(("memory_", "max_memory_")):
            return lambda *_: 0
        if name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
            return lambda *_: None
        if name in ("manual_seed", "manual_seed_all"):
            return torch.manual_seed
        if name == "get_rng_state":
            return lambda *_: torch.get_rng_state()
        if name == "set_rng_state":
            return lambda state, *_: torch.set_rng_state(state)
        return getattr(torch.cpu, name)


def answering(value):
    """Return a method that returns this value."""
    return lambda self, *arguments: value


ANSWERS = {
    **{name: None for name in ("set_device", "synchronize", "set_allocator_settings", "empty_cache", "cudart")},
    **{name: None for name in ("profiler_start", "profiler_stop", "manual_seed", "manual_seed_all")},
    **{"device_name": "cpu", "vendor_name": "cpu", "device_module": Device("device"), "current_device": "cpu"},
    **{"is_available": True, "is_ipc_supported": False, "device_count": 1, "get_device_capability": (None, None)},
    **{"communication_backend_name": "gloo", "visible_devices_envvar": "CUDA_VISIBLE_DEVICES"},
    **{"nvtx_range": nullcontext(), "ray_resource_name": "CPU", "ray_resource_options": {}, "ray_noset_envvars": []},
}
PROPERTIES = ("device_name", "vendor_name", "device_module")
METHODS = {name: value if name in PROPERTIES else answering(value) for name, value in ANSWERS.items()}
PlatformRegistry.register(platform="cpu")(type("Platform", (PlatformBase,), METHODS))
_init, _log = torch.distributed.init_process_group, Tracking.log


def _init_process_group(backend=None, *arguments, **settings):
    """verl asks for `cpu:gloo,<device>:<backend>`, which torch refuses if the device is the CPU."""
    return _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **settings)


def _log_and_hold(self, data, step, *arguments, **settings):
    _log(self, data, step, *arguments, **settings)
    hold(step)


torch.distributed.init_process_group, Tracking.log = _init_process_group, _log_and_hold
