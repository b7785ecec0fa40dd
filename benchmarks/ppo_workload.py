"""The input of everything that benchmarks/ppo.py compares: models, prompts, reward, and the size of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from benchmarks.workload import GSM8K_LENGTHS, qwen2_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

Algorithm = Literal["grpo", "ppo"]

VOCABULARY = 4096
RESPONSES, RESPONSE_TOKENS = 32, 64
TOKENS = RESPONSES * RESPONSE_TOKENS
"""Tokens generated in a step."""
PROMPTS: dict[Algorithm, int] = {"grpo": 4, "ppo": 32}
"""Distinct prompts of a step."""
SAMPLES: dict[Algorithm, int] = {name: RESPONSES // prompts for name, prompts in PROMPTS.items()}
"""Responses to each prompt."""
LR: dict[Algorithm, float] = {"grpo": 1e-6, "ppo": 3e-6}
"""TRL's defaults."""
KL_COEF, CLIP_VALUE = 0.05, 0.2
"""TRL's defaults for PPO, whose KL is in the reward. GRPO has no KL by default."""
CLIP_GRAD: dict[Algorithm, float] = {"grpo": 1.0, "ppo": 0.0}
"""TRL's settings: its PPO does not clip gradients."""

POLICY, REWARD_MODEL, DATA = "policy", "reward_model", "prompts.jsonl"
_LETTERS = list("BCDFGHJKLMNPQRSTVXZ")
"""Each letter is always one token, because the tokenizer has no merges."""
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def prompt_lengths(algorithm: Algorithm) -> list[int]:
    """Return the tokens of each prompt of a step, the same in every step: evenly spaced quantiles of GSM8K's."""
    known = np.array([prompt for prompt, _ in GSM8K_LENGTHS])
    count = PROMPTS[algorithm]
    lengths: list[int] = np.quantile(known, (np.arange(count) + 0.5) / count, method="nearest").tolist()
    return lengths


def write(folder: Path, algorithm: Algorithm) -> None:
    """Write a policy, a reward model (random, of the policy's shape) and prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = qwen2_config(VOCABULARY)
    config.eos_token_id = None  # every response has RESPONSE_TOKENS tokens
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config)
    config.num_labels = 1
    reward_model = AutoModelForSequenceClassification.from_config(config)
    for name, model in ((POLICY, policy), (REWARD_MODEL, reward_model)):
        _save(folder / name, model, tokenizer)
    write_prompts(folder, prompt_lengths(algorithm))


def write_model(path: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a language model with random weights in bfloat16, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    _save(path, AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tokenizer)


def _save(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    _without_end(path / "tokenizer_config.json")


def write_prompts(folder: Path, lengths: Sequence[int]) -> None:
    """Write prompts of these numbers of tokens."""
    rng = np.random.default_rng(0)
    rows = [{"prompt": "".join(rng.choice(_LETTERS, length))} for length in lengths]
    (folder / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_prompts(folder: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in (folder / DATA).read_text().splitlines()]


def make_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Make a tokenizer without an end of sequence that can decode every response: bytes, and names for other tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", *alphabet, *(f"<{number}>" for number in range(vocabulary - len(alphabet) - 1))]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", model_input_names=["input_ids", "attention_mask"]
    )
    fast.chat_template = _TEMPLATE
    return fast


def _without_end(path: Path) -> None:
    """Remove the end of sequence, which transformers otherwise adds to the tokenizer of a Qwen2 model."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))


def score(response: str, answer: object) -> float:
    """Return the fraction of digits, a cheap reward for GRPO."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
