"""verl: reinforcement learning on Ray (`-m verl.trainer.main_ppo`), and its SFT trainer under torchrun.

Written for verl 0.9.1; its options and its V0 trainer are those of 0.6 and later. The SFT trainer has run here on two
nodes with CPUs. The loop of V1 has run with stubs for its workers. V0 has not run.

main_ppo, V1 (0.9 and later): `trainer.checkpoint_callback_class` (0.9.1) is our StopCallback, which calls
the user's own.
main_ppo, V0: it saves before a time that it takes from a variable of a cloud; inside, it saves for the stop file too.
Another version ends after its next own checkpoint. The SFT trainer has neither, so it is changed inside.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace, ReportedStep
from hpc_rl.adapters.hydra import appended, given, size_conflicts
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint

ENV_CALLBACK = "HPC_RL_VERL_CALLBACK"
"""Class of the user's own trainer.checkpoint_callback_class."""
CALLBACK = "hpc_rl.adapters.inside.verl_ppo.StopCallback"
SELDOM = 10**6
"""trainer.save_freq of a user who gave none: V0 saves at no time if it is -1, and at the last step otherwise."""
SAVE_S = 120
"""trainer.esi_redundant_time: seconds for a checkpoint, besides the minute that V0 adds itself."""
_FOLDER, _CALLBACK = "trainer.default_local_dir", "trainer.checkpoint_callback_class"
_NODES, _GPUS, _CPUS = "trainer.nnodes", "trainer.n_gpus_per_node", "ray_kwargs.ray_init.num_cpus"
_EXPIRY = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
_TRACKER = "latest_checkpointed_iteration.txt"
_RL = re.compile(
    r"verl\.trainer\.main_ppo(_sync)?|verl\.experimental\.\w+\.(main_ppo|fully_async_main)|recipe\..+\.main\w*"
)
_SFT = re.compile(r"verl\.trainer\.(fsdp_)?sft_trainer")
_TOTAL = re.compile(r"Total (?:training )?steps: (\d+)")
_STEP = re.compile(r"\bstep:(\d+) - (.+)")
_NUMBER = re.compile(r"(?:np\.\w+\()?([-+.\deE]+|nan|inf|-inf)\)?")
_OTHER_NAMES = {"train/mfu": "perf/mfu"}


def _newest(program: Program, place: ProgramPlace) -> Checkpoint | None:
    folder = program.folder / given(program).get(_FOLDER, str(place.run.checkpoints))
    try:
        tracker = folder / _TRACKER
        if tracker.stat().st_mtime < place.began:
            return None
        step = int(tracker.read_text())
    except (OSError, ValueError):
        return None
    path = folder / f"global_step_{step}"
    return Checkpoint(step, str(path), _processes(path)) if path.is_dir() else None


def _processes(path: Path) -> int:
    """Return the number of processes that wrote a checkpoint of FSDP, and no other number loads; 0 for Megatron."""
    for part in (path, path / "actor"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads((part / "fsdp_config.json").read_text())["world_size"])
    return 0


def _other_size(program: Program, place: ProgramPlace) -> list[str]:
    # verl resumes from what is in the folder, also from a checkpoint of another run.
    found, now = _newest(program, replace(place, began=0.0)), place.nodes * place.processes
    if found is None or found.processes in (0, now) or given(program).get("trainer.resume_mode") == "disable":
        return []
    return [
        f"{found.path} was written by {found.processes} GPUs, and FSDP of verl resumes it on the same number, but the "
        f"job has {now}: submit it with the same number of nodes and GPUs"
    ]


def _has_other_pools(own: Mapping[str, str]) -> bool:
    """Return whether engines or reward models have GPUs of their own, besides those of trainer.nnodes."""
    pools = any(name.endswith("enable_resource_pool") and value != "False" for name, value in own.items())
    return pools or any(re.search(r"rollout\.(nnodes|n_gpus_per_node)$", name) for name in own)


def _arguments(program: Program, place: ProgramPlace) -> list[str]:
    own = given(program)
    sizes = {} if _has_other_pools(own) else {_NODES: place.nodes, _GPUS: place.processes}
    wanted = {_FOLDER: place.run.checkpoints, "trainer.save_freq": SELDOM, "trainer.esi_redundant_time": SAVE_S}
    return [
        *appended(own, {**sizes, **wanted}),
        f"++{_CALLBACK}={CALLBACK}",
        *([f"{_CPUS}=null"] if own.get(_CPUS, "null") != "null" else []),  # Ray refuses it in a running cluster
    ]


def _environment(program: Program, place: ProgramPlace) -> dict[str, str]:
    found = {"RAY_COLOR_PREFIX": "0"}
    if (callback := given(program).get(_CALLBACK, "null")) != "null":
        found[ENV_CALLBACK] = callback
    if place.seconds is not None:
        found[_EXPIRY] = str(int(time.time() + place.seconds))
    return found


def progress(line: str) -> ReportedStep | None:
    """Read a line of verl's console logger, whose names are ours, or the line with the number of steps."""
    if (step := _STEP.search(line)) is None:
        return ReportedStep(0, int(total[1])) if (total := _TOTAL.search(line)) else None
    found = {}
    for pair in step[2].split(" - "):
        name, _, value = pair.strip().rpartition(":")
        if name and (number := _NUMBER.fullmatch(value.strip())):
            with contextlib.suppress(ValueError):
                found[_OTHER_NAMES.get(name, name)] = float(number[1])
    tokens, seconds = found.get("perf/total_num_tokens"), found.get("timing_s/step")
    if tokens and seconds:
        found["perf/tokens_per_s"] = tokens / seconds
    return ReportedStep(int(step[1]), None, found)


def _output(program: Program) -> str | None:
    return given(program).get(_FOLDER)


VERL = Adapter(
    name="verl",
    title="verl",
    kinds=("ray",),
    packages=("verl",),
    recognises=lambda program: _RL.fullmatch(program.module) is not None,
    saves="at the end of a step, before the walltime ends or when it is asked, and resumes on the same number of GPUs",
    hook="verl_ppo",
    saves_when_asked=True,
    ends_itself=True,
    output=_output,
    arguments=_arguments,
    environment=_environment,
    conflicts=lambda program, place: [
        *([] if _has_other_pools(own := given(program)) else size_conflicts(own, place, _NODES, _GPUS)),
        *_other_size(program, place),
    ],
    newest=_newest,
    progress=progress,
    stops=lambda line: "Force saving checkpoint: ESI instance expiration approaching" in line,
)
VERL_SFT = Adapter(
    name="verl-sft",
    title="verl's SFT trainer",
    kinds=("torchrun",),
    packages=("verl",),
    recognises=lambda program: _SFT.fullmatch(program.module) is not None,
    saves=VERL.saves,
    hook="verl_sft",
    saves_when_asked=True,
    ends_itself=True,
    has_heartbeats=True,
    output=_output,
    arguments=lambda program, place: appended(given(program), {_FOLDER: place.run.checkpoints}),
    conflicts=_other_size,
    newest=_newest,
    progress=progress,
)
