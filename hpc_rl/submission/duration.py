"""The time of a job: as fast as an earlier run of this project if there is one like it, otherwise a range."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_name
from hpc_rl.errors import UserError
from hpc_rl.plan.duration import BANDWIDTH, MFU, Duration, gpus_of, items_of, length_of, step_seconds, steps_of
from hpc_rl.plan.engines import Shapes
from hpc_rl.plan.hardware import gpu_model
from hpc_rl.plan.memory import Planned
from hpc_rl.runs.earlier import RunSpeed, newest_like

_MOST_BYTES = 4 << 30
"""Largest size of data whose rows are counted, which takes about a second for each 10^9 bytes."""


def gpu_kind(config: Planned, memory: float) -> str:
    """Return the kind of a job's GPUs, by which runs are compared: Slurm's name, or the memory."""
    return config.slurm.gpu_type or f"{memory / 1e9:g} GB"


def measured_like(kind: str, config: Planned, shapes: Shapes, memory: float) -> RunSpeed | None:
    """Return the newest run of this project that is like a job; None if there is none."""
    return newest_like(kind, gpu_kind(config, memory), shapes[config.model.path].total)


def duration_of(
    config: Planned, shapes: Shapes, memory: float, measured: RunSpeed | None, rows: int | None = None
) -> Duration | str:
    """Return the time of a job, or why it is not planned.

    Args:
        memory: of one GPU, in bytes.
        measured: an earlier run like this one.
        rows: of the job's data, if they were counted.
    """
    steps, nodes = steps_of(config, rows), config.trainer.nnodes
    if measured is not None:
        seconds = measured.step_seconds(items_of(config), length_of(config), gpus_of(config))
        basis = (
            f"as fast as run {measured.run}: {measured.throughput:,.0f} tokens/s/GPU, "
            f"samples of {measured.tokens:,.0f} tokens"
        )
        return Duration((seconds, seconds), steps, nodes, basis)
    model = gpu_model(config.slurm)
    if model is None:
        named = config.slurm.gpu_type
        found_type = f"slurm.gpu_type={named} names no known model of GPUs" if named else "slurm.gpu_type is not set"
        return f"unknown, because {found_type}: use a name such as h100 or a100"
    found = step_seconds(config, shapes, model, memory)
    if found is None:
        assert isinstance(config, PpoConfig | GenerateConfig)
        engine = engine_name(config.rollout, config.trainer.computes_on)
        return f"unknown, because no speed is known for rollout.name={engine}"
    basis = f"at {_percent(MFU)} of {model.tflops:g} TFLOPS"
    if isinstance(config, PpoConfig | GenerateConfig):
        basis += f" and {_percent(BANDWIDTH)} of {model.bandwidth:g} TB/s"
    return Duration(found, steps, nodes, f"{basis}, all at their full length of {length_of(config):,} tokens")


def rows_of(config: Planned) -> int | None:
    """Return the rows of a job's data; None if it is not in jsonl files on this machine, or is very large."""
    files = config.data.files if isinstance(config, GenerateConfig) else config.data.train_files
    return count_lines([Path(file).expanduser() for file in files])


def count_lines(files: Sequence[Path]) -> int | None:
    """Return the lines of jsonl files; None if one is missing or has another format, or if they are very large.

    Raises:
        UserError: a file cannot be read.
    """
    if not all(file.suffix == ".jsonl" and file.is_file() for file in files):
        return None
    if sum(file.stat().st_size for file in files) > _MOST_BYTES:
        return None
    lines = 0
    for path in files:
        try:
            with path.open("rb") as file:
                lines += sum(1 for line in file if not line.isspace())
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
    return lines


def _percent(ends: tuple[float, float]) -> str:
    low, high = ends
    return f"{100 * low:.0f} to {100 * high:.0f} %"
