"""Models, prompts and measurements for the tests of the `hf` engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.lm_head import token_logprobs
from tests.helpers import make_tiny_model

LENGTHS = [5, 1, 17, 9, 2, 30, 11]

Prompts = list[NDArray[np.int32]]


def prompts(lengths: Sequence[int] = LENGTHS) -> Prompts:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 300, length).astype(np.int32) for length in lengths]


def sharp_model(
    folder: Path, dtype: str = "float32", longest: int | None = None, packing: bool = True, **settings: Any
) -> CausalLM:
    """Load a model whose distributions are far from uniform, so that an error in attention is visible."""
    model = load_model(ModelConfig(path=str(make_tiny_model(folder, **settings)), dtype=dtype), longest, packing)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return model


def token_lists(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def forward_logprobs(
    model: CausalLM, given: Prompts, completions: Sequence[Completion], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Return log-probabilities of all response tokens, concatenated, from a packed forward pass as in training."""
    samples = [np.concatenate([p, c.token_ids]) for p, c in zip(given, completions, strict=True)]
    targets = [np.arange(len(s)) >= len(p) for s, p in zip(samples, given, strict=True)]
    batch = pack_samples(samples, targets)
    with torch.no_grad():
        logprobs_N, _ = model(
            batch, lambda h, w: token_logprobs(h, w, batch.targets_N, temperature, softcap=model.softcap)
        )
    return logprobs_N.numpy()


@contextmanager
def counted_tokens(model: CausalLM) -> Iterator[list[int]]:
    """Count the tokens that enter the model in each forward pass."""
    counts: list[int] = []
    embedding = model.hf.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].numel()))
    yield counts
    handle.remove()
