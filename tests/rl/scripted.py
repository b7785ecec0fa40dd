"""Engines without a model."""

from __future__ import annotations

import random
import threading
from itertools import count
from typing import Any

import numpy as np

from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.rollout.engine import Completion, Request, Sampling, Span
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.respondent import Samplings


class Scripted:
    """A RequestQueue whose policy writes the next of the row's turns, letter by letter, as no tokenizer would.

    Each call of `turn` completes one request, in an order that follows from `seed`. A turn that is too long is cut off.
    While `holds` is set, no turn is completed.
    """

    capacity = 4

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._numbers = count()
        self._random = random.Random(seed)
        self._open: list[tuple[QueuedResponses, Request, Prompt, int]] = []
        self.asked: list[tuple[Prompt, list[tuple[int, Sampling]], int, int | None]] = []
        self.holds = threading.Event()

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0, after: int | None = None) -> QueuedResponses:
        self.asked.append((prompt, list(draws), wave, after))
        asked = QueuedResponses([Request(next(self._numbers), prompt.token_ids, *draw) for draw in draws])
        engine = self._random.randrange(100) if after is None else after
        self._open += [(asked, request, prompt, engine) for request in asked.requests]
        return asked

    def turn(self, timeout_s: float) -> None:
        if self.holds.is_set():
            threading.Event().wait(0.01)
            return
        asked, request, prompt, engine = self._open.pop(self._random.randrange(len(self._open)))
        number = self._tokenizer.decode(request.prompt).count("<|im_start|>assistant") - 1
        text, most = prompt.row["turns"][number], request.sampling.max_new_tokens
        ids = [token for letter in text for token in self._tokenizer(letter)["input_ids"]]
        ids = [*ids, self._tokenizer.eos_token_id][:most]
        finished = len(text) < most
        found = Completion(np.array(ids, np.int32), -np.ones(len(ids), np.float32), finished, (Span(3, len(ids)),))
        asked.found[request.number], asked.engines[request.number] = found, engine

    def pause(self) -> None:
        pass
