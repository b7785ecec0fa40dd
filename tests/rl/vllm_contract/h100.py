"""vLLM on a pretended H100, for a process that calls this before anything else imports vLLM."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

GPU_BYTES = 80 << 30


def pretend_h100() -> None:
    """Replace vLLM's platform, and its compiled parts by empty modules, which nothing may call."""
    for name in ("_C", "_C_stable_libtorch", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = ModuleType(name)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return GPU_BYTES

        @classmethod
        def device_count(cls) -> int:
            return 2

        def is_cumem_allocator_available(self) -> bool:
            return True

    vllm.platforms._current_platform = H100()

    from vllm.model_executor.models import registry

    # The classes of models cannot be imported without the compiled parts.
    text: dict[str, Any] = {"architecture": "Qwen2ForCausalLM", "is_text_generation_model": True, "supports_lora": True}
    names = [field.name for field in dataclasses.fields(registry._ModelInfo)]
    info = registry._ModelInfo(**{name: text.get(name, False) for name in names})
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: info
