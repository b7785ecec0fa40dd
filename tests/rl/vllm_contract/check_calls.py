"""The calls, names and variables with which the rollout engine uses vLLM exist in this version of it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import hpc_rl
from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.formats.peft_folder import new_config
from hpc_rl.rl.rollout.engine import Placement, Request, Sampling, Span
from hpc_rl.rl.rollout.vllm import adapters as vllm_adapters
from hpc_rl.rl.rollout.vllm import engine as engine_module
from hpc_rl.rl.rollout.vllm import processes as vllm_processes
from hpc_rl.rl.rollout.vllm.engine import PARTS
from hpc_rl.rl.rollout.vllm.worker import WeightUpdates
from hpc_rl.rl.weights.buckets import pack
from tests.rl.vllm_contract.pretend import make_engine


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_the_transfers_are_registered(backend: str) -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    assert backend in WeightTransferEngineFactory._registry and backend in WeightTransferTrainerFactory._registry


def test_one_ray_executor_serves_tensor_parallel_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor takes a share of each GPU in the given bundles, and passes vLLM's variables to its processes."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

    def executor(backend: str) -> type:
        return Executor.get_class(
            SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
        )

    assert executor("ray") is RayExecutorV2
    assert [executor(backend).__name__ for backend in ("mp", "uni")] == ["MultiprocExecutor", "UniProcExecutor"]
    for name in ("VLLM_RAY_PER_WORKER_GPUS", "VLLM_RAY_BUNDLE_INDICES", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, "/cache")
    vllm_processes.spread_over(Placement("cuda", "nccl", bundles=(2, 3), gpu_share=0.5))
    import vllm.envs as envs
    from vllm.v1.executor import ray_executor_v2

    monkeypatch.setattr(ray_executor_v2, "current_platform", SimpleNamespace(ray_device_key="GPU"))
    assert RayExecutorV2._get_actor_resource_kwargs() == {"num_gpus": 0.5}
    assert envs.VLLM_RAY_BUNDLE_INDICES == "2,3"
    assert ray_executor_v2.get_driver_env_vars(worker_specific_vars=set())["VLLM_CACHE_ROOT"] == "/cache"


def test_a_worker_prepares_its_process_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has told a worker the GPUs of the engine before it makes the class that the worker extends."""
    from vllm.v1.executor import ray_executor_v2
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    class Reached(Exception):
        pass

    class Worker(WorkerBase):
        def __init__(self, **_: Any) -> None:
            raise Reached(os.environ["VLLM_CACHE_ROOT"])

    prepared: list[Any] = []
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr("vllm.v1.worker.worker_base.resolve_obj_by_qualname", {"W": Worker, "E": WeightUpdates}.get)
    monkeypatch.setattr("vllm.v1.worker.worker_base.worker_receiver_cache_from_config", lambda *_: None)
    monkeypatch.setattr("vllm.v1.worker.worker_base.set_current_vllm_config", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("hpc_rl.rl.rollout.vllm.worker.log_as_worker", prepared.append)
    monkeypatch.setattr("vllm.platforms.interface._assigned_physical_gpu_ids", None)
    parallel = SimpleNamespace(worker_cls="W", worker_extension_cls="E", world_size=2)
    config = mock.create_autospec(ray_executor_v2.VllmConfig, instance=True, parallel_config=parallel)
    process = object.__new__(ray_executor_v2.RayWorkerProc)
    process._init_kwargs = dict(
        vllm_config=config, rank=1, input_shm_handle=None, shared_worker_lock=None, is_driver_worker=False
    )
    assert WorkerWrapperBase is sys.modules[ray_executor_v2.WorkerProc.__module__].WorkerWrapperBase
    with pytest.raises(Reached, match=f"^{tmp_path}/devices-2-3$"):
        process.initialize_worker(1, {}, "tcp://", {"VLLM_CACHE_ROOT": "/of the engine"}, [2, 3])
    assert prepared == [1]


def test_the_death_of_a_worker_is_an_error_that_the_engine_expects() -> None:
    """Both executors name their workers as the watch reads them, and the engine core has them in this process."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProcHandle
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerHandle

    assert {"proc", "rank"} <= {field.name for field in dataclasses.fields(WorkerProcHandle)}
    assert {"run_ref", "rank"} <= {field.name for field in dataclasses.fields(RayWorkerHandle)}
    assert "self.ray_worker_handles" in inspect.getsource(RayExecutorV2._init_executor)
    assert "self.workers" in inspect.getsource(MultiprocExecutor._init_executor)
    assert "self.model_executor = self.engine_core.engine_core.model_executor" in inspect.getsource(LLMEngine.__init__)
    called: list[str] = []
    executor = object.__new__(RayExecutorV2)
    executor.is_failed, executor.rpc_broadcast_mq = True, mock.Mock()
    executor.register_failure_callback(lambda: called.append("ended"))
    assert called == ["ended"]
    with pytest.raises(RuntimeError, match="Executor failed"):
        executor.collective_rpc("execute_model")
    executor.rpc_broadcast_mq = None  # as after the shutdown
    with pytest.raises(AssertionError):
        executor.collective_rpc("execute_model")


def test_every_variable_of_the_engine_is_read_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs as envs

    names = {name for device in ENGINES["vllm"].environment.values() for name in device if name.startswith("VLLM_")}
    used = {*names, "VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_BATCH_INVARIANT"}
    assert used <= envs.environment_variables.keys()
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/scratch/vllm")
    assert envs.VLLM_CACHE_ROOT == "/scratch/vllm"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert not envs.VLLM_ENABLE_V1_MULTIPROCESSING


def test_a_request_and_its_answer() -> None:
    """The engine's calls fit LLMEngine's signatures, its requests fit SamplingParams, and it reads vLLM's answer."""
    from vllm import SamplingParams
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = make_engine(mock.MagicMock(), "ipc")
    engine._eos_token_ids = [7]
    engine._llm.llm_engine = core = mock.create_autospec(LLMEngine, instance=True)
    core.model_config = SimpleNamespace(max_model_len=64)
    core.add_request.return_value = "8-abcd"
    logprobs = [{5: Logprob(-0.5)}, {7: Logprob(-1.0)}]
    output = CompletionOutput(0, "", [5, 7], None, logprobs, finish_reason="stop")
    core.step.side_effect = [[], [RequestOutput("8", None, [1, 2], None, [output], True)]]
    sampling = Sampling(9, temperature=0.7, top_p=0.9, top_k=4)
    engine.add([Request(8, np.array([1, 2], np.int32), 3, sampling)])
    assert engine.running == 1
    ((number, found),) = engine.advance(600, 0)
    assert number == 8 and engine.running == 0 and found.spans == (Span(0, 2),)
    assert found.finished and found.token_ids.tolist() == [5, 7] and found.logprobs.tolist() == [-0.5, -1.0]
    name, prompt, params = core.add_request.call_args.args
    assert (name, prompt) == ("8", {"prompt_token_ids": [1, 2]}) and isinstance(params, SamplingParams)
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (9, 0.7, 4, 3)
    assert params.stop_token_ids == [7] and params.ignore_eos and params.logprobs == 0
    assert params.output_kind == RequestOutputKind.FINAL_ONLY


def test_the_tokens_of_a_request_that_is_not_complete() -> None:
    """They are counted by the detokenizer, also if there is no tokenizer."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

    processor = OutputProcessor(None, log_stats=False)
    detokenizer = IncrementalDetokenizer()
    detokenizer.update([4, 5, 6], False)
    processor.request_states["8-abcd"] = SimpleNamespace(detokenizer=detokenizer)
    assert engine_module.tokens_so_far(SimpleNamespace(output_processor=processor), "8-abcd") == 3
    for owner in (LLMEngine, Scheduler):
        assert "reset_running_requests" in inspect.signature(owner.reset_prefix_cache).parameters


def test_adapters_without_merged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request loads what the folder has, in place of the adapters before; later requests name it."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.setattr("vllm.lora.lora_model.PIN_MEMORY", False)  # which needs a GPU
    assert get_args(MaxLoRARanks) == vllm_adapters.RANKS
    assert [vllm_adapters.engine_rank(rank) for rank in (1, 2, 8, 9, 512)] == [1, 8, 8, 16, 512]
    engine = make_engine(mock.MagicMock(), "host")
    engine._llm.llm_engine = core = mock.create_autospec(LLMEngine, instance=True)
    core.model_config = SimpleNamespace(max_model_len=64)
    engine._adapters = vllm_adapters.VllmAdapters(new_config("base", 2, 6.0, 0.0, ["q_proj"], None))
    layer = "model.layers.0.self_attn.q_proj"
    sent = {f"{layer}.lora_A.weight": torch.randn(2, 4), f"{layer}.lora_B.weight": torch.randn(3, 2)}
    loaded: list[LoRAModel] = []

    def add_lora(request: Any) -> bool:
        assert request.load_inplace
        config = PEFTHelper.from_local_dir(request.lora_path, None)
        loaded.append(LoRAModel.from_local_checkpoint(request.lora_path, {"q_proj"}, config, device="cpu"))
        return True

    core.add_lora.side_effect = add_lora
    for _ in range(2):
        engine.start_weight_update()
        for bucket in pack(sent.items(), 1):
            engine.update_weights(bucket)
        engine.finish_weight_update()
    layers = loaded[-1].loras
    assert layers.keys() == {layer} and len(loaded) == 2
    assert torch.equal(layers[layer].lora_a, sent[f"{layer}.lora_A.weight"]) and layers[layer].scaling == 3
    assert torch.equal(layers[layer].lora_b, sent[f"{layer}.lora_B.weight"])
    core.reset_prefix_cache.assert_called_with(reset_running_requests=True)
    request = engine._adapters.current
    assert request is not None and not request.load_inplace
    engine._eos_token_ids = [7]
    core.add_request.return_value = "0-abcd"
    engine.add([Request(0, np.array([1], np.int32), 3, Sampling(9))])
    assert core.add_request.call_args.kwargs["lora_request"] is request
    engine.sleep()
    engine._llm.sleep.assert_called_once_with(level=1, mode="keep")  # no update would bring the model's weights again


def test_parts_of_memory_and_levels_of_sleep() -> None:
    """Levels are those of LLM.sleep, and the parts are all that an executor puts to sleep."""
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import abstract

    assert abstract.SLEEP_TAGS == PARTS
    assert callable(InprocClient.shutdown)
    engine = make_engine(mock.MagicMock(), "ipc")
    calls = engine._llm.method_calls
    engine.sleep()
    engine.sleep()
    engine.wake()
    engine.wake()
    assert calls == [mock.call.sleep(level=2, mode="keep"), mock.call.wake_up(["kv_cache", "weights"])]


def test_every_name_that_is_imported_exists() -> None:
    found = set(imported_names())
    assert len(found) > 10
    for module, name in sorted(found):
        exists = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
        assert exists, f"{module} has no {name}"


def test_every_remote_call_is_a_method_of_the_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    found = set(remote_methods())
    assert {"init_weight_transfer_engine", "update_weights", "start_tracked_update"} <= found
    assert not [name for name in found if not hasattr(Worker, name) and not hasattr(WeightUpdates, name)]
    assert callable(Worker.get_model) and callable(Worker.start_weight_update) and callable(Worker.finish_weight_update)


def test_the_version_is_one_that_is_required() -> None:
    import vllm

    engine_module.refuse_version(vllm.__version__)
    if "VLLM_TREE" in os.environ:
        assert Path(vllm.__file__).is_relative_to(os.environ["VLLM_TREE"])


def trees() -> Iterator[ast.Module]:
    """Yield the syntax trees of the modules that use vLLM."""
    folder = Path(hpc_rl.__file__).parent / "rl"
    for path in sorted(folder.rglob("*.py")):
        if "vllm" in str(path.relative_to(folder)):
            yield ast.parse(path.read_text())


def imported_names() -> Iterator[tuple[str, str]]:
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                yield from ((str(node.module), name.name) for name in node.names)


def remote_methods() -> Iterator[str]:
    """Yield the first argument of every collective_rpc, and of `VllmEngine._finish`, which passes it on."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if node.func.attr in ("collective_rpc", "_finish") and isinstance(first, ast.Constant):
                    yield first.value
