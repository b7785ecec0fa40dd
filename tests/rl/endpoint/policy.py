"""A policy without a model, and agents that talk to it over a socket."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from openai import OpenAI

from hpc_rl.config.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt, prompt_tokenizer
from hpc_rl.rl.endpoint.agents import Agents
from hpc_rl.rl.rollout.engine import Completion, Request, Sampling, Span
from hpc_rl.rl.rollout.request_queue import Asked
from hpc_rl.rl.rollout.respondent import Samplings
from hpc_rl.run_dir import RunDir
from tests.rl.ppo_config import ppo_config

DEADLINE_S = 600
LONG = ("data.max_response_length=2000", "data.max_prompt_length=2000", "trainer.micro_tokens=4000")


class Scripted:
    """A RequestQueue whose policy writes the next of the row's turns, letter by letter, as no tokenizer would.

    A turn that is too long is cut off. While `holds` is set, no turn is completed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._numbers = count()
        self._random = random.Random(0)
        self._open: list[tuple[Asked, Request, Prompt, int]] = []
        self.asked: list[tuple[Prompt, list[tuple[int, Sampling]], int, int | None]] = []
        self.holds = threading.Event()

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0, after: int | None = None) -> Asked:
        self.asked.append((prompt, list(draws), wave, after))
        asked = Asked([Request(next(self._numbers), prompt.token_ids, *draw) for draw in draws])
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


class Loop:
    """A run that does nothing but to let agents respond to prompts."""

    def __init__(self, agents: Agents, queue: Scripted, config: PpoConfig, tokenizer: Any) -> None:
        self.agents, self.queue, self.config, self.tokenizer = agents, queue, config, tokenizer
        self._asked: list[Any] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._turn)
        self._lock = threading.Lock()
        self.error: Exception | None = None

    def ask(self, *rows: dict[str, Any], n: int = 1, wave: int = 0) -> list[Any]:
        """Ask for n responses to each row."""
        asked = {"messages": [{"role": "user", "content": "Sum?"}], "answer": "3"}
        prompts = prompt_tokenizer(self.config.data, self.tokenizer)([({**asked, **row}, "row") for row in rows])[0]
        sampling = Sampling(self.config.data.max_response_length)
        with self._lock:
            return [
                self.agents.ask(prompt, [(10 * number + i, sampling) for i in range(n)], wave)
                for number, prompt in enumerate(prompts)
            ]

    def found(self, asked: Sequence[Any]) -> list[Any]:
        """Wait for all responses."""
        waited = threading.Event()
        for _ in range(100 * DEADLINE_S):
            if all(one.is_complete for one in asked) or self.error is not None:
                break
            waited.wait(0.01)
        assert self.error is None, self.error
        return [response for one in asked for response in one.completions()]

    def end(self) -> None:
        self._closed.set()
        self._thread.join(DEADLINE_S)
        self.agents.close()

    def begin(self) -> None:
        self._thread.start()

    def _turn(self) -> None:
        while not self._closed.is_set():
            try:
                with self._lock:
                    self.agents.turn(0.05)
            except Exception as error:  # noqa: BLE001 - the test gets it
                self.error = error
                self.agents.loop.ask(self.agents.sessions.close)  # so that no agent waits for an answer
                return


@contextmanager
def looping(tokenizer: Any, run_dir: Path, *options: str) -> Iterator[Loop]:
    """A loop in another thread, and its endpoint."""
    config = ppo_config("agent.endpoint=loopback", "reward.function=null", *LONG, *options)
    queue = Scripted(tokenizer)
    agents = Agents(queue, config, tokenizer, "127.0.0.1", RunDir(run_dir), run_dir)  # type: ignore[arg-type]
    loop = Loop(agents, queue, config, tokenizer)
    loop.begin()
    try:
        yield loop
    finally:
        loop.end()


def client(run_dir: Path, session: dict[str, Any] | None = None, **options: Any) -> OpenAI:
    """A client of the endpoint of a run, or of one of its sessions."""
    found = json.loads((run_dir / "endpoint.json").read_text())
    url = found["base_url"] if session is None else session["base_url"]
    return OpenAI(**{"base_url": url, "api_key": found["api_key"], "max_retries": 0, "timeout": DEADLINE_S, **options})


def take(of: OpenAI) -> dict[str, Any]:
    """Take the next session."""
    while (session := of.post("/sessions", cast_to=object)) is None:
        pass
    assert isinstance(session, dict)
    return session


def reward(of: OpenAI, session: dict[str, Any], value: Any) -> Any:
    return of.post(f"/sessions/{session['id']}/reward", cast_to=object, body={"reward": value})
