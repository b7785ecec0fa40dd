"""The command `plan`: whether a job fits into the memory of its GPUs, before it waits in a queue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_rl.cli.app import JsonOption, KindArgument, app
from hpc_rl.cli.submit import OverridesArgument, SlurmFlags, with_slurm_flags
from hpc_rl.cli.text import aligned
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted

if TYPE_CHECKING:
    from hpc_rl.plan.duration import Duration
    from hpc_rl.plan.memory import Planned
    from hpc_rl.plan.plan import Plan
    from hpc_rl.plan.shape import Shape
    from hpc_rl.runs.earlier import GpuMemory, RunSpeed


@app.command()
@with_slurm_flags
def plan(
    kind: KindArgument,
    arguments: OverridesArgument = None,
    *,
    flags: SlurmFlags,
    gpu_gb: Annotated[
        float | None, typer.Option(help="Memory of one GPU in 10^9 bytes (slurm.node.gpu_gb).", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show whether a job fits and how long it takes: memory of a GPU in each phase, nodes, host memory, disk, time.

    It needs the config.json of the model, and neither data nor GPUs. Arguments are those of submit.

    Example: hpc-rl plan ppo --gpus-per-node 8 --gpu-gb 80 model=qwen2.5-7b
    """
    from hpc_rl.plan.plan import plan_of
    from hpc_rl.runs.earlier import GpuMemory
    from hpc_rl.submission.duration import duration_of, measured_like, rows_of
    from hpc_rl.submission.planning import gpu_memory, has_model, planned_config, planned_part, shapes_of
    from hpc_rl.submission.request import JobRequest

    if not has_model(str(kind)):
        raise UserError(f"{kind} runs no model of its own, so there is nothing to plan")
    settings = flags.settings() | ({} if gpu_gb is None else {"slurm.node.gpu_gb": gpu_gb})
    request = JobRequest(str(kind), tuple(arguments or ()), settings=settings, site=flags.site, command=tuple(sys.argv))
    composed = planned_config(request)
    config = planned_part(composed)
    if config is None:
        raise UserError("the job runs on CPUs, and plan is about the memory of GPUs: set trainer.device=cuda")
    memory = gpu_memory(composed.slurm) if gpu_gb is None else GpuMemory(gpu_gb * 1e9)
    if memory is None:
        raise UserError(
            "the memory of the GPUs is unknown: add --gpu-gb 80, or set slurm.node.gpu_gb in the site profile"
        )
    shapes, gpu = shapes_of(config, ask_hub=True), memory.bytes
    found = plan_of(config, shapes, gpu)
    measured = measured_like(str(kind), config, shapes, gpu)
    time = duration_of(config, shapes, gpu, measured, rows_of(config))
    if as_json:
        print(json.dumps(_facts(found) | _time_facts(time), indent=2))
    else:
        print(
            "\n".join(
                [
                    *_lines(config, shapes, found, memory, measured),
                    *_time_lines(config, time),
                    *_remedies(config, shapes, found),
                ]
            )
        )


def _lines(
    config: Planned, shapes: dict[str, Shape], plan: Plan, memory: GpuMemory, measured: RunSpeed | None
) -> Iterator[str]:
    from hpc_rl.plan.advice import MOST_NODES, fewest
    from hpc_rl.plan.text import arithmetic, cache_text, gigabytes, parts_text, problem, rows_text

    trainer = config.trainer
    for path, shape in shapes.items():
        active = f", {shape.active / 1e9:.3g} of them for each token" if shape.has_experts else ""
        yield f"{path}: {shape.total / 1e9:.3g} x 10^9 parameters{active}"
        yield from (f"  {note}" for note in shape.notes)
    nodes = counted(trainer.nnodes, "node")
    gpus = counted(trainer.n_gpus_per_node, "GPU")
    yield f"{nodes} x {gpus} of {gigabytes(plan.gpu)} GB; sizes in GB (10^9 bytes) for each GPU"
    if memory.run is not None:
        yield f"run {memory.run} recorded the memory of a GPU"
    yield ""
    pools = any(phase.pool for phase in plan.phases)
    rows = [[*(["pool"] if pools else []), "phase", "resident", "peak", "largest parts of the peak"]]
    for phase in plan.phases:
        place = [phase.pool] if pools else []
        sizes = [gigabytes(sum(phase.resident.values())), gigabytes(phase.peak)]
        rows.append([*place, phase.name, *sizes, parts_text({**phase.resident, **phase.working})])
    yield aligned(rows, right={rows[0].index("resident"), rows[0].index("peak")})
    yield ""
    yield f"memory       {plan.verdict}: {problem(plan) if plan.verdict == 'does not fit' else arithmetic(plan)}"
    if measured is not None and measured.peak_gb and measured.planned_gb:
        yield (
            f"             the similar run {measured.run} recorded {measured.peak_gb:.1f} GB, and its plan expected "
            f"{measured.planned_gb:.1f} GB"
        )
    if plan.rows is not None:
        yield f"micro-batch  {rows_text(plan.rows, plan.gpu)}"
    if plan.engine is not None:
        yield f"generation   {cache_text(plan)}"
    least = fewest(config, shapes, plan.gpu, first=1, may_change=False)
    if least is not None:
        yield f"nodes        fits on {least.settings['trainer.nnodes']} or more nodes of this size"
    elif not pools:
        yield f"nodes        does not fit on {MOST_NODES} nodes of this size"
    yield f"host memory  about {gigabytes(plan.host)} GB on each node"
    if plan.checkpoints:
        export = f", and {gigabytes(plan.export)} GB for the exported model" if plan.export else ""
        yield f"disk         {gigabytes(plan.checkpoints)} GB for checkpoints{export}"
    if plan.window:
        yield f"             up to {gigabytes(plan.window)} GB for the tokens of a window, besides its text"


def _time_lines(config: Planned, time: Duration | str) -> Iterator[str]:
    from hpc_rl.config.rl.generate import GenerateConfig
    from hpc_rl.plan.duration import Duration
    from hpc_rl.plan.text import time_text

    lines = time_text(time, isinstance(config, GenerateConfig)) if isinstance(time, Duration) else [time]
    for number, line in enumerate(lines):
        yield f"{'time' if number == 0 else '':<13}{line}"


def _remedies(config: Planned, shapes: dict[str, Shape], plan: Plan) -> Iterator[str]:
    from hpc_rl.plan.advice import advise, more_nodes
    from hpc_rl.plan.text import remedies

    if plan.verdict == "does not fit":
        yield ""
        for way in remedies(advise(config, shapes, plan.gpu), more_nodes(config, shapes, plan.gpu)):
            yield f"to make it fit  {way}"


def _facts(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON can write it; sizes in bytes."""
    phases = [
        {
            "name": phase.name,
            **({"pool": phase.pool} if phase.pool else {}),
            "resident": {name: round(size) for name, size in phase.resident.items()},
            "working": {name: round(size) for name, size in phase.working.items()},
            "peak": round(phase.peak),
        }
        for phase in plan.phases
    ]
    return {
        "verdict": plan.verdict,
        "gpu": round(plan.gpu),
        "usable": round(plan.usable),
        "micro_tokens": None if plan.rows is None else plan.rows.tokens,
        "phases": phases,
        "cache_tokens": None if plan.engine is None else round(plan.engine.cache),
        "host": round(plan.host),
        "checkpoints": round(plan.checkpoints),
        "export": round(plan.export),
        "window": round(plan.window),
    }


def _time_facts(time: Duration | str) -> dict[str, Any]:
    """Return the time of a job as JSON can write it; null if it is unknown."""
    from hpc_rl.plan.duration import Duration

    if not isinstance(time, Duration):
        return {"time": None}
    return {
        "time": {
            "step_s": time.step,
            "steps": time.steps,
            "run_s": time.run,
            "node_hours": time.node_hours,
            "basis": time.basis,
        }
    }
