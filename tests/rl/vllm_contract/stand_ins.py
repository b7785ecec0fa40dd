"""vLLM on CPUs whichever wheel it is from, and without packages of which only names are needed.

To import Qwen3.5, vLLM imports torchvision, and mistral_common for Mistral 3; these tests install neither.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABSENT = ("torchvision", "mistral_common")


def stand_in() -> None:
    """Call this before anything else imports vLLM."""
    sys.meta_path.append(_Finder())  # asked last
    import vllm.platforms
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    lazy: Any = registry._LazyRegisteredModel  # which would start a process to look at each class
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        return _named(name)


class _Module(ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        return _named(name)


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Names(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
