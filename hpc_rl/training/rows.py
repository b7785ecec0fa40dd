"""trainer.micro_tokens=auto in a job: decided at its start, corrected once, and the same after a resume.

The plan decides, as at submission (hpc_rl.plan.rows), from the memory that the settings state for a GPU. If the
smallest device has less, or if the settings state nothing, the plan uses the memory of this device. After the first
complete step, the measured memory corrects the decision. Each checkpoint records the decision. An attempt that resumes
on as many GPUs of the same memory, and for which the plan chooses the same number, uses the recorded one, so that its
micro-batches and its rounding are those of the attempt before. Otherwise the job decides again, because each rank then
holds another part of the model, or has other memory. It also does so if the longest sample does not fit any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.errors import UserError
from hpc_rl.plan.engines import Shapes
from hpc_rl.plan.hardware import gpu_bytes
from hpc_rl.plan.memory import Planned, models_of
from hpc_rl.plan.rows import MICRO_TOKENS, chosen, corrected, is_auto, least, usual
from hpc_rl.plan.shape import shape_of
from hpc_rl.plan.text import rows_text
from hpc_rl.training.checkpoints.checkpoint import expected
from hpc_rl.training.models.pretrained import settings_of
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import max_memory_gb, memory_bytes

Job = TypeVar("Job", bound=Planned)


@dataclass(frozen=True)
class Decision:
    """What trainer.micro_tokens is in a job."""

    tokens: int
    line: str = ""
    """A sentence for the log; empty if there is nothing to tell."""
    recorded: dict[str, int] | None = None
    """What a checkpoint records, for the attempts that follow; None if nothing is planned."""
    is_corrected: bool = True
    """Whether measured memory no longer changes the number."""

    def used_in(self, config: Job) -> Job:
        """Return a configuration with this number."""
        return config.updated(MICRO_TOKENS, self.tokens)


FIXED = Decision(0)
"""For a configuration that already has a number."""


def decide(config: Planned, device: float | None, ranks: int, recorded: Mapping[str, int] | None = None) -> Decision:
    """Decide what trainer.micro_tokens is.

    Args:
        device: bytes of memory of the smallest device; None on CPUs.
        ranks: number of processes that train.
        recorded: of the checkpoint from which the run resumes.
    """
    if config.trainer.micro_tokens != "auto":
        return Decision(config.trainer.micro_tokens)
    if device is None or not is_auto(config):
        return Decision(usual(config))
    gpu = memory_of(config, device)
    try:
        rows = chosen(config, shapes_of(config), gpu)
    except UserError as error:  # a model that is not counted
        return Decision(usual(config), f"{MICRO_TOKENS}=auto: {usual(config):,} tokens in each pass of a rank; {error}")
    assert rows is not None
    basis = {"planned": rows.tokens, "ranks": ranks, "gpu_bytes": round(gpu)}
    if recorded is not None and basis.items() <= recorded.items() and recorded["tokens"] >= least(config):
        line = f"{MICRO_TOKENS}=auto: {recorded['tokens']:,} tokens in each pass of a rank, as before"
        return Decision(recorded["tokens"], line, dict(recorded), bool(recorded["is_corrected"]))
    found = {"tokens": rows.tokens, "is_corrected": 0, **basis}
    return Decision(rows.tokens, rows_text(rows, gpu), found, isinstance(config, GenerateConfig))


def correct(config: Planned, before: Decision, longest: int, measured: Mapping[str, float]) -> Decision:
    """Correct a decision that was planned, after the first steps.

    Args:
        config: with trainer.micro_tokens as a number or auto.
        longest: most tokens of a rank's micro-batch in these steps.
        measured: the most bytes of a training process on a GPU, by pool as in `Phase.pool`.
    """
    assert before.recorded is not None
    gpu = float(before.recorded["gpu_bytes"])
    config = config.updated(MICRO_TOKENS, "auto")
    try:
        tokens = corrected(config, shapes_of(config), gpu, before.tokens, longest, measured)
    except UserError:  # the model's config.json cannot be read any more, and the run needs no correction
        return replace(before, line="", is_corrected=True)
    recorded = {**before.recorded, "tokens": tokens, "is_corrected": 1}
    peak = max(measured.values()) / 1e9
    line = (
        f"{MICRO_TOKENS}=auto: {tokens:,} tokens in each pass of a rank from now on, instead of {before.tokens:,}, "
        f"because {peak:.1f} of {gpu / 1e9:.1f} GB were used with {longest:,} tokens"
    )
    return Decision(tokens, line if tokens != before.tokens else "", recorded)


def decide_together(config: FinetuneConfig, checkpoints: Path, world: World) -> Decision:
    """Decide on rank 0, for the smallest device of all ranks. Every rank calls this.

    Args:
        checkpoints: folder of the run's checkpoints.
    """
    own = memory_bytes(world.device)
    if own is None or not is_auto(config):
        return decide(config, own, world.size)
    device = float(world.gather_rows([own]).min())

    def on_main() -> dict[str, Any]:
        progress = expected(checkpoints)
        return asdict(decide(config, device, world.size, progress and progress.micro_tokens))

    found = Decision(**world.broadcast(world.together(lambda: on_main() if world.is_main else None)))
    if world.is_main:
        print(found.line, flush=True)
    return found


def correct_together(config: FinetuneConfig, before: Decision, longest: int, world: World) -> Decision:
    """Correct a decision on rank 0, after the first step. Every rank calls this.

    Args:
        longest: most tokens of a row of this rank.
    """
    peaks = world.gather_rows([longest, 1e9 * max_memory_gb(world.device)])
    longest, peak = int(peaks[:, 0].max()), float(peaks[:, 1].max())
    found = None
    if world.is_main:
        found = asdict(correct(config, before, -(-longest // config.trainer.sequence_parallel), {"": peak}))
    return Decision(**world.broadcast(found))


def memory_of(config: Planned, device: float) -> float:
    """Return the bytes of memory of a GPU for which rows are chosen: those that the settings state, as at submission,
    if the device has them."""
    return min(device, gpu_bytes(config.slurm) or device)


def shapes_of(config: Planned) -> Shapes:
    """Return the shapes of a job's models by their paths.

    Raises:
        UserError: a model has no config.json, or is not counted.
    """
    return {path: shape_of(settings_of(path, key), f"{key} {path}") for key, path in models_of(config).items()}
