"""Whether what a stage takes from earlier stages is of the kind that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.preferences import RmConfig
from hpc_rl.config.training.select import SelectConfig
from hpc_rl.config.tree import flat
from hpc_rl.errors import UserError
from hpc_rl.submission.job import Job

_LANGUAGE_MODELS = ("model.path", "teacher.path", "ref.path")
_REWARD_MODEL = "reward.model"


def check_models(job: Job, before: Sequence[Job]) -> None:
    """Check the models that earlier stages will have exported, which cannot be looked at yet.

    Raises:
        UserError: one is a folder of adapters, a reward model where a language model is needed, or the reverse.
    """
    exported = {one.run_dir.model: one for one in before}
    options = flat(job.config.model_dump())
    for key in (*_LANGUAGE_MODELS, _REWARD_MODEL, "critic.path"):
        source = exported.get(Path(options.get(key) or "").absolute())
        if source is None:
            continue
        found = f"{key} is the result of {source.run_dir.name} ({source.kind})"
        model = getattr(source.config, "model", None)
        if isinstance(model, ModelConfig) and model.lora.is_used and not model.lora.merge:
            raise UserError(f"{found}, which exports only adapters: leave out its model.lora.merge=false")
        is_trained_further = job.kind == "rm" and key == "model.path"
        if key in _LANGUAGE_MODELS and source.kind == "rm" and not is_trained_further:
            raise UserError(f"{found}, a reward model, and a language model is needed: take that of another stage")
        if key == _REWARD_MODEL and source.kind != "rm":
            raise UserError(f"{found}, a language model, and a reward model is needed: take that of a stage rm")
        needed = _outputs(job, key)
        if isinstance(source.config, RmConfig) and source.config.outputs != needed:
            counted = {_REWARD_MODEL: "reward.weights", "model.path": "data.label_keys"}.get(key, "the critic")
            raise UserError(
                f"{found}, which has {source.config.outputs} outputs (data.label_keys), but {counted} needs {needed}: "
                "make them the same"
            )


def _outputs(job: Job, key: str) -> int:
    """Return the outputs that a reward model has to have which is this option of a job; a critic has one."""
    if isinstance(job.config, PpoConfig | GenerateConfig) and key == _REWARD_MODEL:
        return job.config.reward.outputs
    return job.config.outputs if isinstance(job.config, RmConfig) else 1


def check_responses(job: Job, before: Sequence[Job]) -> None:
    """Check that responses of earlier stages, which do not exist yet, will be what a selection needs.

    Raises:
        UserError: they have no scores, or one response to each prompt where the best is to be found.
    """
    if not isinstance(job.config, SelectConfig):
        return
    select = job.config.select
    sources = {one.run_dir.responses: one for one in before}
    for path in select.responses:
        source = sources.get(Path(path).absolute())
        if source is None or not isinstance(source.config, GenerateConfig):
            continue
        found = f"select.responses is the result of {source.run_dir.name} (generate)"
        if not source.config.scores:
            raise UserError(f"{found}, which has no reward, so its responses have no scores: set its reward")
        if select.method != "threshold" and source.config.rollout.n == 1:
            raise UserError(f"{found}, with one response to each prompt: raise its rollout.n for {select.method}")
