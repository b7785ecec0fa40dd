"""The hf engine as a run's configuration asks for it."""

from __future__ import annotations

import contextlib

import torch

from hpc_rl.config.ppo import PpoConfig, engine_dtype
from hpc_rl.data.chat import chat_template, end_of_turn
from hpc_rl.rl.rollout.hf import HfRollout
from hpc_rl.training.model import CausalLM, load_model, load_tokenizer


def load_hf_engine(config: PpoConfig, policy: CausalLM | None) -> HfRollout:
    """An engine on the policy's own module, or on a copy of the model in this process.

    Args:
        policy: not sharded; None for a copy, whose weights come by `load_weights`.
    """
    if policy is None:
        dtype = engine_dtype(config.rollout, config.trainer.device)
        policy = load_model(config.model.model_copy(update={"dtype": dtype}))
        policy.requires_grad_(False).eval().to(torch.device(config.trainer.device))
    return HfRollout(policy.hf, eos_token_ids(config), config.rollout.max_num_seqs)


def eos_token_ids(config: PpoConfig) -> set[int]:
    """Tokens that end a response: the tokenizer's, the one that ends a turn of the chat template, and those of the
    model's generation configuration, if it has one."""
    from transformers import GenerationConfig

    model = config.model
    tokenizer = load_tokenizer(model)
    found = [tokenizer.eos_token_id, end_of_turn(tokenizer, chat_template(tokenizer, config.data))]
    with contextlib.suppress(OSError):
        listed = GenerationConfig.from_pretrained(model.path).eos_token_id
        found += listed if isinstance(listed, list) else [listed]
    return {token for token in found if token is not None}
