"""A small terminal chat with a model, on one GPU or on the CPUs of this machine: `hpc-rl chat`.

Input may also come from a pipe, one message per line. The answer appears as it is generated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_rl.config.training.common import ModelSource
from hpc_rl.data.templates.chat import as_text, ending_token_ids
from hpc_rl.errors import UserError
from hpc_rl.liveness.activity import doing, shown_activity
from hpc_rl.liveness.shown_text import escaped_output

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

RESET, EXIT = "/reset", "/exit"


@dataclass
class TerminalChat:
    """A conversation with a model.

    Args:
        temperature: 0 takes the most probable token at every step.
        max_tokens: longest answer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ends: Sequence[int]
    """Tokens that end an answer."""
    temperature: float
    max_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str) -> None:
        """Print the answer to a message while it is generated, and add both to the conversation.

        Raises:
            UserError: the conversation is longer than the model's context.
        """
        import torch

        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = as_text(self.tokenizer, self.tokenizer.get_chat_template(), asked, "chat", generation_prompt=True)
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(self.model.device)
        length = ids["input_ids"].shape[1]
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and length + self.max_tokens > limit:
            raise UserError(
                f"the conversation of {length} tokens and an answer of {self.max_tokens} exceed the model's {limit} "
                f"positions: begin a new conversation with {RESET}, or lower --max-tokens"
            )
        drawn: dict[str, Any] = {"do_sample": True, "temperature": self.temperature, "top_p": 1.0, "top_k": 0}
        greedy: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with torch.inference_mode():
            found = self.model.generate(
                **ids,
                **(drawn if self.temperature else greedy),
                max_new_tokens=self.max_tokens,
                eos_token_id=list(self.ends),
                pad_token_id=self.ends[0],
                streamer=_streamer(self.tokenizer, self.ends),
            )
        written = [token for token in found[0, length:].tolist() if token not in self.ends]
        said = self.tokenizer.decode(written, skip_special_tokens=True)
        self.messages = [*asked, {"role": "assistant", "content": said}]


def _streamer(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> TextStreamer:
    """Return what prints an answer while it is generated, without the token that ends it, special or not."""
    from transformers import TextStreamer

    class AnswerStreamer(TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            if self.next_tokens_are_prompt or int(value.flatten()[-1]) not in ends:
                super().put(value)

    return AnswerStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def load_chat(path: str, temperature: float, max_tokens: int, trust_remote_code: bool = False) -> TerminalChat:
    """Load a model and its tokenizer: on a GPU in bfloat16 if there is one, otherwise in the type of its files.

    Raises:
        UserError: one of them cannot be loaded, or the tokenizer has no chat template.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hpc_rl.training.models.causal_lm import load_tokenizer
    from hpc_rl.training.models.pretrained import from_pretrained, settings_of
    from hpc_rl.training.wrappers import wrapper_class

    if not trust_remote_code and "auto_map" in settings_of(path, "model"):
        raise UserError(
            f"{path} comes with code of its own (auto_map in its config.json), which would run as you: "
            "read it, and add --trust-remote-code"
        )
    tokenizer = load_tokenizer(ModelSource(path=path, trust_remote_code=trust_remote_code))
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {path} has no chat template: choose a model that was trained on chats")
    there = torch.accelerator.current_accelerator(check_available=True)
    device = there or torch.device("cpu")
    dtype = "auto" if there is None else torch.bfloat16
    remote = {"trust_remote_code": trust_remote_code}
    auto = wrapper_class(from_pretrained(AutoConfig, path, "model", **remote)) or AutoModelForCausalLM
    model = from_pretrained(auto, path, "model", dtype=dtype, **remote).to(device).eval()
    ends = sorted(ending_token_ids(tokenizer, tokenizer.get_chat_template(), path))
    return TerminalChat(model, tokenizer, ends, temperature, max_tokens)


def converse(chat: TerminalChat) -> None:
    """Read messages until the input ends, and print the answers."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - gives input() line editing and a history

        print(f"{RESET} begins a new conversation; {EXIT}, Ctrl-D or Ctrl-C ends the program.")
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        if text == EXIT:
            return
        if text == RESET:
            chat.messages = []
        elif text:
            try:
                chat.answer(text)
            except UserError as error:
                print(f"hpc-rl: {error}", file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """Run the chat and return the exit code."""
    parser = argparse.ArgumentParser(prog="hpc-rl chat", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)
    try:
        import torch

        from hpc_rl.rl.actors.process import quiet_libraries

        quiet_libraries()
        if options.seed is not None:
            torch.manual_seed(options.seed)
        with shown_activity(), doing(f"loading the model {options.model}"):
            chat = load_chat(options.model, options.temperature, options.max_tokens, options.trust_remote_code)
        with escaped_output():
            converse(chat)
    except UserError as error:
        print(f"hpc-rl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
