"""Checks of supervised training: short runs of the product's trainer, compared with a run in float32 on one CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpc_rl.config.training.sft import SftConfig
from hpc_rl.finetune import trainer
from hpc_rl.finetune.trainer import TrainerState
from hpc_rl.probes.acceptance.bench import Bench, Failed, worst
from hpc_rl.probes.acceptance.models import LARGE, SMALL, create
from hpc_rl.run_dir import RunDir
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import Clock

STEPS = 2
"""The loss of the second step depends on the gradients of the first."""
TOLERANCE = {"cpu": (1e-4, 1e-3), "gpu": (2e-2, 1e-1)}
"""Largest relative difference of the losses and of the gradients: of float32 sums in another order, and of bfloat16."""
SAMPLES_EACH = 32
"""Samples of each process in a step, if the speed is measured on GPUs."""
WARM_UP, MEASURED = 3, 3
"""Steps of the measurement of the speed."""


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of a run."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first step, float32 on the CPU, unsharded."""


def make_models(bench: Bench, world: World, _variant: str) -> str:
    """Create the models and their data on every node."""
    sizes = sorted({SMALL, bench.large()})
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        for size in sizes:
            create(bench.scratch, size, rows=max(64, SAMPLES_EACH * world.size))
    return f"{' and '.join(sizes)}, with random weights, in the temporary folder of each node"


def sharding(bench: Bench, world: World, mode: str) -> str:
    """Compare a mode of sharding with the reference, which is not sharded."""
    return _compared(bench, world, f"sharding-{mode}", {"trainer.sharding": mode})


def sequence_parallel(bench: Bench, world: World, size: str) -> str:
    """Compare ranks that compute rows together with the reference, which has the same rows."""
    micro_tokens = bench.sft().trainer.micro_tokens // int(size)
    changes = {"trainer.sequence_parallel": int(size), "trainer.micro_tokens": micro_tokens}
    return _compared(bench, world, f"sequence-parallel-{size}", changes)


def resume(bench: Bench, world: World, _variant: str) -> str:
    """Save after the first step, take the second one, and take it again after loading the checkpoint."""
    run, config = _run_dir(bench, world, "resume"), bench.sft()
    state = trainer.load(config, run, world)
    trainer.step(state, Clock())
    trainer.save(state)
    state.saver.wait()
    once = trainer.step(state, Clock())
    state.tracker.finish(0)
    resumed = trainer.load(config, run, world)
    if resumed.step != 1:
        raise Failed(f"the run resumed after step {resumed.step} instead of step 1")
    again = trainer.step(resumed, Clock())
    resumed.tracker.finish(0)
    loss, norm = (_relative(again[key], once[key]) for key in ("train/loss", "train/grad_norm"))
    found = f"loss of the next step {again['train/loss']:.6f}, without a resume {once['train/loss']:.6f}"
    if worst([loss, norm]) > (1e-6 if world.device.type == "cpu" else 1e-3):
        raise Failed(f"{found}; gradient norm {again['train/grad_norm']:.6f} and {once['train/grad_norm']:.6f}")
    return found


def speed(bench: Bench, world: World, _variant: str) -> str:
    """Measure tokens per second, model FLOPs utilisation and memory of a training step."""
    gpu = bench.large() == LARGE
    changes: dict[str, Any] = {"trainer.total_training_steps": WARM_UP + MEASURED, **bench.model_keys(bench.large())}
    if gpu:
        lengths = {
            "data.max_length": 2048,
            "data.train_batch_size": SAMPLES_EACH * world.size,
            "trainer.micro_tokens": 16_384,
        }
        changes |= {**lengths, "model.enable_gradient_checkpointing": True, "optim.lr": 1e-5}
    state = trainer.load(bench.sft(changes), _run_dir(bench, world, "speed"), world)
    steps = [_step(state) for _ in range(WARM_UP + MEASURED)][WARM_UP:]
    state.tracker.finish(0)
    fastest = max(steps, key=lambda metrics: metrics["perf/tokens_per_s"])
    return speed_text(fastest, "perf/mfu", world.size)


def speed_text(metrics: Mapping[str, float], mfu: str, processes: int) -> str:
    """Return the speed of a step in words.

    Args:
        mfu: name of the metric with the model FLOPs utilisation, which is missing if a device's peak is unknown.
    """
    utilisation = f"{100 * metrics[mfu]:.1f} % MFU" if mfu in metrics else "MFU unknown (no peak speed for this device)"
    return (
        f"{metrics['perf/tokens_per_s']:,.0f} tokens/s on {processes} processes "
        f"({metrics['perf/throughput']:,.0f} each), {utilisation}, {metrics['perf/max_memory_gb']:.1f} GB each"
    )


def difference(found: FirstSteps, expected: FirstSteps) -> tuple[float, float]:
    """Return the largest relative differences of (losses, gradients); the norms of all steps count as gradients."""
    losses = worst(map(_relative, found.losses, expected.losses))
    norms = worst(map(_relative, found.norms, expected.norms))
    apart = sum(float((found.gradients[name] - one).square().sum()) for name, one in expected.gradients.items())
    whole = sum(float(one.square().sum()) for one in expected.gradients.values())
    return losses, worst([norms, (apart / whole) ** 0.5])


def measure(config: SftConfig, run: RunDir, world: World) -> FirstSteps:
    """Take the first steps of a run with the product's trainer."""
    state = trainer.load(config, run, world)
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        if not gradients:
            named = state.model.hf.named_parameters()
            gradients.update({name: _whole(p.grad) for name, p in named if p.grad is not None})

    state.optimizer.register_step_pre_hook(keep)
    steps = [_step(state) for _ in range(STEPS)]
    state.tracker.finish(0)
    losses, norms = ([metrics[f"train/{key}"] for metrics in steps] for key in ("loss", "grad_norm"))
    return FirstSteps(losses, norms, gradients)


def _compared(bench: Bench, world: World, name: str, changes: Mapping[str, Any]) -> str:
    """Take steps with some keys changed."""
    expected = _reference(bench, world)
    found = measure(bench.sft(changes), _run_dir(bench, world, name), world)
    losses, gradients = difference(found, expected)
    most_losses, most_gradients = TOLERANCE["cpu" if world.device.type == "cpu" else "gpu"]
    text = f"differs from float32 on one CPU by {losses:.1e} in the loss and {gradients:.1e} in the gradients"
    if losses > most_losses or gradients > most_gradients:
        raise Failed(f"{text}; at most {most_losses:.0e} and {most_gradients:.0e} are expected")
    return text


def _comparing(name: str, changes: Mapping[str, Any]) -> Callable[[Bench, World, str], str]:
    return lambda bench, world, _variant: _compared(bench, world, name, changes)


loss_and_gradients = _comparing("default", {})
packing = _comparing("single-samples", {"trainer.packing": False})
recomputation = _comparing("recomputation", {"model.enable_gradient_checkpointing": True})
compiled = _comparing("compiled", {"model.use_torch_compile": True})
liger = _comparing("liger", {"model.use_liger": True})


def _reference(bench: Bench, world: World) -> FirstSteps:
    """Return the same steps in float32 on one CPU. Every rank computes them alone."""
    if "reference" not in bench.memory:
        alone = World(rank=0, size=1, device=torch.device("cpu"))
        config = bench.sft().updated("trainer.device", "cpu")
        bench.memory["reference"] = measure(config, _run_dir(bench, world, f"reference-{world.rank}"), alone)
    found: FirstSteps = bench.memory["reference"]
    return found


def _step(state: TrainerState) -> dict[str, float]:
    return trainer.step(state, Clock())


def _run_dir(bench: Bench, world: World, name: str) -> RunDir:
    """Create and return a run directory, which all ranks share."""
    run = RunDir(bench.folder / name)
    run.path.mkdir(mode=0o700, exist_ok=True)
    world.barrier()
    return run


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.detach().float().cpu().clone()


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-12)
