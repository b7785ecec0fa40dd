"""A small model with random weights, its tokenizer and its data, made on the spot without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, with the marks that show which tokens the assistant writes."""


def make_tiny_model(
    folder: Path,
    vocab: int = 320,
    hidden: int = 32,
    layers: int = 2,
    kind: str = "qwen2",
    tie: bool = False,
    **overrides: Any,
) -> Path:
    """Create a model with random weights and a byte-level tokenizer with a chat template, as a Hugging Face folder.

    Args:
        vocab: size of the model's vocabulary, at least 259; the tokenizer knows at most as many tokens.
        kind: a transformers model type: "qwen2", "qwen3", "llama", ...
        overrides: further settings of the model's configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer(vocab)
    heads = overrides.pop("num_attention_heads", max(2, hidden // 64))
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": hidden * 4,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": hidden // heads,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": tie,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **overrides,
        },
    )
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    torch.set_rng_state(generator_state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(vocab: int) -> Any:
    """Train a byte-level BPE tokenizer on a few sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((chat[1]["content"] + chat[0]["content"] for chat in chats(200)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def chats(rows: int) -> list[list[dict[str, str]]]:
    """Return conversations about additions, of varied length."""
    return [
        [
            {
                "role": "user",
                "content": f"What is {' plus '.join(str(number % (7 + k)) for k in range(2 + number % 5))}?",
            },
            {
                "role": "assistant",
                "content": f"It is {sum(number % (7 + k) for k in range(2 + number % 5))}. " + "Yes. " * (number % 4),
            },
        ]
        for number in range(rows)
    ]


def write_chats(path: Path, rows: int) -> Path:
    """Write a jsonl file with a `messages` column."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats(rows)))
    return path
