"""Saving and resuming: workers write and read their models, and the driver records which checkpoint is complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpc_rl.data.order import Position
from hpc_rl.errors import RunError
from hpc_rl.rl.calls import has_died
from hpc_rl.rl.saving import Saving
from hpc_rl.rl.state import PpoState
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.run_dir import RunDir
from hpc_rl.training.checkpoints import checkpoint, folders
from hpc_rl.training.checkpoints.background import AFTER_ERROR_S, DEADLINE_S
from hpc_rl.training.checkpoints.export import export_dtype, new_folder
from hpc_rl.training.checkpoints.folders import ACTOR, CRITIC, Progress
from hpc_rl.training.checkpoints.model_state import UnreadableError

_AFTER_DEATH_S = 30
"""Time for the other parts of a checkpoint, after a process that wrote one has died."""


def save(state: PpoState) -> None:
    """Write actor, critic, optimizers, random state, and the driver's progress, in the background if configured.

    Raises:
        RunError: this checkpoint, or the one before it, could not be written.
    """
    wait(state)
    trainer = state.config.trainer
    partial = folders.begin(state.run.checkpoints, state.step)
    learners = learners_of(state.actor, state.critic)
    try:
        for pending in [group.save(role, partial / role) for role, group in learners.items()]:
            pending.wait()
    except RunError:
        folders.discard(state.run.checkpoints, state.step)
        raise
    progress = Progress(
        samples=len(state.train),
        dtype=export_dtype(state.config.model, trainer),
        merge=state.config.model.lora.merge,
        quantize=state.config.model.lora.quantize,
        parts=tuple(learners),
        step=state.step,
        epoch=state.batches.position.epoch,
        index=state.batches.position.index,
        total_tokens=state.total_tokens,
        world_size=state.actor.size,
        micro_tokens=state.rows.recorded,
        wandb_id=state.tracker.wandb_id,
        kl_coef=None if state.kl.target is None else state.kl.coef,
    )
    state.saving = Saving(state.run.checkpoints, partial, progress, trainer.max_ckpt_to_keep)
    state.saved_at = time.monotonic()
    if not trainer.save_async:
        wait(state)


def wait(state: PpoState) -> None:
    """Wait until the latest checkpoint is complete.

    Raises:
        RunError: it could not be written, or not in time.
    """
    saving, state.saving = state.saving, None
    if saving is None:
        return
    try:
        for pending in [group.saved(role) for role, group in learners_of(state.actor, state.critic).items()]:
            pending.wait(DEADLINE_S)
        saving.finish()
    except RunError:
        saving.discard()
        raise
    state.write_s = saving.seconds if state.config.trainer.save_async else None


def take_seconds(state: PpoState) -> float | None:
    """Return how long a checkpoint took that has been written in the background since the last call, or None."""
    if state.saving is not None and state.saving.seconds is not None:
        found, state.saving.seconds = state.saving.seconds, None
    else:
        found, state.write_s = state.write_s, None
    return found


@contextmanager
def finished(state: PpoState) -> Iterator[None]:
    """At the end of the block, wait for the checkpoint that is being written; after an error only for a short time, and
    for a shorter one if a process that writes has died: its part may be complete."""
    try:
        yield
    except Exception:
        if state.saving is not None:
            with checkpoint.explained_after_error():
                if not state.saving.is_done and _writer_has_died(state):
                    state.saving.wait(_AFTER_DEATH_S, "a process that wrote a part of it has died")
                else:
                    state.saving.wait(AFTER_ERROR_S)  # workers may not answer any more
        raise
    wait(state)


def _writer_has_died(state: PpoState) -> bool:
    writing = [group.saved(role) for role, group in learners_of(state.actor, state.critic).items()]
    return has_died([call for one in writing for call in one.calls])


def load_latest(run: RunDir, actor: WorkerGroup, critic: WorkerGroup | None) -> Progress | None:
    """Load the newest usable checkpoint into the workers. Return None if the run has no checkpoint.

    Raises:
        UserError: no checkpoint of the run can be used; starting from scratch would lose them.
    """
    learners = learners_of(actor, critic)
    for path, progress in checkpoint.usable(run.checkpoints):
        missing = [role for role in learners if role not in progress.parts]
        if missing:
            checkpoint.warn_passed_over(path, f"it has no {' and no '.join(missing)}")
            continue
        try:
            for pending in [group.load(role, path / role) for role, group in learners.items()]:
                pending.wait()
        except UnreadableError as error:
            checkpoint.warn_passed_over(path, str(error))
            continue
        folders.resume_after(run.checkpoints, progress.step)
        return progress
    checkpoint.refuse_none_usable(run.checkpoints)
    return None


def position_of(progress: Progress | None) -> Position:
    """Return the position in the data at which a run continues."""
    return Position(progress.epoch, progress.index) if progress else Position()


def export_model(state: PpoState) -> None:
    """Export the newest checkpoint's policy as a Hugging Face folder in the run directory."""
    with new_folder(state.run.path, state.run.model, replace=True) as (path, partial):
        state.actor.export(path, partial).wait()


def learners_of(actor: WorkerGroup, critic: WorkerGroup | None) -> dict[str, WorkerGroup]:
    """Return the trained models and the groups that hold them. The policy, which is exported, comes first."""
    return {ACTOR: actor} | ({CRITIC: critic} if critic else {})
