"""What actor and critic share: a sharded model with its optimizer, and the updates of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.common import OptimConfig
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.workers.packed_shard import MicroBatch, PackedShard
from hpc_rl.training import guards
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.checkpoints.background import BackgroundWriter
from hpc_rl.training.models.causal_lm import PackedModel
from hpc_rl.training.optim import build_optimizer, clip_gradients, lr_factor, set_lr
from hpc_rl.training.parallel import sharding
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Model = TypeVar("Model", bound=PackedModel)
Columns = dict[str, torch.Tensor]
"""Flat token columns of a shard by their names in rl/loop/experience.py, float32 [N]."""
Sums = dict[str, float]
"""Sums over a rank's tokens and updates; the driver adds them up over ranks and divides."""
ROUTER = "router/"
"""Prefix of the names of a mixture of experts' sums, which are equal on all ranks."""
Parts = dict[str, list[torch.Tensor]]
"""The summands of each sum, scalars on the device: reading each one at once would make the GPU wait for the host."""


class Learner(ABC, Generic[Model]):
    """One trained model on one rank.

    Args:
        model: loaded by training.loading.
    """

    def __init__(self, name: str, model: Model, optim: OptimConfig, config: PpoConfig, world: World) -> None:
        self.name = name
        self.config = config
        self.world = world
        self.optim = optim
        self.model = model
        self.optimizer = build_optimizer(self.model, optim)
        self.offload = ModelOffload(config.trainer.offload, model, self.optimizer)
        self._writer = BackgroundWriter(world)

    @abstractmethod
    def loss(self, micro: MicroBatch, columns: Columns, parts: Parts) -> torch.Tensor:
        """Return this micro-batch's share of its mini-batch's loss, and add what the metrics need to `parts`.

        Args:
            columns: token columns of this micro-batch.
        """

    def update(self, held: PackedShard, columns: Columns, step: int, total_steps: int, epochs: int) -> Sums:
        """Make some passes over the held responses, with one optimizer step per mini-batch.

        Args:
            step: number of the run's step, starting at 0; with total_steps it determines the learning rate.
        """
        lr = self.optim.lr * lr_factor(self.optim, step, total_steps)
        set_lr(self.optimizer, lr)
        sums: Sums = {"updates": 0.0, "grad_norm": 0.0, "lr": lr}
        parts: Parts = {}
        with self.offload.computing(changed=True):
            for mini_batch in held.mini_batches * epochs:
                loss, norm = self._step(mini_batch, columns, parts, step + 1)
                sums["updates"] += 1
                sums["grad_norm"] += norm
                sums["loss"] = sums.get("loss", 0.0) + loss
        return sums | _add_up(parts) | self._router_sums(sums["updates"])

    def _router_sums(self, updates: float) -> Sums:
        """Return the metrics of a mixture of experts over all of these updates, times their number."""
        if self.model.routers is None:
            return {}
        found = self.model.routers.take_metrics(self.world)
        return {f"{ROUTER}{name}": updates * value for name, value in found.items()}

    def save(self, path: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Begin to write model and optimizer to a folder; `saved` waits. Every rank calls this."""
        background = self.config.trainer.save_async
        with self.offload.whole():
            found = model_state.snapshot(self.model, self.optimizer, tokenizer, self.world, copy=background)
            self._writer.start(f"checkpoint {path}", lambda own: model_state.write(path, found, own))
            if not background:
                self._writer.wait()

    def saved(self) -> None:
        """Wait until the latest `save` is complete. Raises RunError if it failed, or took too long."""
        self._writer.wait()

    def load(self, path: Path) -> None:
        """Read model and optimizer from a folder. Every rank calls this."""
        with self.offload.whole(changed=True):
            model_state.read(path, self.model, self.optimizer, self.world)

    def _step(self, mini_batch: list[MicroBatch], columns: Columns, parts: Parts, number: int) -> tuple[float, float]:
        """Take one optimizer step; return this rank's loss and the norm of the gradient."""
        factor = sharding.loss_factor(self.model, self.world)
        losses = []
        with guards.explain_out_of_memory(f"step {number}, update of the {self.name}"):
            for index, micro in enumerate(mini_batch):
                sharding.begin_micro_batch(self.model, self.config.trainer, last=index == len(mini_batch) - 1)
                mine = {name: column[micro.tokens] for name, column in columns.items()}
                loss = self.loss(micro, mine, parts)
                (loss * factor).backward()
                losses.append(loss.detach())
                heart.beat()
            sharding.reshard(self.model)
            total = sum(torch.stack(losses).tolist())
            norm = clip_gradients(self.model.parameters(), self.optim.clip_grad)
            guards.refuse_not_finite(number, dict(enumerate(self.world.gather_rows([total])[:, 0].tolist())), norm)
            self.offload.step()
            self.optimizer.zero_grad(set_to_none=True)
        return total, norm


def add(parts: Parts, **values: torch.Tensor) -> None:
    """Add the sum of each tensor to the summands of its name."""
    for name, value in values.items():
        parts.setdefault(name, []).append(value.detach().sum().float())


def _add_up(parts: Parts) -> Sums:
    """Add up in float64. The host waits for the device once."""
    if not parts:
        return {}
    numbers = iter(torch.stack([value for values in parts.values() for value in values]).tolist())
    return {name: sum(next(numbers) for _ in values) for name, values in parts.items()}
