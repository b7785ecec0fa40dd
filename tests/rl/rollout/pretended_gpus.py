"""vLLM's Ray executor on GPUs that only Ray counts: its code runs unchanged, and its workers compute on the CPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from hpc_rl.rl.rollout.engine_process import EngineProcess

CUDA: dict[str, Any] = {
    "ray_device_key": "GPU",
    "device_control_env_var": "CUDA_VISIBLE_DEVICES",
    "ray_noset_device_env_vars": ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"],
}
"""Attributes of vLLM's CudaPlatformBase, whose module needs compiled parts; check_calls.py compares them."""


def name_gpus() -> None:
    """Let vLLM's platform for CPUs answer like the one for CUDA where the executor asks for a node's GPUs."""
    from vllm.platforms import current_platform

    for name, value in CUDA.items():
        setattr(type(current_platform), name, value)


class PretendedWorker(RayWorkerProc):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        name_gpus()
        super().__init__(*arguments, **named)


class PretendedEngine(EngineProcess):
    def start(self) -> None:
        name_gpus()
        ray_executor_v2.RayWorkerProc = PretendedWorker
        super().start()
