"""How a chat template ends the turns of the assistant, found from what it renders.

A tokenizer's list of special tokens does not show which of them ends a turn: for many base models it is not the named
end-of-sequence token, and a template may write tokens of channels and of thinking too. The template itself shows it: it
is the last special token that follows an answer both at the end of a conversation and before a further message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.errors import UserError

TextOf = Callable[[list[dict[str, Any]], bool], str]
"""Renders messages; if the second argument is true, up to the start of the assistant's turn."""

_WRITTEN = "Marker."
_CALL_ID = "000000000"  # Mistral's templates demand nine characters
_ASKED = {"role": "user", "content": "Question?"}
_RESULT = {"role": "tool", "content": "Result.", "name": "x", "tool_call_id": _CALL_ID}


@dataclass(frozen=True)
class TurnEnd:
    """The end of one kind of turn."""

    token: str
    """The token that ends it. Loss covers it, and generation stops at it."""
    lead: str = ""
    """What the template writes between an answer and the token, such as a line break."""
    rest: str = ""
    """What a conversation that ends with such a turn has behind the token, such as a line break."""
    follows: bool = False
    """The token is the first one of the next message, and a conversation that ends with the turn does not have it."""
    inner: str = ""
    """Another token that the template writes in its place if further messages follow; empty if there is none."""


@dataclass(frozen=True)
class Ends:
    """The ends of a template's turns. None: a turn ends with no token."""

    answer: TurnEnd | None
    call: TurnEnd | None
    """Of a turn that calls tools. None too if the template cannot render one."""

    def of(self, message: Mapping[str, Any]) -> list[TurnEnd]:
        """Return the possible ends of a message of the assistant, the most likely one first."""
        ends = [self.call, self.answer] if message.get("tool_calls") else [self.answer, self.call]
        return [end for end in ends if end is not None]

    @property
    def tokens(self) -> list[str]:
        """The tokens at which a response ends."""
        return list(dict.fromkeys(end.token for end in (self.answer, self.call) if end is not None))


def find_ends(text_of: TextOf, added: Mapping[str, bool], bos_token: str | None = None) -> Ends:
    """Find how a template ends turns.

    Args:
        text_of: renders a conversation, or raises UserError if the template rejects it.
        added: the tokenizer's added tokens, each with whether it is special.
        bos_token: begins a text, so that it never ends a turn.
    """
    names = _pattern(added)
    special = _pattern([token for token, is_special in added.items() if is_special])

    def end_of(turn: dict[str, Any], following: dict[str, Any], is_call: bool) -> TurnEnd | None:
        for form in (str, _as_parts):  # some templates render lists of parts only
            closed = _behind(text_of, [_ASKED, turn], form)
            if closed is not None:
                inside = _behind(text_of, [_ASKED, turn, following], form)
                patterns = [special, *([] if is_call else [names])]
                return _end(closed, closed if inside is None else inside, patterns, bos_token)
        return None

    answer = end_of({"role": "assistant", "content": _WRITTEN}, _ASKED, False)
    calls = ({"x": _WRITTEN}, f'{{"x": "{_WRITTEN}"}}')
    call = next((found for form in calls if (found := end_of(_call(form), _RESULT, True)) is not None), None)
    return Ends(answer, call)


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "x", "arguments": arguments}
    called = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [called]}


def _behind(text_of: TextOf, messages: list[dict[str, Any]], form: Callable[[str], Any]) -> str | None:
    """Return the text behind what the assistant wrote, or None if the template rejects it or leaves it out."""
    try:
        texts = [{**message, "content": form(message["content"])} for message in messages]
        _, written, behind = text_of(texts, False).rpartition(_WRITTEN)
    except UserError:
        return None
    return behind if written else None


def _end(closed: str, inside: str, patterns: Sequence[re.Pattern[str]], bos_token: str | None) -> TurnEnd | None:
    """Return the end that a turn has.

    Args:
        closed: what follows the assistant's text at the end of a conversation.
        inside: what follows it if there is a further message.
        patterns: of the tokens to look for; those of a later pattern only if there is none of an earlier one.
    """
    both = closed[: common_length(closed, inside)]
    for pattern in patterns:
        last = [*pattern.finditer(both)][-1:]
        if found := last or [*pattern.finditer(closed)][:1]:
            token, lead, rest = found[0][0], closed[: found[0].start()], closed[found[0].end() :]
            other = pattern.search(inside)
            return TurnEnd(token, lead, rest, inner="" if last or other is None else other[0])
    if inside.startswith(closed):
        for pattern in patterns:
            other = pattern.match(inside, len(closed))
            if other is not None and other[0] != bos_token:
                return TurnEnd(other[0], follows=True)
    return None


def _pattern(tokens: Sequence[str] | Mapping[str, bool]) -> re.Pattern[str]:
    """Return a pattern that matches each token, the longest first; tokens of white space only are left out."""
    named = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, named)) or "(?!)")


def common_length(one: str, other: str) -> int:
    """Return the number of characters that two texts begin with."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
