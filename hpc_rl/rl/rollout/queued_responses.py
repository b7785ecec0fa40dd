"""Responses that are requested together, and what engines have generated of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_rl.rl.rollout.engine import Completion, Request


@dataclass
class QueuedResponses:
    """The responses to one prompt that were requested together."""

    requests: list[Request]
    found: dict[int, Completion] = field(default_factory=dict)
    """By the number of the request."""
    engines: dict[int, int] = field(default_factory=dict)
    """Which engine generated it, or its end, by the number of the request."""
    begun: dict[int, Completion] = field(default_factory=dict)
    """The tokens that engines had generated before they left, and that others continue."""

    @property
    def is_complete(self) -> bool:
        """Whether there are all responses."""
        return len(self.found) == len(self.requests)

    def completions(self) -> list[Completion]:
        """Return the responses in the order in which they were requested."""
        return [self.found[request.number] for request in self.requests]

    def whole(self, number: int, part: Completion) -> Completion:
        """Return the tokens of a response so far: those that an engine has generated now, after those in `begun`."""
        return self.begun[number].then(part) if number in self.begun else part
