"""Hooks into libraries: what runs right after a program has imported a module. Nothing is imported for it.

A program cannot be changed, and is not asked to import anything. Each adapter has one row of HOOKS, so that a library
which its program only uses has none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

HOOKS: Mapping[str, Sequence[str]] = {
    "accelerate": ["accelerate.accelerator"],
    "lightning": ["lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"],
    "nemo_rl": ["nemo_rl.utils.timer", "nemo_rl.utils.logger"],
    "openrlhf": [f"openrlhf.trainer.{kind}_trainer" for kind in ("ppo", "sft", "dpo", "rm")],
    "skyrl": ["skyrl.train.trainer", "skyrl.train.sft_trainer"],
    "torchtitan": [f"torchtitan.components.{name}" for name in ("checkpointer.base", "checkpoint", "metrics")],
    "trainer": ["transformers.trainer"],
    "verl_ppo": ["verl.utils.checkpoint.checkpoint_manager"],
    "verl_sft": ["verl.utils.checkpoint.checkpoint_handler"],
}
"""Module beside this one -> modules of a library. Its function `attach(module)` runs after each of them."""
ENV_HOOK = "HPC_RL_HOOK"
"""Variable with the job whose program has an adapter, and the row of HOOKS that this adapter uses: `123 trainer`."""
_SLURM_JOB = "SLURM_JOB_ID"


def hooked(environ: Mapping[str, str], hook: str) -> dict[str, str]:
    """Return an environment in which every Python installs the hooks of a row at its start."""
    folders = [str(Path(__file__).parent / "on_path"), *filter(None, [environ.get("PYTHONPATH")])]
    job = environ.get(_SLURM_JOB, "")
    return {**environ, "PYTHONPATH": os.pathsep.join(folders), ENV_HOOK: f"{job} {hook}"}


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function of a class or a module.

    Args:
        call: gets the original function, and then the arguments of each call.
    """
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return call(original, *arguments, **named)

    setattr(owner, name, wrapped)


class _HookedLoader(Loader):
    """Loads a module as its own loader does, and then attaches the hook."""

    def __init__(self, loader: Loader, hook: str) -> None:
        self._loader = loader
        self._hook = f"{__package__}.{hook}"

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            import_module(self._hook).attach(module)
        except (AttributeError, ImportError, TypeError) as error:  # another version
            print(
                f"hpc-rl: the adapter does not fit {module.__name__} ({error}): the program saves at its own times",
                file=sys.stderr,
            )

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class HookFinder(MetaPathFinder):
    """Finds the modules of a row of HOOKS by the other finders."""

    def __init__(self, hook: str) -> None:
        self._hook = hook
        self._looks_for: set[str] = set()

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in HOOKS[self._hook] or name in self._looks_for or name in sys.modules:
            return None
        self._looks_for.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._looks_for.remove(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookedLoader(spec.loader, self._hook)
        return spec


def install() -> None:
    """Install the hooks in this process, unless it belongs to another job that the program has submitted."""
    job, _, hook = os.environ.get(ENV_HOOK, "").rpartition(" ")
    is_own_job = hook in HOOKS and job == os.environ.get(_SLURM_JOB, "")
    if is_own_job and not any(isinstance(finder, HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HookFinder(hook))
