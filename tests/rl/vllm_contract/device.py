"""A pretended GPU below vLLM: it takes the steps that vLLM's scheduler plans, and computes no numbers.

Token and log-probability show which weights sampled them. Keys are numbers too, of the weights that computed them, in
the blocks that the scheduler assigned.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

TOKEN = 100
"""The token that the first weights sample. Each update makes it one larger."""
BLOCK = 16


class Result(Future):  # type: ignore[type-arg]
    """What a step returns. The device works on it until somebody waits for it."""

    def __init__(self, pending: set[Any], value: Any) -> None:
        super().__init__()
        self._pending = pending
        self._pending.add(self)
        self.set_result(value)

    def result(self, timeout: float | None = None) -> Any:
        self._pending.discard(self)
        return super().result(timeout)


class PretendedDevice(Executor):
    """Stands for vLLM's executor with its workers and its model."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.weights = 0
        self.pending: set[Result] = set()
        self.computed = 0
        """How many keys were computed."""
        self._keys: dict[int, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._plan: SchedulerOutput | None = None

    def check_health(self) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def collective_rpc(  # type: ignore[override]
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> list[Any]:
        return [getattr(self, f"do_{method}", lambda *_, **__: None)(*args, **(kwargs or {}))]

    def do_get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
        return {"model.layers.0.self_attn.attn": spec}

    def do_get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def do_determine_available_memory(self) -> int:
        return 10**6

    def do_get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def do_synchronize_device(self) -> None:
        self.pending.clear()

    def do_load_host_bucket(self, _: Any) -> None:
        assert not self.pending, "the device still computes with the weights that are being replaced"

    def do_finish_host_update(self) -> list[str]:
        self.weights += 1
        return []

    def do_sleep(self, level: int) -> None:
        assert not self.pending
        self._keys.clear()

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Compute keys, and check that all before them, which they attend to, belong to the current weights."""
        assert not self.is_sleeping
        self._plan = scheduler_output
        self._take(scheduler_output)
        for name, count in scheduler_output.num_scheduled_tokens.items():
            start = self._starts[name]
            places = [self._place(name, position) for position in range(start + count)]
            self._keys.update(dict.fromkeys(places[start:], self.weights))
            self.computed += count
            assert {self._keys[place] for place in places} == {self.weights}
        if not scheduler_output.total_num_scheduled_tokens:
            return Result(self.pending, ModelRunnerOutput([], {})) if non_block else ModelRunnerOutput([], {})
        done: Future[None] = Future()
        done.set_result(None)
        return done if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        assert self._plan is not None
        counts = self._plan.num_scheduled_tokens
        names = list(counts)
        complete = [self._starts[name] + counts[name] >= self._tokens[name] for name in names]
        for name, samples in zip(names, complete, strict=True):
            self._tokens[name] += samples
        rows = len(names)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[TOKEN + self.weights] if samples else [] for samples in complete],
            logprobs=LogprobsLists(
                np.full((rows, 1), TOKEN + self.weights), np.full((rows, 1), -1.0 - self.weights), np.zeros(rows, int)
            ),
        )
        return Result(self.pending, output) if non_block else output

    def _take(self, plan: SchedulerOutput) -> None:
        """Record how many keys each request has, its blocks, and the number of its tokens."""
        for new in plan.scheduled_new_reqs:
            self._starts[new.req_id], self._blocks[new.req_id] = new.num_computed_tokens, list(new.block_ids[0])
            self._tokens[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids or ())
        cached = plan.scheduled_cached_reqs
        for name, blocks, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self._starts[name] = start
            if name in cached.resumed_req_ids:
                self._blocks[name], self._tokens[name] = [], len(cached.all_token_ids[name])
            self._blocks[name] += blocks[0] if blocks else []

    def _place(self, name: str, position: int) -> int:
        return self._blocks[name][position // BLOCK] * BLOCK + position % BLOCK
