"""What config.json of each model of a job has to meet, as a list of rules that `submit` and `plan` apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_name, room
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.formats.model_families import refuse_family, refuse_unserved
from hpc_rl.formats.model_kind import refuse_other_frequencies, refuse_transformers_4, refuse_unsplittable_engine
from hpc_rl.formats.model_options import refuse_option, refuse_unsplittable, refuse_without_liger
from hpc_rl.plan.memory import Planned, computed_here
from hpc_rl.submission.preflight.program import has_unknown_python, transformers_version


def rules_for(key: str, config: Planned) -> Iterator[tuple[Callable[..., None], tuple[int | str, ...]]]:
    """Yield the rules for a model of a job: each takes the key, the path and the settings, and these further arguments.

    Args:
        key: the option that names the model.
    """
    if key in (computed := computed_here(config)):
        yield refuse_family, (computed[key], config.trainer.packing)
        version = "" if has_unknown_python(config) else transformers_version(config.slurm.python)
        yield refuse_transformers_4, (version, config.trainer.packing)
    if isinstance(config.model, ModelConfig) and key in ("model.path", "critic.path"):
        yield from ((refuse_option, (name,)) for name in config.model.restricted())
        if isinstance(config, PpoConfig) and key == "model.path" and not config.rollout.merge_lora:
            yield refuse_option, ("adapters in engines",)
    if not isinstance(config, GenerateConfig) and config.trainer.sequence_parallel > 1:
        yield refuse_unsplittable, (config.trainer.sequence_parallel,)
    engine_gpus = config.rollout.tensor_parallel_size if isinstance(config, PpoConfig | GenerateConfig) else 1
    if key == "model.path" and engine_gpus > 1:
        yield refuse_unsplittable_engine, (engine_gpus,)
    if key == "model.path" and isinstance(config, PpoConfig | GenerateConfig):
        yield refuse_unserved, (engine_name(config.rollout, config.trainer.computes_on),)
    if key == "model.path" and isinstance(config, PpoConfig):
        yield refuse_other_frequencies, (engine_name(config.rollout, config.trainer.computes_on), room(config))
    is_trained = key in ("model.path", "critic.path", "ref.path")
    if isinstance(config.model, ModelConfig) and config.model.use_liger and is_trained:
        yield refuse_without_liger, ()
