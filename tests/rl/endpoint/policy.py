"""A policy without a model, and agents that talk to it over a socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.prompts import prompt_tokenizer
from hpc_rl.rl.endpoint.agents import Agents
from hpc_rl.rl.rollout.engine import Sampling
from hpc_rl.run_dir import RunDir
from tests.rl.ppo_config import ppo_config
from tests.rl.scripted import Scripted

DEADLINE_S = 600
LONG = ("data.max_response_length=2000", "data.max_prompt_length=2000", "trainer.micro_tokens=4000")


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
