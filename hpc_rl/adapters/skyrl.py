"""SkyRL: reinforcement learning and SFT on Ray (`-m skyrl.train.entrypoints.main_base`, `-m skyrl.train.main_sft`).

Written for SkyRL 0.3.0; `skyrl_train`, its package until May 2026, has no callbacks and is not recognised. It has not
run here: it needs GPUs. The hook is tested with its own callbacks.

Inside, its trainers get a TrainingCallback that saves when the run has to stop. RL then ends by itself; SFT is ended.
Its fully asynchronous trainer has no callbacks: it ends after its next own checkpoint (trainer.ckpt_interval).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace
from hpc_rl.adapters.hydra import appended
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.step_line import read_step_line
from hpc_rl.formats.counted import counted

_SFT = "skyrl.train.main_sft"
_MODELS = ("policy", "ref", "critic")
_PLACEMENT, _ENGINES = "trainer.placement", "generator.inference_engine"
NAMES = {
    "reward/avg_raw_reward": "critic/score/mean",
    "policy/policy_loss": "actor/pg_loss",
    "policy/policy_entropy": "actor/entropy",
    "generate/avg_num_tokens": "response_length/mean",
    "timing/step": "timing_s/step",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
}
GROUPS = {"timing/": "timing_s/", "policy/": "actor/", "eval/": "val/"}


def _is_sft(program: Program) -> bool:
    return program.module == _SFT


def _folder_option(program: Program) -> str:
    return "ckpt_path" if _is_sft(program) else "trainer.ckpt_path"


def _newest(program: Program, place: ProgramPlace) -> Checkpoint | None:
    folder = program.folder / program.options.get(_folder_option(program), str(place.run.checkpoints))
    try:
        latest = folder / "latest_ckpt_global_step.txt"
        step = int(latest.read_text())
        if latest.stat().st_mtime < place.began:
            return None
    except (OSError, ValueError):
        return None
    path = folder / f"global_step_{step}"
    return Checkpoint(step, str(path), _processes(path)) if path.is_dir() else None


def _processes(path: Path) -> int:
    """Return the number of processes that wrote a checkpoint of FSDP; 0 for Megatron, which any number loads."""
    return len(list((path / "policy").glob("model_world_size_*_rank_*.pt")))


def _sizes(program: Program, place: ProgramPlace) -> dict[str, object]:
    """Return the options for the job's size: the models share all GPUs, and the engines as well, as is its default."""
    own = program.options
    if _is_sft(program):
        return {"placement.num_nodes": place.nodes, "placement.num_gpus_per_node": place.processes}
    if own.get(f"{_PLACEMENT}.colocate_all", "true").lower() != "true":
        return {}
    wanted: dict[str, object] = {}
    for model in _MODELS:
        wanted[f"{_PLACEMENT}.{model}_num_nodes"] = place.nodes
        wanted[f"{_PLACEMENT}.{model}_num_gpus_per_node"] = place.processes
    engine_gpus = own.get(f"{_ENGINES}.tensor_parallel_size", "1")
    if not engine_gpus.isdecimal() or not int(engine_gpus):
        return wanted
    return {**wanted, f"{_ENGINES}.num_engines": max(1, place.nodes * place.processes // int(engine_gpus))}


def _arguments(program: Program, place: ProgramPlace) -> list[str]:
    wanted: dict[str, object] = {_folder_option(program): place.run.checkpoints, **_sizes(program, place)}
    if not _is_sft(program):
        wanted["trainer.log_path"] = place.run.path / "skyrl-logs"
    elif place.is_later and _newest(program, place) is not None:
        wanted["resume_from"] = "latest"
    return appended(program.options, wanted, prefix="")


def _conflicts(program: Program, place: ProgramPlace) -> list[str]:
    own, found = program.options, []
    for name, value in _sizes(program, place).items():
        if name in own and own[name] != str(value) and not name.endswith("num_engines"):
            found.append(
                f"{name}={own[name]}, but the job has {value}: leave the option out, and hpc-rl sets it, "
                "or submit with another --nodes or --gpus-per-node"
            )
    # Its RL resumes from what is in the folder, also from a checkpoint of another run.
    resumes = not _is_sft(program) and own.get("trainer.resume_mode", "latest") == "latest"
    newest = _newest(program, replace(place, began=0.0) if resumes else place)
    now = place.nodes * place.processes
    if newest is not None and newest.processes not in (0, now):
        found.append(
            f"{newest.path} was written by {counted(newest.processes, 'GPU')}, and FSDP of SkyRL resumes it with as "
            f"many only, but the job has {now}: submit it with the same number of nodes and GPUs"
        )
    return found


SKYRL = Adapter(
    name="skyrl",
    title="SkyRL",
    kinds=("ray",),
    packages=("skyrl",),
    recognises=lambda program: program.uses("skyrl.train"),
    saves="at the end of a step, before the walltime ends or when it is asked, and resumes on the same number of GPUs",
    hook="skyrl",
    saves_when_asked=True,
    ends_itself=True,
    output=lambda program: program.options.get(_folder_option(program)),
    arguments=_arguments,
    environment=lambda _program, _place: {"RAY_COLOR_PREFIX": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    conflicts=_conflicts,
    newest=_newest,
    progress=lambda line: read_step_line(line, NAMES, GROUPS),
)
