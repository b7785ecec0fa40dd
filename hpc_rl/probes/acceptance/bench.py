"""What the checks share: the job's layout, the small model with its data, and configurations of training runs."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.config.compose import validate
from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.sft import SftConfig
from hpc_rl.config.tree import put
from hpc_rl.errors import RunError, UserError
from hpc_rl.formats.acceptance import ENV_SCRATCH
from hpc_rl.probes.acceptance.models import LARGE, SMALL


class Skip(UserError):
    """The check does not apply here; the message gives the reason."""


class Failed(RunError):
    """The check has found a wrong result; the message states the numbers."""


@dataclass(frozen=True)
class Layout:
    """The devices of the job, and what its Python can import."""

    device: str
    nodes: int
    processes: int
    """Per node: one for each GPU, or CPU processes."""
    packages: frozenset[str]

    @property
    def size(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.processes

    @property
    def uses_gpus(self) -> bool:
        return self.device != "cpu"

    @classmethod
    def here(cls, device: str, nodes: int, processes: int) -> Layout:
        wanted = {"liger_kernel", "ray", "tensordict", *(spec.package for spec in ENGINES.values() if spec.package)}
        found = frozenset(name for name in wanted if importlib.util.find_spec(name) is not None)
        return cls(device, nodes, processes, found)


@dataclass
class Bench:
    """The place in which the checks run."""

    layout: Layout
    folder: Path
    """A folder that all nodes share, for run directories."""
    scratch: Path
    """The folder of the models and the data, with the same path on every node's own disk."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Results that several checks of one process use."""

    @classmethod
    def here(cls, layout: Layout, folder: Path) -> Bench:
        return cls(layout, folder, Path(os.environ[ENV_SCRATCH]))

    def sft(self, changes: Mapping[str, Any] | None = None) -> SftConfig:
        """Return the configuration of a short supervised run on the small model, with some keys changed."""
        settings = {
            **self._common(),
            "data.max_length": 256,
            "data.train_batch_size": 4 * self.layout.size,
            "optim.lr": 1e-3,
            "optim.warmup_ratio": 0.0,
            "optim.clip_grad": 0.0,
            "trainer.micro_tokens": 256,
        }
        found = _validated("sft", {**settings, **(changes or {})})
        assert isinstance(found, SftConfig)
        return found

    def ppo(self, changes: Mapping[str, Any] | None = None) -> PpoConfig:
        """Return the configuration of a short run of reinforcement learning, with some keys changed.

        The rewards depend on the text of a response, so that a model with random weights has a signal. The learning
        rate is high, so that one update changes the probabilities far more than rounding does.
        """
        settings = {
            **self._common(),
            "data.max_prompt_length": 96,
            "data.max_response_length": 32,
            "data.train_batch_size": max(4, self.layout.size),
            "rollout.n": 4,
            "rollout.calculate_log_probs": True,
            "data.answer_key": None,
            "actor.optim.lr": 1e-2,
            "actor.optim.warmup_ratio": 0.0,
            "algorithm.advantage": "grpo",
            "reward.function": f"{__package__}.rewards:characters",
            "reward.workers": 1,
            "trainer.micro_tokens": 2048,
            "trainer.val_before_train": False,
            "ray.start_timeout_s": 600 if self.layout.uses_gpus else 120,
        }
        found = _validated("ppo", {**settings, **(changes or {})})
        assert isinstance(found, PpoConfig)
        return found

    def large(self) -> str:
        """Return the model and data on which the speed is measured: the large ones on GPUs only."""
        return LARGE if self.layout.uses_gpus else SMALL

    def model_keys(self, size: str) -> dict[str, Any]:
        """Return the keys that choose a model and its data."""
        return {"model.path": str(self.scratch / size), "data.train_files": [str(self.scratch / f"{size}.jsonl")]}

    def _common(self) -> dict[str, Any]:
        return {
            **self.model_keys(SMALL),
            "trainer.device": self.layout.device,
            "trainer.nnodes": self.layout.nodes,
            "trainer.n_gpus_per_node": self.layout.processes,
            "trainer.total_training_steps": 4,
            "trainer.save_minutes": 0,
            "trainer.logger": [],
        }


def worst(values: Iterable[float]) -> float:
    """Return the largest value, or infinity if one is not a number (max() may skip it)."""
    return max(math.inf if math.isnan(value) else value for value in values)


def _validated(job: str, settings: Mapping[str, Any]) -> Any:
    """Return a configuration from dotted keys; job files and site profiles of the user do not apply."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        put(tree, key, value)
    return validate(job, tree)
