"""Where the text that the assistant wrote is in a rendered conversation, for templates without generation marks.

Each turn of the assistant is rendered as the last one of its conversation: behind the generation prompt, the model has
to write what it has then, up to the token that ends the turn. Usually the whole conversation contains the same text. A
template that renders earlier turns differently, for example without thinking, would teach the model to begin an answer
in a way in which it is never asked to. For such a template the conversation is composed of the turns as they are when
they are the last one, so that its tokens are those of the template for every conversation with one answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpc_rl.data.templates.jinja_rendering import marks_generation, render_marked, render_plainly
from hpc_rl.data.templates.messages import REASONING
from hpc_rl.data.templates.turn_ends import Ends, TextOf, TurnEnd, common_length, find_ends
from hpc_rl.errors import UserError

_NEAR = 16
"""Characters before a turn that show where it is, if the template writes no generation prompt."""
_REMEDY = (
    "set data.chat_template to a template that marks the assistant's text with {% generation %} ... {% endgeneration %}"
)


_TRIAL: list[dict[str, Any]] = [
    {"role": role, "content": text}
    for role, text in (("user", "Question?"), ("assistant", "One."), ("user", "More?"), ("assistant", "Two."))
]

_NO_END = (
    "the chat template ends the assistant's turns with no special token: a model cannot learn to stop from it, and "
    "only the tokenizer's own end-of-sequence token ends a response; set data.chat_template to a template that ends "
    "turns"
)
_COMPOSED = (
    "the chat template renders earlier turns of the assistant in another form than the last one: each turn is trained "
    "as if it were the last one, because the model has to generate this form"
)
_UNMARKED_END = (
    "the chat template has the end of a turn, {}, outside of its generation marks, so a model cannot learn to "
    "stop: put {{% endgeneration %}} behind it"
)


@dataclass(frozen=True)
class ChatText:
    text: str
    spans: list[tuple[int, int]]
    """[start, end) of each assistant turn in text, including the end-of-turn token."""
    is_composed: bool = False
    """The template renders earlier turns differently, so that the text is composed of its turns."""


@dataclass
class _Turn:
    text_of: TextOf
    messages: Sequence[dict[str, Any]]
    """The conversation up to this turn."""
    before: str
    """The conversation before this turn, with the generation prompt."""
    text: str
    """The conversation up to this turn."""
    start: int
    """Where the turn begins in it."""
    body: str
    """What the model writes, without the token that ends the turn."""
    end: TurnEnd | None

    @property
    def written(self) -> str:
        """What the model writes, with the token that ends the turn unless that begins the next message."""
        return self.body + (self.end.token if self.end and not self.end.follows else "")

    @property
    def index(self) -> int:
        return len(self.messages) - 1

    @cached_property
    def prompt(self) -> int:
        """Length of the generation prompt."""
        if not self.index:
            return self.start
        return len(self.before) - common_length(self.before, self.text_of(list(self.messages[:-1]), False))


def find_spans(text_of: TextOf, messages: Sequence[dict[str, Any]], ends: Ends, where: str) -> ChatText:
    """Render a conversation, and find the assistant's text in it.

    Args:
        ends: how the template ends turns.
        where: file and row number, for the error.

    Raises:
        UserError: the template rejects the conversation, or its turns cannot be found.
    """
    full = text_of(list(messages), False)
    turns = [
        _turn(text_of, messages, index, full, ends, where)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    found = _in_place(full, turns)
    text, spans = (full, found) if found is not None else _composed(text_of, messages, full, turns, where)
    return ChatText(*_with_following_ends(text, spans, turns), is_composed=found is None)


def remarks(template: str, added: Mapping[str, bool], special: Mapping[str, str], learns: bool = True) -> list[str]:
    """Return what a user should know about how a chat template treats the assistant's turns.

    Args:
        added: the tokenizer's added tokens, each with whether it is special.
        special: variables such as bos_token and eos_token.
        learns: whether a model is trained with turns of the data, instead of turns that it writes itself.
    """

    def text_of(messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        return render_plainly(template, messages, "chat template", special, generation_prompt)

    ends = find_ends(text_of, added, special.get("bos_token"))
    try:
        if ends.answer is None and text_of(_TRIAL[:2], False):
            return [_NO_END]
        if not learns:
            return []
        if not marks_generation(template):
            return [_COMPOSED] if find_spans(text_of, _TRIAL, ends, "chat template").is_composed else []
        text, spans = render_marked(template, _TRIAL, "chat template", special)
    except UserError:
        return []  # a template may refuse this conversation, and the rows show whether it refuses theirs
    token = ends.answer.token if ends.answer else ""
    return [] if token in "".join(text[start:end] for start, end in spans) else [_UNMARKED_END.format(token)]


def _turn(text_of: TextOf, messages: Sequence[dict[str, Any]], index: int, full: str, ends: Ends, where: str) -> _Turn:
    text = full if index + 1 == len(messages) else text_of(list(messages[: index + 1]), False)
    possible = ends.of(messages[index])
    if index == 0:  # most templates cannot render a conversation without messages
        before = text[: common_length(text, text_of([_replaced(messages[0])], False))]
    else:
        before = text_of(list(messages[:index]), True)
        text = _with_thinking(text, before, messages[index], possible)
    start = common_length(before, text)
    if index and start < len(before):  # what the model writes may begin like the rest of the generation prompt
        start = min(start, common_length(text, text_of([*messages[:index], _replaced(messages[index])], False)))
    end = next((end for end in possible if end.follows or _ends_with(text, end, start)), None)
    length = 0 if end is None or end.follows else len(end.token + end.rest)
    turn = _Turn(text_of, messages[: index + 1], before, text, start, text[start : len(text) - length], end)
    if start < len(before) - (0 if start == len(before) else turn.prompt):
        raise UserError(
            f"{where}: the chat template renders what precedes turn {index + 1} differently before and after the "
            f"assistant has answered, so the assistant's tokens cannot be found; {_REMEDY}"
        )
    return turn


def _ends_with(text: str, end: TurnEnd, start: int) -> bool:
    closing = end.token + end.rest
    return text.endswith(closing) and len(text) - len(closing) >= start


def _replaced(message: dict[str, Any], keep_calls: bool = False) -> dict[str, Any]:
    """Return a message of the same role with another text, which begins and ends with other characters."""
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else ""
    other = next(one for one in ("Another.", "Other!", "Some?") if text[:1] != one[0] and text[-1:] != one[-1])
    calls = {"tool_calls": message["tool_calls"]} if keep_calls and message.get("tool_calls") else {}
    return {"role": message["role"], "content": other, **calls}


def _with_thinking(text: str, before: str, message: dict[str, Any], ends: Sequence[TurnEnd]) -> str:
    """Return a conversation with the thinking of its last turn behind the generation prompt, if that opens it, but the
    template removes it from the turn, or opens it twice."""
    content = message.get("content")
    reason = next((message[name] for name in REASONING if message.get(name)), None)
    if isinstance(content, str) and isinstance(reason, str) and "</think>" not in content:
        content = f"{reason.strip()}\n</think>\n\n{content}"
    end = next((end for end in ends if text.endswith(end.token + end.rest)), None)
    if not (isinstance(content, str) and "</think>" in content and before.rstrip().endswith("<think>")) or end is None:
        return text
    content = content.lstrip().removeprefix("<think>").lstrip("\n")
    rendered = text[common_length(before, text) :]
    if content.partition("</think>")[0].strip() in rendered and not rendered.startswith("<think>"):
        return text
    return before + content + end.lead + end.token + end.rest


def _in_place(full: str, turns: Sequence[_Turn]) -> list[tuple[int, int]] | None:
    """Return where the turns are in the whole conversation, or None if it has one of them in another form."""
    spans: list[tuple[int, int]] = []
    for turn in turns:
        at = spans[-1][1] if spans else 0
        # Some templates end only the last turn with the token at which generation stops.
        places = [
            (found, -len(written))
            for written in dict.fromkeys((turn.written, turn.body))
            if (found := _place(full, turn, written, at)) is not None
        ]
        if not places:
            return None
        start, length = min(places)
        spans.append((start, start - length))
    return spans


def _place(full: str, turn: _Turn, written: str, at: int) -> int | None:
    """Return where the whole conversation has a turn, from some place on; None if it does not have it."""
    if turn.start >= at and full.startswith(turn.text[: turn.start] + written):
        return turn.start
    near = turn.text[max(0, turn.start - (turn.prompt or _NEAR)) : turn.start]
    found = full.find(near + written, max(0, at - len(near))) + len(near)
    return found if near and found >= max(at, len(near)) else None


def _composed(
    text_of: TextOf, messages: Sequence[dict[str, Any]], full: str, turns: Sequence[_Turn], where: str
) -> tuple[str, list[tuple[int, int]]]:
    """Return the conversation with each turn as it is when it is the last one, and where the turns are."""
    text, spans = turns[0].text[: turns[0].start], []
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        spans.append((len(text), len(text) + len(turn.written)))
        until = len(messages) if following is None else following.index
        later = full if following is None else following.before
        replaced = [
            *messages[: turn.index],
            _replaced(messages[turn.index], keep_calls=True),
            *messages[turn.index + 1 : until],
        ]
        behind = _end_in(later, text_of(replaced, following is not None), turn, where)
        text += turn.written + later[behind : None if following is None else following.start]
    return text, spans


def _end_in(later: str, replaced: str, turn: _Turn, where: str) -> int:
    """Return where a turn ends in a later state of the conversation, which may have it in another form."""
    end = len(later) - common_length(later[::-1], replaced[::-1])
    same = common_length(turn.text[: turn.start], later)
    if min(same, end) < turn.start - turn.prompt:
        raise UserError(
            f"{where}: the chat template renders turn {turn.index + 1} and what precedes it differently if later turns "
            f"follow, so the assistant's tokens cannot be found; {_REMEDY}, or keep one assistant turn per row"
        )
    end = max(same, end)
    tokens = [turn.end.token, *filter(None, [turn.end.inner])] if turn.end and not turn.end.follows else [""]
    # Behind the content is what else the model wrote: calls of tools, and what precedes the token that ends the turn.
    for length in _overlaps(turn.body, later[end:]):
        for token in tokens:
            if later.startswith(token, end + length):
                return end + length + len(token)
    return end


def _overlaps(one: str, other: str) -> Iterator[int]:
    """Yield the numbers of characters with which one text ends and another begins, the largest first.

    The time grows as the length (Knuth, Morris, Pratt 1977, "Fast Pattern Matching in Strings").
    """
    texts = [*other[: len(one)], None, *one]  # no overlap goes beyond None
    shorter = [0] * len(texts)  # of each beginning: the longest of its ends that it begins with
    for index in range(1, len(texts)):
        length = shorter[index - 1]
        while length and texts[index] != texts[length]:
            length = shorter[length - 1]
        shorter[index] = length + (texts[index] == texts[length])
    length = shorter[-1]
    while length:
        yield length
        length = shorter[length - 1]
    yield 0


def _with_following_ends(
    text: str, spans: list[tuple[int, int]], turns: Sequence[_Turn]
) -> tuple[str, list[tuple[int, int]]]:
    """Extend spans by end tokens that begin the next message. The end of a conversation gets its token too."""
    found = []
    for (start, end), turn in zip(spans, turns, strict=True):
        token = turn.end.token if turn.end and turn.end.follows else ""
        if end == len(text):
            text += token
        found.append((start, end + len(token) if text.startswith(token, end) else end))
    return text, found
