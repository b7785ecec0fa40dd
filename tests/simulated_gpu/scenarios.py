"""Training steps of this project on simulated GPUs, through the trainer's and the workers' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.config.training.preferences import DpoConfig
from hpc_rl.rl.loop.assignment import Shard
from hpc_rl.rl.workers.packed_shard import PackedShard, pack_shard
from hpc_rl.rl.workers.worker import MODELS
from hpc_rl.training.parallel.distributed import World
from tests.simulated_gpu.gpu import Gpu, simulated_gpus
from tests.simulated_gpu.models import loading_without_files
from tests.simulated_gpu.shapes import Shape


@dataclass(frozen=True)
class Job:
    """One rank's work in a step."""

    shape: Shape = "tiny"
    layers: int | None = None
    """Layers of the model, instead of those of the shape: fewer take less time."""
    ranks: int = 8
    gpus_per_node: int = 8
    micro_batches: int = 2
    micro_tokens: int = 4096
    length: int = 512
    """Tokens of each sample."""
    options: tuple[str, ...] = ()
    """Further options of the job file."""
    where: bool = False
    """Record which code allocates what."""

    @property
    def samples(self) -> int:
        """Samples of one micro-batch."""
        return self.micro_tokens // self.length

    def overrides(self) -> list[str]:
        """Return the options of the configuration."""
        return [
            "model.path=/model",
            "data.train_files=train.jsonl",
            "trainer.device=cuda",
            "model.enable_gradient_checkpointing=true",
            f"trainer.nnodes={self.ranks // self.gpus_per_node}",
            f"trainer.n_gpus_per_node={self.gpus_per_node}",
            f"trainer.micro_tokens={self.micro_tokens}",
            *self.options,
        ]

    def world(self) -> World:
        """Return the view of rank 0."""
        return World(0, self.ranks, torch.device("cuda", 0), self.gpus_per_node)


@dataclass
class Phase:
    """What happened in one phase, in bytes and counts."""

    peak: int
    live: int
    """In use at the end."""
    traffic: dict[str, int]
    calls: dict[str, int]
    waits: dict[str, int]
    launches: dict[str, int]
    at_peak: list[tuple[float, str]] = field(default_factory=list)


def sft_step(job: Job) -> dict[str, Phase]:
    """Load a model for supervised fine-tuning, and make one optimizer step: phases `load` and `update`."""
    return _finetune_step(job, "sft")


def dpo_step(job: Job) -> dict[str, Phase]:
    """Load a model for DPO, and make one optimizer step on pairs whose reference is known: see `sft_step`."""
    return _finetune_step(job, "dpo")


def config_of(job: Job, kind: str) -> FinetuneConfig | PpoConfig:
    """Return the configuration of a job's scenario."""
    own = [f"data.max_length={job.length}"]
    if kind == "ppo":
        reward = [] if any("reward.model" in option for option in job.options) else ["reward.function=exact"]
        own = [*reward, f"data.max_response_length={job.length - 64}", "data.max_prompt_length=64"]
    config = compose(kind, [*job.overrides(), *own])
    assert isinstance(config, FinetuneConfig | PpoConfig)
    return config


def _finetune_step(job: Job, kind: str) -> dict[str, Phase]:
    from hpc_rl.finetune import trainer
    from hpc_rl.finetune.objectives import objective_of
    from hpc_rl.training.models.causal_lm import count_flops
    from hpc_rl.training.models.loading import load_sharded
    from hpc_rl.training.optim import build_optimizer
    from hpc_rl.training.perf import Clock

    config = config_of(job, kind)
    assert isinstance(config, FinetuneConfig)
    with (
        simulated_gpus(job.ranks, job.gpus_per_node, job.where) as gpu,
        loading_without_files(job.shape, job.layers),
        without_torchao(),
    ):
        phases = _Phases(gpu)
        world = job.world()
        model = load_sharded(objective_of(config).model(), world, config.trainer)
        flops = count_flops(model)
        optimizer = build_optimizer(model, config.optim)
        phases.end("load")
        state = _trainer_state(job, config, world, model, optimizer, flops)
        trainer.step(state, Clock())
        phases.end("update")
        return phases.found


@contextmanager
def without_torchao() -> Iterator[None]:
    """Leave out the compiled step of moments in 8 bits, which needs a GPU. Their codes and scales are there."""
    from hpc_rl.training import eight_bit

    with mock.patch.multiple(eight_bit, torchao=lambda _: None, _step=lambda *_: None):
        yield


def rl_step(job: Job) -> dict[str, Phase]:
    """Load all roles of a pool and make one step: `load ROLE`, `logprobs`, `ref`, `values`, `scores`,
    and `update ROLE`."""
    config = config_of(job, "ppo")
    assert isinstance(config, PpoConfig)
    with simulated_gpus(job.ranks, job.gpus_per_node, job.where) as gpu, loading_without_files(job.shape, job.layers):
        phases = _Phases(gpu)
        world = job.world()
        parts: dict[str, Any] = {}
        for role in config.roles:
            if role in MODELS:
                parts[role] = MODELS[role](config, world)
                phases.end(f"load {role}")
        held = pack_shard(shard_of(job), world.device)
        phases.end("hold")
        for name, compute in _computations(parts, held, shard_of(job)):
            compute()
            phases.end(name)
        names = ("advantages", "weights", "old_logprobs", "ref_logprobs", "is_weights", "values", "returns")
        columns = {name: torch.zeros(held.tokens, device=world.device) for name in names}
        for role in ("critic", "actor"):
            if role in parts:
                parts[role].update(held, columns, 0, 10, epochs=1)
                phases.end(f"update {role}")
        return phases.found


class _Phases:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.found: dict[str, Phase] = {}

    def end(self, name: str) -> None:
        gpu = self.gpu
        self.found[name] = Phase(
            gpu.peak,
            gpu.live,
            dict(gpu.traffic),
            dict(gpu.calls),
            dict(gpu.waits),
            dict(gpu.launches),
            list(gpu.at_peak),
        )
        gpu.reset()


def _computations(parts: dict[str, Any], held: PackedShard, shard: Shard) -> Iterator[tuple[str, Callable[[], Any]]]:
    from hpc_rl.rl.workers.logprobs import shard_logprobs

    def logprobs() -> Any:
        with parts["actor"].offload.computing():
            return shard_logprobs(parts["actor"].model, held, 1.0)

    yield "logprobs", logprobs
    if "ref" in parts:
        yield "ref", lambda: parts["ref"].logprobs(held)
    if "critic" in parts:
        yield "values", lambda: parts["critic"].values(held)
    if "reward" in parts:
        yield "scores", lambda: parts["reward"].scores(shard)


def shard_of(job: Job) -> Shard:
    """Return a rank's samples in one mini-batch: prompts of 32 tokens."""
    count, prompt = job.samples * job.micro_batches, 32
    return Shard(
        tokens=np.zeros(count * job.length, np.int32),
        prompt_lengths=np.full(count, prompt, np.int64),
        response_lengths=np.full(count, job.length - prompt, np.int64),
        mini_batches=[[job.samples] * job.micro_batches],
    )


def _trainer_state(job: Job, config: FinetuneConfig, world: World, model: Any, optimizer: Any, flops: Any) -> Any:
    from pathlib import Path

    from hpc_rl.data.lazy import sizes_of
    from hpc_rl.data.order import Position
    from hpc_rl.data.pairs import Preference
    from hpc_rl.data.sft_dataset import Sample
    from hpc_rl.finetune.objectives import objective_of
    from hpc_rl.finetune.trainer import TrainerState
    from hpc_rl.finetune.training_data import Epochs
    from hpc_rl.liveness.walltime import unlimited
    from hpc_rl.run_dir import RunDir
    from hpc_rl.training.checkpoints.saver import OneModel, Saver
    from hpc_rl.training.parallel.offload import ModelOffload
    from hpc_rl.training.stopping import Stopping

    run = RunDir(Path("/nonexistent"))
    count = job.ranks * job.micro_batches * job.samples
    mask = np.arange(job.length) > 0
    samples: list[Any] = [Sample(np.zeros(job.length, np.int32), mask)] * count
    if isinstance(config, DpoConfig):
        count //= 2
        samples = [Preference((samples[0], samples[0]), (0.0,), ref_logprobs=(0.0, 0.0))] * count
    return TrainerState(
        config=config,
        objective=objective_of(config),
        run=run,
        world=world,
        model=model,
        optimizer=optimizer,
        offload=ModelOffload(config.trainer.offload, model, optimizer),
        flops=flops,
        data=Epochs(samples, config.updated("data.train_batch_size", count)),
        val=[],
        val_sizes=sizes_of(samples[:0]),
        total_steps=10,
        tracker=None,  # type: ignore[arg-type]  # a step does not read it
        saver=Saver(run.checkpoints, OneModel(model, optimizer, None, world), world, keep=1),
        stopping=Stopping(run, config.slurm.warning_s, job_end=unlimited),
        step=0,
        position=Position(0, 0),
        total_tokens=0,
        ask_every=1000,  # as after the first step
    )
