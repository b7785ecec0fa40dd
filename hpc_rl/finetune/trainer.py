"""The fine-tuning loop: load -> loop -> step -> save -> validate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.data.lazy import Item, Sizes, joined_sizes, sizes_of
from hpc_rl.data.order import Position
from hpc_rl.data.templates.chat import as_trained, chat_template, template_remarks
from hpc_rl.errors import EXIT_STOPPED, AgreedError, AgreedRunError
from hpc_rl.finetune.base import Objective, Work
from hpc_rl.finetune.dataset import load_items, load_training
from hpc_rl.finetune.objectives import objective_of
from hpc_rl.finetune.training_data import TrainingData
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.metrics import has_validation, read_metrics
from hpc_rl.tracking.page.report import failure_reported, report_end
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training import guards
from hpc_rl.training.checkpoints import checkpoint
from hpc_rl.training.checkpoints.export import export, export_dtype, is_exported
from hpc_rl.training.checkpoints.folders import Progress, step_folder
from hpc_rl.training.checkpoints.model_state import Tensors, random_state, set_random_state
from hpc_rl.training.checkpoints.saver import OneModel, Saver
from hpc_rl.training.loop import LoopState, decide, run_steps, validate_first, validation_is_due
from hpc_rl.training.models.causal_lm import Flops, PackedModel, count_flops, evaluating, load_tokenizer
from hpc_rl.training.optim import build_optimizer, clip_gradients, lr_factor, set_lr
from hpc_rl.training.parallel import sharding
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload
from hpc_rl.training.perf import Clock, max_memory_gb, peak_flops
from hpc_rl.training.profiling import trace_path, traced
from hpc_rl.training.rows import Decision, correct_together, decide_together
from hpc_rl.training.stopping import IN_VAIN, Stopped, open_stopping, stopped_line

_ASK_EVERY_S = 30
"""Approximate time between two checks, within a long step, whether to stop."""


@dataclass(kw_only=True)
class TrainerState(LoopState):
    """A run in progress. The loop changes the fields from `position` on, and some of LoopState."""

    config: FinetuneConfig
    objective: Objective
    world: World
    model: PackedModel
    optimizer: torch.optim.AdamW
    offload: ModelOffload
    flops: Flops
    data: TrainingData
    val: Sequence[Item]
    val_sizes: Sizes

    position: Position
    ask_every: int = 1
    """Number of micro-batches after which the ranks agree whether to stop, the same on every rank."""


def train(config: FinetuneConfig, run: RunDir, world: World) -> int:
    """Train to the end, or until the stop file exists.

    Returns:
        the exit code of the process: 0, or 75 if the run is not finished and can be resumed.
    """
    with ExitStack() as recording, failure_reported(run) if world.is_main else nullcontext():
        with heart.phase("load"):
            rows = decide_together(config, run.checkpoints, world)
        config = rows.used_in(config)
        objective = objective_of(config)
        own = objective.join(world)
        if own is None:
            return objective.serve()
        try:
            with heart.phase("load"):
                state = load(config, run, own, objective)
            state.rows = rows
        except Stopped as stopped:
            print_once(own, str(stopped))
            return EXIT_STOPPED
        recording.enter_context(state.tracker)
        with state.saver:
            code = loop(state)
    objective.leave(code)
    return code


def loop(state: TrainerState) -> int:
    """Train from the state's step on; see `train`."""
    finished_before = state.step >= state.total_steps
    validate_first(state, lambda: validate(state))
    run_steps(state, lambda clock: traced_step(state, clock), lambda: save(state), lambda: validate(state))
    return finish(state, finished_before)


def traced_step(state: TrainerState, clock: Clock) -> dict[str, float]:
    """Make one step, and write this rank's trace of it if it is one of trainer.profile_steps."""
    number = state.step + 1
    is_profiled = number in state.config.trainer.profile_steps
    path = trace_path(state.run, number, state.world.in_job(state.world.rank)) if is_profiled else None
    with traced(path):
        return step(state, clock)


def load(config: FinetuneConfig, run: RunDir, world: World, objective: Objective | None = None) -> TrainerState:
    """Load data, model and optimizer, and restore the newest checkpoint.

    Args:
        world: the ranks that train.
        objective: the one that they have joined. None: a new one; all ranks train.

    Raises:
        Stopped: the run stops before the model is loaded.
    """
    if objective is None:
        objective = objective_of(config)
        objective.join(world)
    torch.manual_seed(config.trainer.seed + world.rank)
    tokenizer = world.together(lambda: load_tokenizer(config.model))
    # The exported model has this template too.
    tokenizer.chat_template = world.together(lambda: chat_template(tokenizer, config.data))
    for line in template_remarks(tokenizer):
        print_once(world, line)
    records = read_metrics(run.metrics) if world.is_main else []
    stopping = open_stopping(run, config.slurm.warning_s, records)
    sources = (run, world, stopping)
    data = load_training(objective, tokenizer, *sources)
    val = load_items(objective, config.data.val_files, tokenizer, "test", *sources) if config.data.val_files else []
    val_sizes = sizes_of(val)
    data.items, val = objective.prepare(data.items, val, joined_sizes(data.sizes, val_sizes), run, world, stopping)
    with guards.explain_out_of_memory("loading the model"):
        model = objective.load(world)
        trained_tokenizer = as_trained(tokenizer, model.hf)
        flops = count_flops(model)
        optimizer = build_optimizer(model, config.optim)
        models = OneModel(model, optimizer, trained_tokenizer, world)
        progress = checkpoint.load_latest(run.checkpoints, models, world)
    if progress is None:
        samples = data.samples(Position()) or 0
        progress = Progress(samples=samples, dtype=export_dtype(config.model, config.trainer))
    else:
        checkpoint.refuse_other_quantize(run.checkpoints, progress, config.model.lora.quantize)
        print_once(world, f"resuming after step {progress.step}, from {run.checkpoints}")
    position, total_steps = Position(progress.epoch, progress.index), data.total_steps
    data.resume(position, total_steps - progress.step)
    checkpoint.refuse_other_data(run.checkpoints, progress, data.samples(position))
    is_due = bool(val) and validation_is_due(config.trainer, progress.step, total_steps)
    return TrainerState(
        config=config,
        objective=objective,
        run=run,
        world=world,
        model=model,
        optimizer=optimizer,
        offload=ModelOffload(config.trainer.offload, model, optimizer),
        flops=flops,
        data=data,
        val=val,
        val_sizes=val_sizes,
        total_steps=total_steps,
        tracker=world.together(lambda: Tracker(config, run, progress.wandb_id, world.is_main)),
        saver=Saver(run.checkpoints, models, world, config.trainer.max_ckpt_to_keep, not config.trainer.save_async),
        stopping=stopping,
        step=progress.step,
        position=position,
        total_tokens=progress.total_tokens,
        validates_first=world.broadcast(progress.step > 0 and is_due and not has_validation(records, progress.step)),
        saved_step=progress.step,
    )


def step(state: TrainerState, clock: Clock) -> dict[str, float]:
    """Make one optimizer step on the next global batch.

    Returns:
        its metrics, which are the same on every rank; none if the run stops and the step was discarded.
    """
    config, world, number = state.config, state.world, state.step + 1
    heart.at_step(number)
    if state.data.needs_more and not advance(state, clock):
        return {}
    with clock("data"):
        batch = state.data.draw()
        work = state.objective.work(batch.sizes)
        plan = work.micro_batches(world, config.trainer)
        own = ([batch.items[batch.indices[index]] for index in micro] for micro in plan)  # not those of other ranks
        micro_batches = [state.objective.collate(micro).to(world.device) for micro in own]
    with guards.explain_out_of_memory(f"step {number}"), clock("forward_backward"):
        started, random = time.monotonic(), random_state(world)
        state.objective.begin(state.model, micro_batches, world)
        scale = sharding.loss_factor(state.model, world) / state.objective.divisor(work)
        sums = torch.zeros((), device=world.device)
        for index, micro_batch in enumerate(micro_batches):
            if index and index % state.ask_every == 0 and agree(state, left=1 - index / len(micro_batches)):
                discard(state, random)
                return {}
            sharding.begin_micro_batch(state.model, config.trainer, last=index == len(micro_batches) - 1)
            found = state.objective.loss(state.model, micro_batch, scale)
            found.loss.backward()
            sums = sums + torch.cat([found.loss.detach()[None], found.sums])
            heart.beat()
        sharding.reshard(state.model)
        norm = clip_gradients(state.model.parameters(), config.optim.clip_grad)
        # The usual exchange of numbers in a step: rank 0's decisions travel with the loss.
        loss, *sums_K = sums.tolist()
        own = [loss / sharding.loss_factor(state.model, world), *decisions(state, number, started), *sums_K]
        losses, stops, saves, seconds, *by_rank = world.gather_rows(own).T.tolist()
        # All ranks of a sequence group have computed the same, which counts once.
        sums_K = [sum(found[:: config.trainer.sequence_parallel]) for found in by_rank]
        guards.refuse_not_finite(number, {world.in_job(rank): loss for rank, loss in enumerate(losses)}, norm)
        routers = {} if state.model.routers is None else state.model.routers.take_metrics(world)
    with guards.explain_out_of_memory(f"step {number}"), clock("optimizer"):
        lr = config.optim.lr * lr_factor(config.optim, state.step, state.total_steps)
        set_lr(state.optimizer, lr)
        state.offload.step()
        state.optimizer.zero_grad(set_to_none=True)
    if not state.rows.is_corrected:
        longest = max((sum(work.lengths[index] for index in micro) for micro in plan), default=0)
        use_rows(state, correct_together(config, state.rows, longest, world))
    state.step, state.position, state.stop, state.save = number, batch.position, bool(stops[0]), bool(saves[0])
    state.ask_every = max(1, int(_ASK_EVERY_S * len(micro_batches) / max(seconds[0], 1e-9)))
    state.total_tokens += work.tokens
    state.stopping.note_step(clock.seconds)
    return {
        "train/loss": sum(losses[:: config.trainer.sequence_parallel]),
        **{f"train/{name}": value for name, value in state.objective.metrics(sums_K).items()},
        **{f"train/router/{name}": value for name, value in routers.items()},
        "train/grad_norm": norm,
        "train/lr": lr,
        "train/target_tokens": work.targets,
        **state.data.progress(batch.position),
        "perf/total_num_tokens": state.total_tokens,
        **perf_metrics(work, clock, state.flops, world),
    }


def advance(state: TrainerState, clock: Clock) -> bool:
    """Bring the data of the next steps; return False if the run stops in the meantime.

    Raises:
        AgreedRunError: it cannot be brought. What has been trained is saved.
    """
    try:
        with clock("window"):
            state.data.advance()
    except Stopped:
        state.stop = True
    except AgreedError as error:
        state.data.close(is_done=False)
        save(state)
        state.saver.wait()
        raise AgreedRunError(f"{error}\n{stopped_line(state.step, state.total_steps)}") from error
    return not state.stop


def decisions(state: TrainerState, number: int, started: float) -> list[float]:
    """Return rank 0's decisions after this step, as numbers: whether to stop, whether to save, and the step's seconds.

    Args:
        started: `time.monotonic()` before the first micro-batch.
    """
    seconds = time.monotonic() - started
    state.stopping.made_a_step = True  # what is left of it takes no time
    stops, saves = decide(state, number, seconds) if state.world.is_main else (False, False)
    return [float(stops), float(saves), seconds]


def agree(state: TrainerState, left: float) -> bool:
    """Return whether rank 0 stops now, within a step. Every rank calls this.

    Args:
        left: the part of the step's micro-batches that is left, 0 to 1.
    """
    stops = state.world.is_main and state.stopping.due(left * state.stopping.rest_s())
    return bool(state.world.gather_rows([float(stops)])[0, 0])


def discard(state: TrainerState, random: Tensors) -> None:
    """Stop in the middle of a step. The checkpoint will be as if the step had not begun.

    Args:
        random: the random state before the step.
    """
    state.optimizer.zero_grad(set_to_none=True)
    set_random_state(random, state.world)
    state.stop = True


def use_rows(state: TrainerState, rows: Decision) -> None:
    """Change trainer.micro_tokens for the steps that follow."""
    state.rows, state.config = rows, rows.used_in(state.config)
    if rows.line:
        print_once(state.world, rows.line)


def perf_metrics(work: Work, clock: Clock, flops: Flops, world: World) -> dict[str, float]:
    """Return the speed of a step without saving and validation. docs/sft.md lists the metrics and their scope.

    perf/mfu is present only for devices in hpc_rl/formats/gpu_models.py.
    """
    seconds = sum(clock.seconds.values())
    metrics = {
        "perf/time_per_step": seconds,
        "perf/tokens_per_s": work.tokens / seconds,
        "perf/throughput": work.tokens / seconds / world.size,
        "perf/max_memory_gb": max_memory_gb(world.device),
    }
    peak = peak_flops(world.device)
    if peak:
        metrics["perf/mfu"] = flops.of(work.sample_lengths, work.targets) / seconds / world.size / peak
    return metrics


def save(state: TrainerState) -> None:
    """Write a checkpoint, in the background if configured, unless there is one of this step."""
    if state.saved_step == state.step:
        return
    samples = state.data.samples(state.position) or 0
    with guards.explain_out_of_memory("saving"), state.offload.whole():
        state.saver.save(state.progress(state.position, samples, state.world.size))
    state.saved_step, state.saved_at = state.step, time.monotonic()


@torch.no_grad()
def validate(state: TrainerState) -> dict[str, float]:
    """Return the loss and the metrics of the validation data, as if it was one batch."""
    config, world, objective = state.config, state.world, state.objective
    work = objective.work(state.val_sizes)
    plan = work.micro_batches(world, config.trainer)
    sums = torch.zeros((), device=world.device)

    def micro_batches() -> Iterator[Any]:  # one at a time, since the data may be large
        return (objective.collate([state.val[index] for index in micro]).to(world.device) for micro in plan)

    with guards.explain_out_of_memory("validation"), evaluating(state.model):
        objective.begin(state.model, micro_batches(), world)
        for micro_batch in micro_batches():
            found = objective.loss(state.model, micro_batch, 1.0)
            sums = sums + torch.cat([found.loss[None], found.sums])
            heart.beat()
    by_group = world.gather_rows(sums.tolist())[:: config.trainer.sequence_parallel]
    loss, *sums_K = by_group.sum(dim=0).tolist()
    metrics = {"loss": loss / objective.divisor(work), **objective.metrics(sums_K)}
    return {f"val/{name}": value for name, value in metrics.items()}


def finish(state: TrainerState, finished_before: bool) -> int:
    """Export a finished run, close the tracker and print the result; return the exit code."""
    state.saver.wait()
    state.tracker.name_left_out()
    done = state.step >= state.total_steps
    state.data.close(done)
    if finished_before:
        print_once(state.world, f"{state.run.path} has already finished after {state.step} steps; nothing to train")
    if not done:
        if state.world.broadcast(state.stopping.is_in_vain()):
            raise AgreedRunError(IN_VAIN)
        print_once(state.world, stopped_line(state.step, state.total_steps))
    elif state.config.trainer.export and not (finished_before and has_model(state)):
        with heart.phase("export"):
            export(state.run.path, state.run.model, replace=True, world=state.world)
        print_once(state.world, f"model: {state.run.model}")
    code = 0 if done else EXIT_STOPPED
    state.tracker.finish(code)
    if state.world.is_main and state.run.metrics.exists():
        print_once(state.world, report_end(state.run, code))
    return code


def has_model(state: TrainerState) -> bool:
    """Return whether the last step has been exported, as rank 0 sees it."""
    last = step_folder(state.run.checkpoints, state.step)
    return bool(state.world.broadcast(state.world.is_main and is_exported(last, state.run.model)))


def print_once(world: World, text: str) -> None:
    """Print a line once per job."""
    if world.is_main:
        print(text, flush=True)
