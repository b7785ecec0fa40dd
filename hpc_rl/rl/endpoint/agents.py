"""Responses that agents obtain from the policy: for each response, an agent takes a session and converses in it.

    asked = agents.ask(prompt, draws)        # opens a session for each response
    while not asked.is_complete:
        agents.turn(timeout_s)               # engines generate the turns that agents have requested
    asked.completions()                      # each session as one response

Agents are programs of their own, which send requests to the endpoint. It has an event loop, in which each session is
the partner of one coroutine `converse`.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.data.reading.rows import to_prompt
from hpc_rl.rl.converse.loop_thread import LoopThread
from hpc_rl.rl.converse.partner import Siblings, converse
from hpc_rl.rl.converse.turns import TurnRequests
from hpc_rl.rl.endpoint.answers import MODEL
from hpc_rl.rl.endpoint.processes import AgentProcesses
from hpc_rl.rl.endpoint.rendering import Rendering
from hpc_rl.rl.endpoint.server import Endpoint
from hpc_rl.rl.endpoint.session import Session
from hpc_rl.rl.endpoint.sessions import Sessions
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.rollout.respondent import Respondent, Samplings
from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Agents(Respondent):
    """What responds to prompts with agents; see Respondent. The queue generates the turns of the policy.

    Args:
        tokenizer: with the run's chat template.
        address: this node's, in the network that agent.endpoint names.
        logs: folder for the logs of agent.command.

    Raises:
        UserError: the endpoint cannot be opened, or there is no such program as agent.command.
    """

    def __init__(
        self,
        queue: RequestQueue,
        config: PpoConfig,
        tokenizer: PreTrainedTokenizerBase,
        address: str,
        run: RunDir,
        logs: Path,
    ) -> None:
        self._queue, self._config, self._run = queue, config, run
        run.endpoint.unlink(missing_ok=True)  # of an attempt that was killed
        own = config.agent
        may_lack = bool(config.reward.sources) or config.algorithm.advantage == "opd"
        rendering = Rendering(tokenizer, config)
        self.sessions = Sessions(rendering, config.data.max_prompt_length, own.timeout_s, not may_lack)
        self.loop = LoopThread("endpoint")
        self._turns = TurnRequests(queue, self.loop)
        self.endpoint = Endpoint(self.sessions, self.loop, address, own.timeout_s)
        logs.mkdir(parents=True, exist_ok=True)
        self._processes = AgentProcesses(own, self.endpoint.base_url, self.sessions, logs)
        self._turns.start(self._processes.serve())
        key = self.loop.ask(partial(self.sessions.admit, "an agent"))
        found = {"base_url": self.endpoint.base_url, "api_key": key, "model": MODEL}
        write_atomically(run.endpoint, json.dumps(found) + "\n", forbidden=0o077)
        print(f"agents: {self.endpoint.base_url}; {run.endpoint} has the key", flush=True)

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0) -> Siblings:
        messages, _ = to_prompt(prompt.row, self._config.data, "the data")
        siblings = Siblings(len(draws))
        for index, (seed, sampling) in enumerate(draws):
            session = Session(
                prompt=prompt, wave=wave, seed=seed, sampling=sampling, sessions=self.sessions, messages=messages
            )
            self._turns.start(self._respond(siblings, index, session))
        return siblings

    def turn(self, timeout_s: float) -> None:
        """See Respondent.

        Raises:
            UserError: an engine refused a request, or agent.command cannot be started.
            RunError: no engine is left, or agent.command failed again and again.
        """
        self.loop.call(partial(self.sessions.expire, time.monotonic()))
        self._turns.advance(timeout_s)

    def pause(self) -> None:
        """Wait until no engine generates. Agents may go on with what they do."""
        self._queue.pause()

    def close(self) -> None:
        """Refuse all requests, and end the processes of agent.command. A second `close` does nothing."""
        if self.loop.is_closed:
            return
        self.loop.ask(self.sessions.close)
        self.loop.start(self._processes.close()).result()
        self.endpoint.close()
        self.loop.close()
        self._run.endpoint.unlink(missing_ok=True)

    async def _respond(self, siblings: Siblings, index: int, session: Session) -> None:
        """Let an agent take a session and converse in it."""
        self.sessions.open(session)
        await session.next()
        found = await converse(session, self._turns)
        self._turns.post(partial(siblings.record, index, found))
