"""A process that runs environments: python -P -m hpc_rl.environments.worker FD, started and ended by pool.py.

It receives the names of an environment and of tools, loads them, and sends what they offer, or the UserError that
loading raised. Then it receives requests about conversations. To each it sends None after each tool call, and then the
answer, with the number of the request.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from hpc_rl.environments.loading import load_definition
from hpc_rl.environments.protocol import Definition, Episode, EpisodeResult, Reply, first_messages, merged, readable
from hpc_rl.environments.requests import AnswerRequest, EnvironmentInfo, EnvironmentSpec, Request, StartRequest, failed
from hpc_rl.errors import UserError
from hpc_rl.system.processes import adopt_orphans, die_with_parent
from hpc_rl.system.search_path import look_last


class Episodes:
    """The conversations of this process."""

    def __init__(self, definition: Definition, most_chars: int) -> None:
        self._definition, self._most_chars = definition, most_chars
        self._episodes: dict[int, Episode] = {}

    def handle(self, number: int, request: Request, beat: Callable[[], None]) -> Reply | EpisodeResult:
        """Return the answer to a request. Anything that the user's code raises ends the conversation.

        Args:
            number: of the conversation.
            beat: is called after each tool call.
        """
        try:
            if isinstance(request, StartRequest):
                episode = self._episodes[number] = Episode(self._definition, self._most_chars)
                return Reply(readable(first_messages(request.prompt, episode.reset(request.row))))
            if isinstance(request, AnswerRequest):
                reply = self._answer(self._episodes[number], request, beat)
                return replace(reply, messages=readable(reply.messages))
            return self._episodes.pop(number).result()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if episode := self._episodes.pop(number, None):
                with contextlib.suppress(Exception, SystemExit):
                    episode.close()
            return failed(request, readable(reason))

    def _answer(self, episode: Episode, request: AnswerRequest, beat: Callable[[], None]) -> Reply:
        if not request.calls:
            return episode.answer(request.text, [])
        replies = []
        for call in request.calls:
            replies.append(episode.call(call))
            beat()
        return merged(replies)


def check_start(wanted: EnvironmentSpec, definition: Definition) -> None:
    """Create one environment, so that what it lacks is found before the first conversation.

    Raises:
        UserError: it cannot be created.
    """
    try:
        Episode(definition, wanted.most_chars).close()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        where = f"environment.name {wanted.environment}"
        raise UserError(f"{where}: creating it raised {type(error).__name__}: {error}") from error


def main(fd: int) -> None:
    """Load the environment, then handle requests until the socket is closed."""
    die_with_parent()
    adopt_orphans()
    look_last()
    connection: Connection[Any, Any] = Connection(fd)
    own = os.getpid()

    def send(value: Any) -> None:
        if os.getpid() != own:  # the user's code has forked, and this copy came back from it
            os._exit(0)
        connection.send(value)

    wanted: EnvironmentSpec = connection.recv()
    try:
        definition = load_definition(wanted.environment, wanted.kwargs, wanted.tools, wanted.sandbox)
        check_start(wanted, definition)
    except UserError as error:
        send(UserError(str(error)))
        return
    send(EnvironmentInfo(definition.schemas, definition.has_step, definition.has_reward))
    conversations = Episodes(definition, wanted.most_chars)
    while True:
        try:
            count, number, request = connection.recv()
        except EOFError:
            return
        send((count, conversations.handle(number, request, partial(send, (count, None)))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
