from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.rollout.engine import Placement, Sampling, complete, eos_token_ids, load_engine
from hpc_rl.rl.rollout.hf.engine import HfEngine
from hpc_rl.rl.weights.base import BucketReceiver, receiver_of
from hpc_rl.rl.weights.buckets import pack
from hpc_rl.training.models.causal_lm import load_model, load_tokenizer
from tests.helpers import make_tiny_model
from tests.rl.ppo_config import ppo_config


@pytest.fixture
def config(tmp_path: Path) -> PpoConfig:
    return ppo_config(f"model.path={make_tiny_model(tmp_path / 'model')}", "rollout.max_num_seqs=3")


def test_an_engine_uses_the_policys_module_or_a_copy(config: PpoConfig) -> None:
    policy = load_model(config.model)
    shared, copy = load_engine(config, Placement("cpu"), policy), load_engine(config, Placement("cpu"))
    assert isinstance(shared, HfEngine) and isinstance(copy, HfEngine)
    assert shared.hf is policy.hf and copy.hf is not policy.hf
    assert shared.max_num_seqs == copy.max_num_seqs == 3
    assert all(parameter.requires_grad for parameter in policy.hf.parameters())
    assert not any(parameter.requires_grad for parameter in copy.hf.parameters())


def test_a_copy_has_the_engines_type(config: PpoConfig) -> None:
    rollout = config.rollout.model_copy(update={"dtype": "bfloat16"})
    engine = load_engine(config.model_copy(update={"rollout": rollout}), Placement("cpu"))
    assert isinstance(engine, HfEngine)
    assert {parameter.dtype for parameter in engine.hf.parameters()} == {torch.bfloat16}


def test_responses_end_on_the_tokens_of_tokenizer_and_generation_configuration(config: PpoConfig) -> None:
    from transformers import GenerationConfig

    tokenizer = load_tokenizer(config.model)
    ends = eos_token_ids(config)
    assert tokenizer.eos_token_id in ends and None not in ends
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(config.model.path)
    assert eos_token_ids(config) == {tokenizer.eos_token_id, 7, 8} | ends
    GenerationConfig(eos_token_id=9).save_pretrained(config.model.path)
    assert eos_token_ids(config) == {tokenizer.eos_token_id, 9} | ends
    assert load_engine(config, Placement("cpu")).eos_token_ids == eos_token_ids(config)  # type: ignore[attr-defined]


def test_an_engine_without_the_four_calls_gets_buckets_through_load_weights(config: PpoConfig) -> None:
    engine = load_engine(config, Placement("cpu"))
    assert isinstance(engine, HfEngine)
    receiver = receiver_of(engine)
    assert isinstance(receiver, BucketReceiver)
    prompt = [np.arange(3, 9, dtype=np.int32)]
    before = complete(engine, prompt, [0], Sampling(8))[0]
    changed = [(name, parameter * 3 + 0.1) for name, parameter in engine.hf.named_parameters()]
    receiver.start_weight_update()
    for bucket in pack(changed, 20_000):
        receiver.update_weights(bucket)
    receiver.finish_weight_update()
    for (_, expected), parameter in zip(changed, engine.hf.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)
    assert before.logprobs.tolist() != complete(engine, prompt, [0], Sampling(8))[0].logprobs.tolist()


class FourCalls:
    """An engine that receives weights itself."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update: Any) -> None: ...

    def finish_weight_update(self) -> None: ...


def test_an_engine_with_the_four_calls_receives_weights_itself() -> None:
    engine = FourCalls()
    assert receiver_of(engine) is engine
