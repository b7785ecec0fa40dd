"""KINDS: the table of job kinds. To add a kind, add a row, a file with its options and the module that the job runs.

The table is in `config` because the commands, the site profiles, the launcher and the trainers all read it. It names
modules as strings, so that `hpc-rl --help` imports none of them, and a login node only those that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hpc_rl.config.job import JobConfig


@dataclass(frozen=True)
class JobKind:
    """One row of the table: a job that `hpc-rl submit NAME` can run."""

    name: str
    """Also the name of its job file, configs/NAME.yaml."""
    meaning: str
    """A few words for help pages."""
    options: str
    """Module and class of its options: a JobConfig."""
    launcher: Literal["torchrun", "ray", "doctor", "lend"] = "torchrun"
    """What starts the processes on each node."""
    trainer: str | None = None
    """Module of this project that the node entry starts. None: the job runs the user's own program."""
    trainer_options: tuple[str, ...] = ()
    """Arguments of the trainer, which `--config FILE` follows."""
    result: str | None = None
    """File or folder in the run directory that a later stage of a pipeline can use. None: the kind is no stage."""
    needs: tuple[str, ...] = ()
    """Packages that the job's Python has to have."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """For each required key, words of a command line that set it, for the error message if keys are missing."""
    test_settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value that make a run short, for `submit --test`."""
    is_internal: bool = False
    """Whether only hpc-rl itself submits this kind, so that `submit` does not offer it."""

    @property
    def schema(self) -> type[JobConfig]:
        """The class of its options."""
        module, _, name = self.options.partition(":")
        found: type[JobConfig] = getattr(import_module(module), name)
        return found

    @property
    def node_entry(self) -> str:
        """Module that runs on each node, in a Slurm task."""
        return _NODE_ENTRIES[self.launcher]

    @property
    def template(self) -> str:
        """Template of the job script, in slurm_templates/."""
        return f"{self.launcher}.sbatch.j2"

    @property
    def trainer_command(self) -> list[str]:
        """The arguments of Python that start the trainer; empty if there is none."""
        return ["-m", self.trainer, *self.trainer_options] if self.trainer is not None else []

    def result_in(self, run_dir: Path) -> Path:
        """Return the path of the result of a run."""
        assert self.result is not None
        return run_dir / self.result

    @property
    def takes_program(self) -> bool:
        """Whether the user names the program to run, after `--`."""
        return self.trainer is None and not self.is_internal


_NODE_ENTRIES = {
    "torchrun": "hpc_rl.node.torchrun",
    "ray": "hpc_rl.node.ray_cluster.node",
    "doctor": "hpc_rl.node.health.check",
    "lend": "hpc_rl.node.ray_cluster.lender",
}
_MODEL = "model"
"""The folder of an exported model."""
_TRAINING = ("torch", "transformers", "safetensors")
_GSM8K = "data.train_files=openai/gsm8k:main data.prompt_key=question"
_CHATS = {"model.path": "model=qwen2.5-0.5b", "data.train_files": f"{_GSM8K} data.response_key=answer"}
_PAIRS = {"model.path": "model=qwen2.5-0.5b", "data.train_files": "data.train_files=pairs.jsonl"}
_GENERATION = (*_TRAINING, "ray", "tensordict")
_PROMPTS = {
    "model.path": "model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "data.files": "data.files=openai/gsm8k:main data.prompt_key=question",
}


def _finetuning(name: str, meaning: str, options: str, examples: Mapping[str, str]) -> JobKind:
    return JobKind(
        name=name,
        meaning=meaning,
        options=f"hpc_rl.config.training.{options}",
        trainer="hpc_rl.finetune.train",
        trainer_options=() if name == "sft" else ("--kind", name),
        result=_MODEL,
        needs=(*_TRAINING, "pyarrow"),
        examples=examples,
        test_settings={"trainer.total_training_steps": 2},
    )


KINDS: dict[str, JobKind] = {
    kind.name: kind
    for kind in (
        _finetuning("sft", "supervised fine-tuning", "sft:SftConfig", _CHATS),
        _finetuning(
            "dpo",
            "direct preference optimisation (DPO, IPO, KTO, SimPO, ORPO, ...)",
            "preferences:DpoConfig",
            _PAIRS,
        ),
        _finetuning("rm", "training of a reward model", "preferences:RmConfig", _PAIRS),
        _finetuning(
            "distill",
            "distillation from a teacher model",
            "distill:DistillConfig",
            {**_CHATS, "teacher.path": "teacher.path=Qwen/Qwen2.5-7B"},
        ),
        JobKind(
            name="ppo",
            meaning="reinforcement learning (PPO, GRPO, ...)",
            options="hpc_rl.config.rl.ppo:PpoConfig",
            trainer="hpc_rl.rl.main_ppo",
            test_settings={"trainer.total_training_steps": 2, "critic.warmup_steps": 0},
            result=_MODEL,
            needs=_GENERATION,
            examples={
                "model.path": "model.path=Qwen/Qwen2.5-0.5B-Instruct",
                "data.train_files": _GSM8K,
                "reward.function": "reward.function=gsm8k",
            },
            launcher="ray",
        ),
        JobKind(
            name="generate",
            meaning="responses to prompts, with scores",
            options="hpc_rl.config.rl.generate:GenerateConfig",
            trainer="hpc_rl.rl.main_generate",
            test_settings={"data.max_prompts": 8},
            needs=_GENERATION,
            examples=_PROMPTS,
            result="responses.jsonl",
            launcher="ray",
        ),
        JobKind(
            name="eval",
            meaning="scores of a model (mean, pass@k, maj@k)",
            options="hpc_rl.config.rl.generate:EvalConfig",
            trainer="hpc_rl.rl.main_generate",
            trainer_options=("--kind", "eval"),
            test_settings={"data.max_prompts": 8},
            needs=_GENERATION,
            examples={**_PROMPTS, "reward.function": "reward.function=gsm8k"},
            result="eval.json",
            launcher="ray",
        ),
        JobKind(
            name="select",
            meaning="training data from scored responses",
            options="hpc_rl.config.training.select:SelectConfig",
            trainer="hpc_rl.data.main_select",
            needs=("torch",),
            examples={
                "select.responses": "select.responses=runs/generate-1/responses.jsonl",
                "select.method": "select.method=pairs",
            },
            result="selected.jsonl",
        ),
        JobKind(
            name="torchrun",
            meaning="your own torchrun program",
            options="hpc_rl.config.job:JobConfig",
            needs=("torch",),
        ),
        JobKind(
            name="ray",
            meaning="your own Ray program",
            options="hpc_rl.config.ray:RayJobConfig",
            needs=("ray",),
            launcher="ray",
        ),
        JobKind(
            name="lend",
            meaning="nodes for the rollouts of a run",
            options="hpc_rl.config.lend:LendConfig",
            needs=("ray", "torch", "transformers"),
            launcher="lend",
            is_internal=True,
        ),
        JobKind(
            name="doctor",
            meaning="checks of the nodes",
            options="hpc_rl.config.ray:RayJobConfig",
            launcher="doctor",
            is_internal=True,
        ),
    )
}


def offered() -> Iterator[JobKind]:
    """Yield the kinds that a user can submit, in the order of the table."""
    return (kind for kind in KINDS.values() if not kind.is_internal)


def trained() -> list[str]:
    """Return the names of the kinds that train a model. These can be stages of a chain."""
    return [kind.name for kind in KINDS.values() if kind.result == _MODEL]


def piped() -> list[str]:
    """Return the names of the kinds that leave a result, which can be stages of a pipeline."""
    return [kind.name for kind in KINDS.values() if kind.result is not None]
