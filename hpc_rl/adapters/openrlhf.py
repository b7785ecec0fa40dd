"""OpenRLHF: PPO on Ray (`-m openrlhf.cli.train_ppo_ray`), and its SFT, DPO and reward model trainers under torchrun.

Written for OpenRLHF 0.11.2, whose options have dots (`--actor.num_nodes`), and those before (`--actor_num_nodes`).
It has not run here: it needs DeepSpeed, vLLM and GPUs. Its options are checked against its own parser.

OpenRLHF saves each --ckpt.save_steps and has no other means, so it is made to save inside, at the end of a step, and is
then ended from outside.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace, ReportedStep
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.formats.counted import counted

_PPO = "openrlhf.cli.train_ppo_ray"
_OTHERS = ("openrlhf.cli.train_sft", "openrlhf.cli.train_dpo", "openrlhf.cli.train_rm")
OLD: dict[str, str] = {
    "ckpt.path": "ckpt_path",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "train.colocate_all": "colocate_all_models",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_critic_reward": "colocate_critic_reward",
    **{f"{group}.{size}": f"{group}_{size}" for group in ("actor", "ref", "critic", "reward")
       for size in ("num_nodes", "num_gpus_per_node")},
}  # fmt: skip
"""Option -> its name before 0.11."""
NAMES = {
    "reward": "critic/score/mean",
    "rollout/reward_mean": "critic/score/mean",
    "policy_loss": "actor/pg_loss",
    "actor_lr": "actor/lr",
    "entropy_loss": "actor/entropy",
    "kl": "actor/kl",
    "critic_loss": "critic/vf_loss",
    "response_length": "response_length/mean",
    "rollout/response_length_mean": "response_length/mean",
    "timing/step_total": "timing_s/step",
}
_STEP = re.compile(r"Global step (\d+): (\{.*\})")


class Options:
    """Its options in the spelling of the user's version."""

    def __init__(self, program: Program) -> None:
        self._own = program.options
        self._is_old = not any("." in name for name in self._own)

    def name(self, option: str) -> str:
        """Return an option as this version spells it."""
        return f"--{OLD[option] if self._is_old else option}"

    def get(self, option: str) -> str | None:
        """Return its value; empty for a flag that is set."""
        return self._own.get(self.name(option)[2:])

    def count(self, option: str, default: int) -> int:
        """Return its number."""
        found = self.get(option) or ""
        return int(found) if found.isdecimal() else default


def _folder(program: Program, place: ProgramPlace) -> Path:
    return program.folder / (Options(program).get("ckpt.path") or str(place.run.checkpoints))


def _newest(program: Program, place: ProgramPlace) -> Checkpoint | None:
    folder = _folder(program, place)
    critic = folder / "_critic"
    folder = folder / "_actor" if program.module == _PPO else folder
    try:
        latest = folder / "latest"
        if latest.stat().st_mtime < place.began:
            return None
        name = latest.read_text().strip()
        if folder.name == "_actor" and critic.is_dir() and (critic / "latest").read_text().strip() != name:
            return None  # it is written after the actor
    except OSError:
        return None
    match, path = re.fullmatch(r"global_step(\d+)", name), folder / name
    if match is None or not path.is_dir():
        return None
    return Checkpoint(int(match[1]), str(path), len(list(path.glob("*_optim_states.pt"))))


def _resuming(program: Program, place: ProgramPlace) -> list[str]:
    options = Options(program)
    found = [] if options.get("ckpt.path") else [options.name("ckpt.path"), str(place.run.checkpoints)]
    # Without `latest`, --ckpt.load_enable ends with a KeyError.
    is_given = options.get("ckpt.load_enable") is not None
    if place.is_later and not is_given and _newest(program, place) is not None:
        found.append(options.name("ckpt.load_enable"))
    return found


def _sizes(program: Program, place: ProgramPlace) -> list[str]:
    """Return options for the groups of processes: the job's size for all models, which share their GPUs."""
    options = Options(program)
    wanted = {f"{group}.num_nodes": place.nodes for group in ("actor", "ref", "critic", "reward")}
    wanted |= {f"{group}.num_gpus_per_node": place.processes for group in ("actor", "ref", "critic", "reward")}
    if options.get("train.colocate_all") is None:
        return []
    engines = place.nodes * place.processes // max(1, options.count("vllm.tensor_parallel_size", 1))
    wanted["vllm.num_engines"] = max(1, engines)
    return [word for name, value in wanted.items() if options.get(name) is None
            for word in (options.name(name), str(value))]  # fmt: skip


def gpus_needed(program: Program) -> int:
    """Return the number of GPUs that its groups ask Ray for; it would wait for them forever."""
    options = Options(program)
    groups = {
        group: options.count(f"{group}.num_nodes", 1) * options.count(f"{group}.num_gpus_per_node", 8)
        for group in ("actor", "ref", "critic", "reward")
    }
    engines = options.count("vllm.num_engines", 0) * options.count("vllm.tensor_parallel_size", 1)
    if options.get("train.colocate_all") is not None:
        return max(groups["actor"], engines)
    together = (("train.colocate_actor_ref", "ref"), ("train.colocate_critic_reward", "reward"))
    return (
        engines + sum(groups.values()) - sum(groups[name] for flag, name in together if options.get(flag) is not None)
    )


def _conflicts(program: Program, place: ProgramPlace) -> list[str]:
    options, now, found = Options(program), place.nodes * place.processes, []
    if options.get("ckpt.disable_ds") is not None:
        found.append(
            f"{options.name('ckpt.disable_ds')}: without these checkpoints a run cannot be resumed; leave it out"
        )
    sized = Program((*program.words, *_sizes(program, place)), program.folder)
    if program.module == _PPO and (needed := gpus_needed(sized)) > now:
        names = ", ".join(options.name(f"{group}.num_gpus_per_node") for group in ("actor", "ref", "critic", "reward"))
        found.append(
            f"the models and engines ask for {counted(needed, 'GPU')}, but the job has {now}, and OpenRLHF would wait "
            f"forever: set {names} and {options.name('vllm.num_engines')}, or {options.name('train.colocate_all')}"
        )
    # With the user's own --ckpt.load_enable, the first attempt resumes from what another run has written.
    newest = _newest(program, replace(place, began=0.0) if options.get("ckpt.load_enable") is not None else place)
    if newest is not None and newest.processes and newest.processes != _training_gpus(sized, now):
        found.append(
            f"{newest.path} was written by {newest.processes} GPUs, and DeepSpeed resumes it on the same number; this "
            f"job trains on {_training_gpus(sized, now)}: submit it with the same number of nodes and GPUs"
        )
    return found


def _training_gpus(program: Program, all_gpus: int) -> int:
    options = Options(program)
    if program.module != _PPO:
        return all_gpus
    return options.count("actor.num_nodes", 1) * options.count("actor.num_gpus_per_node", 8)


def progress(line: str) -> ReportedStep | None:
    """Read `Global step 12: {...}`, with its measurements under our names."""
    if (match := _STEP.search(line)) is None:
        return None
    try:
        values = ast.literal_eval(match[2])
    except (ValueError, SyntaxError):
        values = {}
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return ReportedStep(
        int(match[1]), None, {NAMES.get(name, _grouped(name)): value for name, value in numbers.items()}
    )


def _grouped(name: str) -> str:
    return f"timing_s/{name.removeprefix('timing/')}" if name.startswith("timing/") else f"train/{name.split('/')[-1]}"


def _ran(*modules: str) -> Callable[[Program], bool]:
    return lambda program: program.module in modules


OPENRLHF = Adapter(
    name="openrlhf",
    title="OpenRLHF",
    kinds=("ray",),
    packages=("openrlhf",),
    recognises=_ran(_PPO),
    saves="at the end of a step, before the walltime ends or when it is asked, and resumes on the same number of GPUs",
    hook="openrlhf",
    saves_when_asked=True,
    output=lambda program: Options(program).get("ckpt.path"),
    arguments=lambda program, place: [*_resuming(program, place), *_sizes(program, place)],
    environment=lambda _program, _place: {"RAY_COLOR_PREFIX": "0"},
    conflicts=_conflicts,
    newest=_newest,
    progress=progress,
)
OPENRLHF_TRAINERS = Adapter(
    name="openrlhf-trainers",
    title="OpenRLHF's SFT, DPO and reward model trainers",
    kinds=("torchrun",),
    packages=("openrlhf",),
    recognises=_ran(*_OTHERS),
    saves=OPENRLHF.saves,
    hook="openrlhf",
    saves_when_asked=True,
    output=OPENRLHF.output,
    arguments=_resuming,
    conflicts=_conflicts,
    newest=_newest,
)
