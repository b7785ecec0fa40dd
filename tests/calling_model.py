"""A small model that calls tools, for tests: what it writes in a turn is one of some texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import make_tiny_model

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""It describes no tools, whose schemas would be longer than everything else. The format of calls is that of Hermes."""
_VOCAB = 384
_LOGIT = 30.0


def make_calling_model(folder: Path, texts: Sequence[str]) -> Path:
    """Create a model that begins each turn with one of these texts, all of which are equally likely, and then ends it.

    Each text is one token. The layers add nothing to the embeddings, so that the next token follows from the last one:
    a text from the end of the generation prompt, and the end of the turn from a text.
    """
    make_tiny_model(folder, vocab=_VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(texts))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    asked = [{"role": "user", "content": "?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    start, written = tokenizer(prompt)["input_ids"][-1:], tokenizer("".join(texts))["input_ids"]
    assert len(tokenizer) <= _VOCAB and len(written) == len(texts)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.zero_()
        head.zero_()
        embedding[:, 2] = 1.0
        scale = _LOGIT / embedding.shape[1] ** 0.5  # the norm before the head makes a unit vector that much longer
        for place, (before, after) in enumerate([(start, written), (written, [tokenizer.eos_token_id])]):
            embedding[before] = torch.eye(embedding.shape[1])[place]
            head[after, place] = scale
    model.save_pretrained(folder)
    return folder
