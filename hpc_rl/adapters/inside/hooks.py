"""Hooks into libraries: what runs right after a program has imported a module. Nothing is imported for it.

A program cannot be changed, and is not asked to import anything. HOOKS has a row for each library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

HOOKS: Mapping[str, str] = {
    "transformers.trainer": "hpc_rl.adapters.inside.trainer",
    "lightning.pytorch.trainer.trainer": "hpc_rl.adapters.inside.lightning",
    "pytorch_lightning.trainer.trainer": "hpc_rl.adapters.inside.lightning",
    "accelerate.accelerator": "hpc_rl.adapters.inside.accelerate",
    "torchtitan.components.checkpointer.base": "hpc_rl.adapters.inside.torchtitan",
    "torchtitan.components.checkpoint": "hpc_rl.adapters.inside.torchtitan",
    "torchtitan.components.metrics": "hpc_rl.adapters.inside.torchtitan",
    "verl.utils.checkpoint.checkpoint_manager": "hpc_rl.adapters.inside.verl_ppo",
    "verl.utils.checkpoint.checkpoint_handler": "hpc_rl.adapters.inside.verl_sft",
    "openrlhf.trainer.ppo_trainer": "hpc_rl.adapters.inside.openrlhf",
    "openrlhf.trainer.sft_trainer": "hpc_rl.adapters.inside.openrlhf",
    "openrlhf.trainer.dpo_trainer": "hpc_rl.adapters.inside.openrlhf",
    "openrlhf.trainer.rm_trainer": "hpc_rl.adapters.inside.openrlhf",
    "nemo_rl.utils.timer": "hpc_rl.adapters.inside.nemo_rl",
    "nemo_rl.utils.logger": "hpc_rl.adapters.inside.nemo_rl",
    "skyrl.train.trainer": "hpc_rl.adapters.inside.skyrl",
    "skyrl.train.sft_trainer": "hpc_rl.adapters.inside.skyrl",
}
"""Module of a library -> module of ours, whose function `attach(module)` runs after the library's module."""
ENV_JOB = "HPC_RL_ADAPTED_JOB"
"""Variable with the job whose program has an adapter."""
_SLURM_JOB = "SLURM_JOB_ID"


def job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what `install` compares with the job of a process."""
    return {ENV_JOB: environ.get(_SLURM_JOB, "")}


class _HookedLoader(Loader):
    """Loads a module as its own loader does, and then attaches the hook."""

    def __init__(self, loader: Loader, hook: str) -> None:
        self._loader = loader
        self._hook = hook

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
    """Finds the modules of HOOKS by the other finders."""

    def __init__(self, hooks: Mapping[str, str]) -> None:
        self._hooks = hooks
        self._looks_for: set[str] = set()

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._hooks or name in self._looks_for or name in sys.modules:
            return None
        self._looks_for.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._looks_for.remove(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookedLoader(spec.loader, self._hooks[name])
        return spec


def install() -> None:
    """Install the hooks in this process, unless it belongs to another job that the program has submitted."""
    is_own_job = os.environ.get(ENV_JOB, "") == os.environ.get(_SLURM_JOB, "")
    if is_own_job and not any(isinstance(finder, HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HookFinder(HOOKS))
