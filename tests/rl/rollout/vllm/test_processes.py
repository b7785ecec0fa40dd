"""Two engines of two workers each, by vLLM's Ray executor, on four GPUs that Ray counts and that are not there."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.actors.cluster import start_ray
from hpc_rl.rl.actors.pools import create_pools
from hpc_rl.rl.rollout import engine_process, rollout
from hpc_rl.rl.rollout.engine import Placement, Sampling
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.request_queue import RequestQueue
from tests.helpers import make_tiny_model
from tests.rl.ppo_config import ppo_config
from tests.rl.rollout.vllm.test_engine import needs_vllm

TIMEOUT_S = 600
WORKERS = 2
pytestmark = [needs_vllm, pytest.mark.slow]


class Setting:
    """Engines on pretended GPUs, and the queue of their requests."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "attempt-1"
        model = make_tiny_model(folder / "model", hidden=64, num_attention_heads=2, num_key_value_heads=2)
        config = ppo_config(
            *(f"model.path={model}", "rollout.name=vllm", f"rollout.tensor_parallel_size={WORKERS}"),
            *("rollout.dtype=float32", "rollout.max_num_seqs=4", "data.max_prompt_length=20"),
            "trainer.n_gpus_per_node=2",
            "+rollout.engine_kwargs={enforce_eager: true, enable_chunked_prefill: false}",
            "+rollout.engine_kwargs.kv_cache_memory_bytes=10000000",
        )
        (pool,) = create_pools({"engines": [4]}, "cuda", TIMEOUT_S, str(folder)).values()
        self.slots = pool.slots
        self.fleet = rollout.Fleet(config, pool, Placement("cuda", gpu_share=0.5), self.logs)
        self.fleet.engines.call("start").wait(TIMEOUT_S)
        self.queue = RequestQueue(self.fleet.engines, 4, TIMEOUT_S, TIMEOUT_S, self.fleet.replace)

    def ask(self) -> list[QueuedResponses]:
        prompts = [Prompt(np.arange(60 + number, 70 + number, dtype=np.int32), None, {}, "") for number in range(8)]
        return [self.queue.ask(prompt, [(0, Sampling(8, temperature=0.0))]) for prompt in prompts]

    def workers(self, engine: int) -> list[dict[str, Any]]:
        """Return what each worker of an engine says about itself."""
        found: list[dict[str, Any]] = self.ask_engine(engine, ask_workers)
        return found

    def ask_engine(self, engine: int, question: Callable[[Any], Any]) -> Any:
        return ray.get(self.fleet.engines.actors[engine].__ray_call__.remote(question), timeout=TIMEOUT_S)


def memory(process: Any) -> list[str]:
    """Return the names of the shared memory in which an engine and its workers exchange messages."""
    executor = process._engine._llm.llm_engine.model_executor
    queues = [executor.rpc_broadcast_mq, *executor.response_mqs]
    return [queue.export_handle().buffer_handle[-1] for queue in queues]


def ask_workers(process: Any) -> Any:
    return process._engine._llm.collective_rpc(describe)


def describe(worker: Any) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "cache": os.environ["VLLM_CACHE_ROOT"],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": worker.parallel_config.assigned_physical_gpu_ids,
    }


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    from tests.rl.rollout.pretended_gpus import PretendedEngine

    if any(map(str.isspace, sys.executable)):
        pytest.skip("torch.compile, which vLLM uses, gives the compiler paths without quotes")
    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as temporary:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TMPDIR", temporary)
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setattr(engine_process, "EngineProcess", PretendedEngine)
        start_ray(
            num_cpus=4,
            num_gpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=temporary,
        )
        try:
            yield (found := Setting(folder))
            found.fleet.engines.call("close").wait(TIMEOUT_S)
        finally:
            ray.shutdown()


def test_engines_on_other_gpus_share_no_compiled_code(setting: Setting) -> None:
    found = [setting.workers(engine) for engine in range(2)]
    assert sorted(worker["gpus"] for workers in found for worker in workers) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for workers in found:
        for worker in workers:
            name = "devices-" + "-".join(map(str, worker["gpus"]))
            assert Path(worker["cache"]) == Path(os.environ["VLLM_CACHE_ROOT"]) / name and not worker["visible"]


def test_a_process_on_one_gpu_sees_no_other(setting: Setting) -> None:
    """A trainer beside an engine, or an engine without tensor parallelism: its device is the first one everywhere."""
    see = ray.remote(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    seen = [see.options(**slot.options("cuda", 0.5)).remote() for slot in setting.slots]
    assert ray.get(seen, timeout=TIMEOUT_S) == ["0", "1", "2", "3"]


def test_an_engine_that_has_lost_a_worker_is_replaced(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    asked = setting.ask()
    setting.queue.wait(asked)
    expected = [one.completions()[0].token_ids.tolist() for one in asked]
    before = setting.workers(1)
    shared = [Path("/dev/shm", name) for name in setting.ask_engine(1, memory)]
    assert len(shared) == 1 + WORKERS and all(path.exists() for path in shared)
    again = setting.ask()
    setting.queue.turn(TIMEOUT_S)
    os.kill(before[1]["pid"], signal.SIGKILL)
    setting.queue.wait(again)
    setting.queue.wait_for_starts()
    out = capsys.readouterr().out
    assert "its worker 1 of 2 died: killed (signal 9) by a user or a program, or for lack of memory" in out
    assert f"\nthe end of {setting.logs / 'node0-engines-engine1-worker1.log'}:\n    " in out
    setting.queue.wait(more := setting.ask())
    for each in (again, more):
        assert [one.completions()[0].token_ids.tolist() for one in each] == expected
    after = setting.workers(1)
    assert [worker["cache"] for worker in after] == [worker["cache"] for worker in before]
    assert after[1]["pid"] != before[1]["pid"] and not any(path.exists() for path in shared)
