"""The plan of a job against what a simulated GPU traces, for a wider copy of a family's small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from hpc_rl.config.base import Section
from hpc_rl.plan.memory import phases
from hpc_rl.plan.shape import shape_of
from tests.simulated_gpu import scenarios
from tests.simulated_gpu.models import untrained
from tests.simulated_gpu.patches import GPU_BYTES
from tests.simulated_gpu.process import simulate
from tests.simulated_gpu.scenarios import Job, Phase, config_of, sft_step
from tests.small_models.families import settings_of

TOLERANCE = 0.1
WIDER = 8
_WIDTHS = {
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("mamba_n_heads", "mamba_num_heads", "mamba_d_ssm", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_num_heads", "kv_lora_rank", "q_lora_rank", "intermediate_size_mlp", "laurel_rank", "out_hidden_size"),
    "hidden_size_per_layer_input",
}
JOB = Job(ranks=1, gpus_per_node=1, micro_tokens=8192, length=1024, options=("data.train_batch_size=4096",))


def job_of(kind: str, options: Sequence[str]) -> Job:
    """Return the job of a family. The code of Jamba computes one token after the other, and that of MiniMax 8."""
    job = replace(JOB, options=(*JOB.options, *options))
    return replace(job, micro_tokens=512, length=256) if kind in ("jamba", "minimax") else job


def wider(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with more and wider parts, and a larger vocabulary."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and name == "text_config":
            found[name] = wider(value)
        elif name in _WIDTHS and value:
            found[name] = [WIDER * one for one in value] if isinstance(value, list) else WIDER * value
        elif name == "vision_config":
            found[name] = {**value, **({"out_hidden_size": WIDER * 128} if "out_hidden_size" in value else {})}
        else:
            found[name] = value
    large = {"vocab_size": 32000, "vocab_size_per_layer_input": 32000, "max_position_embeddings": 4096}
    return found | {name: size for name, size in large.items() if name in found}


def compared_with_plan(kind: str, options: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return what is planned and traced, in bytes: of weights and moments, and at the peak of a step of SFT.

    Args:
        options: further options of the job.
    """
    from transformers import AutoConfig

    settings = wider(settings_of(kind))
    as_json = AutoConfig.for_model(kind, **settings).to_dict()
    job = job_of(kind, options)
    config: Any = config_of(job, "sft")
    assert isinstance(config, Section)
    planned = {phase.name: phase.peak for phase in phases(config, {"/model": shape_of(as_json, kind)}, GPU_BYTES)}
    traced = simulate(_traced, kind, settings, job)
    return {
        "weights and moments": (planned["load"], traced["load"].live),
        "step": (planned["update"], traced["update"].peak),
    }


def _traced(kind: str, settings: dict[str, Any], job: Job) -> dict[str, Phase]:
    """Trace a step of SFT. Called in the process that simulates a GPU."""
    from transformers import AutoConfig

    model = untrained(AutoConfig.for_model(kind, **settings))
    with mock.patch.object(scenarios, "loading_without_files", lambda *_: model):
        return sft_step(job)
