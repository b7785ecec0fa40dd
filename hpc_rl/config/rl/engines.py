"""The rollout engines: the programs that generate text during reinforcement learning.

To add an engine, write a module with a function `load` (see `hpc_rl.rl.rollout.engine`) and add a row to `ENGINES`;
docs/extending.md has an example. The table names modules and imports none of them, so that a login node can check a
configuration without torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hpc_rl.software.environment import openmp_defaults


@dataclass(frozen=True)
class EngineSpec:
    """Describe what an engine needs and what it can do. A device has torch's name, such as "cuda" or "cpu"."""

    module: str
    """Module whose function `load` returns the engine."""
    dtypes: Mapping[str, str]
    """Devices that the engine supports, each with the type that `rollout.dtype=auto` selects there."""
    transfers: tuple[str, ...]
    """Names in `hpc_rl.rl.weights.transfers.WEIGHT_TRANSFERS`, best first: how an engine in a separate process
    receives weights. The first one that fits the placement is used. Empty: its weights cannot change, so that `submit
    ppo` refuses it."""
    package: str | None = None
    """Package to import, if the engine needs one that training does not."""
    default_on: tuple[str, ...] = ()
    """Devices on which `rollout.name=auto` selects the engine."""
    in_process: bool = False
    """Whether the engine runs in the policy's processes if both are in one pool. Otherwise it runs in separate
    processes."""
    tensor_parallel: bool = False
    """Whether one engine can spread a model over several GPUs."""
    max_lora_rank: int = 0
    """Largest rank of adapters with which the engine computes beside the model's weights; 0: it cannot."""
    truncates_scaled: bool = False
    """Whether log-probabilities at a temperature other than 1 are those after top_k and top_p."""
    truncates: bool = True
    """Whether log-probabilities can be those after top_k and top_p, which a correction (algorithm.tis_*) needs."""
    reads_files: bool = False
    """Whether new weights have the names that they have in a model's files. Otherwise they have the names of
    transformers' parameters, which may hold several tensors of a file, such as all experts of a layer."""
    exact_on: tuple[str, ...] = ()
    """Devices on which the engine's float32 log-probabilities equal the trainer's up to rounding."""
    own_arguments: tuple[str, ...] = ()
    """Arguments (rollout.engine_kwargs) that hpc-rl sets itself. The engine does not work with other values."""
    one_only: tuple[str, ...] = ()
    """Arguments that spread an engine in ways for which no GPUs are reserved; 1 is their only possible value."""
    unsynced: tuple[str, ...] = ()
    """Arguments with which an engine does not receive new weights."""
    memory_argument: str = ""
    """Argument for the part of a GPU's memory that an engine takes."""
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Per device, variables of a separate process of the engine, set before it imports anything."""
    variables: tuple[str, ...] = ()
    """Names of the engine's variables, as patterns of bash. An image gets those that the user has exported."""

    def lora_rank_problem(self, rank: int) -> str | None:
        """Return why an engine that computes with adapters cannot have those of a rank; None if it can."""
        if rank <= self.max_lora_rank:
            return None
        return (
            f"model.lora.rank is {rank}, and engines compute with adapters of rank {self.max_lora_rank} or less "
            "(rollout.merge_lora=false): lower it, or use rollout.merge_lora=true"
        )

    def process_environment(self, device: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the variables for a process of the engine; a variable that the user has exported keeps its value."""
        return {name: environ.get(name, value) for name, value in self.environment.get(device, {}).items()}


# https://docs.vllm.ai/en/latest/configuration/env_vars/
_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine ends with its actor
    "VLLM_NO_USAGE_STATS": "1",
}
# https://docs.sglang.io/platforms/cpu_server.html
_SGLANG_CPU = {"SGLANG_USE_CPU_ENGINE": "1", **openmp_defaults(1)}
# Ray gives a worker one CPU and leaves its place to the scheduler, so threads are neither pinned nor many.
_VLLM_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **openmp_defaults(1)}

ENGINES: dict[str, EngineSpec] = {
    "hf": EngineSpec(
        module="hpc_rl.rl.rollout.hf.engine",
        dtypes={"cuda": "bfloat16", "npu": "bfloat16", "xpu": "bfloat16", "cpu": "float32"},
        transfers=("host",),
        default_on=("cpu", "npu", "xpu"),
        in_process=True,
        exact_on=("cpu",),
    ),
    "vllm": EngineSpec(
        module="hpc_rl.rl.rollout.vllm.engine",
        dtypes={"cuda": "bfloat16", "cpu": "float32"},
        transfers=("ipc", "nccl", "host"),
        package="vllm",
        default_on=("cuda",),
        tensor_parallel=True,
        reads_files=True,
        max_lora_rank=512,
        truncates_scaled=True,
        own_arguments=(
            *("tensor_parallel_size", "distributed_executor_backend", "enable_sleep_mode", "skip_tokenizer_init"),
            *("worker_extension_cls", "weight_transfer_config", "logprobs_mode"),
        ),
        one_only=("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
        unsynced=("quantization", "enable_expert_parallel"),
        memory_argument="gpu_memory_utilization",
        environment={"cuda": _VLLM, "cpu": _VLLM | _VLLM_CPU},
        variables=("VLLM_*",),
    ),
    "sglang": EngineSpec(
        module="hpc_rl.rl.rollout.sglang.engine",
        dtypes={"cuda": "bfloat16", "cpu": "float32"},
        transfers=("host",),
        package="sglang",
        reads_files=True,
        truncates=False,
        one_only=(
            *("tp", "tp_size", "tensor_parallel_size", "pp_size", "pipeline_parallel_size"),
            *("dp_size", "data_parallel_size"),
        ),
        unsynced=("quantization",),
        memory_argument="mem_fraction_static",
        environment={"cpu": _SGLANG_CPU},
        variables=("SGLANG_*",),
    ),
    # A client, which computes nothing: its slots are CPUs, and the job asks for no GPUs.
    "openai": EngineSpec(
        module="hpc_rl.rl.rollout.openai",
        dtypes={"cpu": "float32"},
        transfers=(),
        truncates=False,
    ),
}

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal["auto", *ENGINES]  # a Literal, so that help texts and errors list the engines


def default_engine(device: str) -> str:
    """Return the name of the engine that `rollout.name=auto` selects on a device."""
    return next(name for name, spec in ENGINES.items() if device in spec.default_on)
