"""The limit in benchmarks/ppo.py: the unavoidable parts of a step, each alone, without padding or another process.

Models are transformers' own; gradients are plain autograd's. Each part is computed in several ways, and the fastest one
counts: samples of one length at a time, with transformers' attention, or packed rows of two sizes. Nothing is padded,
and the LM head is computed only for the positions that predict the response. The samples are the same in every turn.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from benchmarks.ppo_turns import Pace
from benchmarks.ppo_workload import (
    LR,
    POLICY,
    RESPONSE_TOKENS,
    RESPONSES,
    REWARD_MODEL,
    SAMPLES,
    VOCABULARY,
    Algorithm,
    prompt_lengths,
)
from hpc_rl.rl.rollout.engine import Sampling, complete
from hpc_rl.rl.rollout.hf.engine import HfEngine
from hpc_rl.training.batching import pack
from hpc_rl.training.models.attention import packed_attention
from hpc_rl.training.models.attention.packed_batch import pack_samples

WARM_UP = 2
Part = Callable[[], None]
SAME_LENGTH_TOKENS = 1024
"""Largest number of tokens in one pass over samples of the same length; more is not faster."""
PACKED_TOKENS = (1024, 4096)
"""Largest number of tokens in one packed row."""


@dataclass(frozen=True)
class Rows:
    """The input of one pass."""

    inputs: dict[str, Any]
    """Arguments of the model's forward: ids [B, T], and what packed attention needs."""
    predicting_N: torch.Tensor
    """The positions, of all B * T, whose next token belongs to a response."""
    targets_N: torch.Tensor


Compute = Callable[[Any, Rows], torch.Tensor]


def generate_packed(folder: Path, prompts: Sequence[NDArray[np.int32]]) -> Part:
    hf = load(AutoModelForCausalLM, folder / POLICY, packed_attention.ATTENTION)
    engine = HfEngine(hf, eos_token_ids=[])
    return lambda: void(complete(engine, prompts, range(len(prompts)), Sampling(RESPONSE_TOKENS)))


def generate_padded(folder: Path, prompts: Sequence[NDArray[np.int32]]) -> Part:
    """Return transformers' own generation, which pads."""
    hf = load(AutoModelForCausalLM, folder / POLICY, "sdpa").eval()
    config = GenerationConfig(max_new_tokens=RESPONSE_TOKENS, do_sample=True, top_k=0, pad_token_id=0)
    longest = max(map(len, prompts))
    ids_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in zip(ids_BT, prompts, strict=True):
        row[longest - len(prompt) :] = torch.from_numpy(prompt).long()
    mask_BT = torch.arange(longest) >= longest - torch.tensor(list(map(len, prompts)))[:, None]
    return lambda: void(hf.generate(ids_BT, attention_mask=mask_BT.long(), generation_config=config))


def void(_result: object) -> None:
    return None


def hidden(model: Any, rows: Rows) -> torch.Tensor:
    hidden_BTH = model.base_model(**rows.inputs, use_cache=False).last_hidden_state
    found: torch.Tensor = hidden_BTH.flatten(0, 1)[rows.predicting_N]
    return found


def logprobs(model: Any, rows: Rows) -> torch.Tensor:
    """Return the log-probabilities of all response tokens, [N]."""
    return -cross_entropy(model.lm_head(hidden(model, rows)), rows.targets_N, reduction="none")


def values(model: Any, rows: Rows) -> torch.Tensor:
    """Return the values before each response token, [N]."""
    found: torch.Tensor = model.score(hidden(model, rows))[:, 0]
    return found


def forward(compute: Compute, model: Any, batches: Sequence[Rows]) -> None:
    with torch.inference_mode():
        for rows in batches:
            compute(model, rows)


def update(
    compute: Compute, model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Rows], epochs: int
) -> None:
    for _ in range(epochs):
        for rows in batches:
            compute(model, rows).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parts_of(folder: Path, algorithm: Algorithm, epochs: int) -> dict[str, Part]:
    """Return the measured parts by their names in timing_s."""
    rng = np.random.default_rng(0)
    distinct = [rng.integers(1, VOCABULARY, length, dtype=np.int32) for length in prompt_lengths(algorithm)]
    prompts = [prompt for prompt in distinct for _ in range(SAMPLES[algorithm])]
    assert len(prompts) == RESPONSES
    samples = [np.concatenate([p, rng.integers(1, VOCABULARY, RESPONSE_TOKENS, dtype=np.int32)]) for p in prompts]
    ways = [("sdpa", same_lengths(samples)), *((packed_attention.ATTENTION, packed(samples, n)) for n in PACKED_TOKENS)]

    def forwards(compute: Compute, model_class: Any, name: str) -> Part:
        return fastest(
            *(partial(forward, compute, load(model_class, folder / name, way).eval(), rows) for way, rows in ways)
        )

    def updates(compute: Compute, model_class: Any, name: str) -> Part:
        candidates = []
        for way, rows in ways:
            model = load(model_class, folder / name, way).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR[algorithm], fused=True)
            candidates.append(partial(update, compute, model, optimizer, rows, epochs))
        return fastest(*candidates)

    causal, scalar = AutoModelForCausalLM, AutoModelForSequenceClassification
    parts = {"gen": fastest(generate_packed(folder, prompts), generate_padded(folder, prompts))}
    if algorithm == "ppo":
        parts |= {
            "reward": forwards(values, scalar, REWARD_MODEL),
            "ref": forwards(logprobs, causal, POLICY),
            "values": forwards(values, scalar, REWARD_MODEL),
            "update_critic": updates(values, scalar, REWARD_MODEL),
        }
    return parts | {"update_actor": updates(logprobs, causal, POLICY)}


def load(model_class: Any, path: Path, attention: str) -> Any:
    return model_class.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)


def same_lengths(samples: Sequence[NDArray[np.int32]]) -> list[Rows]:
    by_length = defaultdict(list)
    for sample in samples:
        by_length[len(sample)].append(torch.from_numpy(sample).long())
    batches = []
    for length, found in by_length.items():
        size = max(1, SAME_LENGTH_TOKENS // length)
        for start in range(0, len(found), size):
            ids_BT = torch.stack(found[start : start + size])
            predicting_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
            predicting_BT[:, -RESPONSE_TOKENS - 1 : -1] = True
            targets_N = ids_BT[:, -RESPONSE_TOKENS:].reshape(-1)
            batches.append(Rows({"input_ids": ids_BT}, predicting_BT.view(-1).nonzero()[:, 0], targets_N))
    return batches


def packed(samples: Sequence[NDArray[np.int32]], tokens: int) -> list[Rows]:
    batches = []
    for picked in pack([len(sample) for sample in samples], 1, tokens):
        mine = [samples[index] for index in picked]
        batch = pack_samples(mine, [np.arange(len(sample)) >= len(sample) - RESPONSE_TOKENS for sample in mine])
        inputs = {"input_ids": batch.input_ids_T[None], "position_ids": batch.position_ids_T[None]}
        batches.append(Rows(inputs | packed_attention.attention_kwargs(batch), batch.rows_N, batch.targets_N))
    return batches


def fastest(*candidates: Part) -> Part:
    """Return the candidate with the shortest second run."""
    for candidate in candidates:
        candidate()
    return min(candidates, key=lambda candidate: timed(candidate))


def timed(part: Part) -> float:
    start = time.perf_counter()
    part()
    return time.perf_counter() - start


def main(folder: str, algorithm: Algorithm, epochs: str) -> None:
    torch.set_num_threads(1)
    packed_attention.register()
    parts = parts_of(Path(folder), algorithm, int(epochs))
    pace = Pace(WARM_UP)
    while pace.step_done({name: timed(part) for name, part in parts.items()}):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
