"""vLLM's own engine and scheduler above a pretended GPU: requests continue with new weights, and after a sleep.

On GPUs, unlike on CPUs, vLLM plans a step before it has the result of the one before.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_rl.config.rl.rollout import RolloutConfig
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.rl.rollout.engine import Completion, Placement, Request, Sampling
from hpc_rl.rl.rollout.vllm.engine import VllmEngine
from tests.helpers import make_tiny_model
from tests.rl.vllm_contract.h100 import pretend_h100

pretend_h100()

PROMPT, TOGETHER, CALLS = 40, 4, 200


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    from tests.rl.vllm_contract.device import PretendedDevice

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options = {"distributed_executor_backend": PretendedDevice, "enforce_eager": True}
    rollout = RolloutConfig(max_num_seqs=TOGETHER, engine_kwargs=options)
    model = ModelConfig(path=str(make_tiny_model(tmp_path / "model")))
    return VllmEngine(model, rollout, [7], 64, 0, Placement("cuda", "host", sleeps=True))


def requests() -> list[Request]:
    """Return more requests than run together, some with the same prompt, with responses of several lengths."""
    prompts = [np.arange(60 + number // 2, 60 + number // 2 + PROMPT, dtype=np.int32) for number in range(7)]
    return [Request(10 + i, prompt, i, Sampling(5 + 2 * i)) for i, prompt in enumerate(prompts)]


def rest(engine: VllmEngine, version: int) -> dict[int, Completion]:
    """Return what is not complete yet."""
    found: dict[int, Completion] = {}
    for _ in range(CALLS):
        found.update(engine.advance(0.0, version))
    assert engine.running == 0, f"{engine.running} requests did not end in {CALLS} steps"
    return found


def check(completion: Completion, request: Request) -> None:
    """Assert that spans name the weights that sampled each token."""
    from tests.rl.vllm_contract.device import TOKEN

    assert len(completion.token_ids) == request.sampling.max_new_tokens and not completion.finished
    versions = [span.version for span in completion.spans for _ in range(span.tokens)]
    assert completion.token_ids.tolist() == [TOKEN + version for version in versions]
    assert completion.logprobs.tolist() == [-1 - version for version in versions]


def update(engine: VllmEngine) -> None:
    engine.load_weights([("weight", torch.zeros(1))])


@pytest.mark.parametrize("sleeps", [False, True])
def test_requests_continue_with_new_weights(engine: VllmEngine, sleeps: bool) -> None:
    core = engine._llm.llm_engine.engine_core.engine_core
    device = core.model_executor
    assert core.async_scheduling and core.batch_queue_size == 2
    given, found = requests(), {}
    engine.add(given[:5])
    for version in range(3):
        for _ in range(5):
            found.update(engine.advance(0.0, version))
        assert device.pending, "no step was planned ahead"
        if version == 1:
            engine.add(given[5:])
            if sleeps:
                engine.sleep()
        update(engine)
        engine.wake()
    assert engine.running == len(given) - len(found)
    found.update(rest(engine, 3))
    assert found.keys() == {request.number for request in given}
    for request in given:
        check(found[request.number], request)
    assert max(len(completion.spans) for completion in found.values()) > 2


def test_prompts_share_keys_until_the_weights_change(engine: VllmEngine) -> None:
    device = engine._llm.llm_engine.engine_core.engine_core.model_executor
    prompt, computed = np.arange(60, 100, dtype=np.int32), []
    for version in range(2):
        for number in range(2):
            before = device.computed
            engine.add([Request(number, prompt, 0, Sampling(1))])
            completion = rest(engine, version)[number]
            computed.append(device.computed - before)
        assert completion.token_ids.tolist() == [100 + version]
        update(engine)
    assert computed == [PROMPT, PROMPT % 16] * 2


def test_a_request_that_is_too_long(engine: VllmEngine) -> None:
    with pytest.raises(
        UserError, match="up to 100 tokens to a prompt of 40 was requested, and the engine has room for 64"
    ):
        engine.add([Request(0, np.arange(60, 100, dtype=np.int32), 0, Sampling(100))])
    assert engine.running == 0
