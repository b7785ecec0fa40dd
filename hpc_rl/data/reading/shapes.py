"""The shapes that rows of public data sets have, and what each becomes in the form that training reads.

To add one, write a function from a row to the new row, and add it to `SHAPES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.data.reading.formats import Row, kind_of
from hpc_rl.data.templates.messages import Message

_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "function"), "tool"),
    "system": "system",
    "developer": "developer",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Names of the speakers in ShareGPT's form."""
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_CHATS = ("conversations", "conversation", "messages")


@dataclass(frozen=True)
class RowShape:
    """A shape of rows."""

    columns: str
    """What a row has, for the documentation."""
    matches: Callable[[Row], bool]
    convert: Callable[[Row], Row]
    """Returns the new row; an empty one if there is nothing to learn from it. Raises Unlike if the row is not as its
    columns promise."""
    kind: str
    """The kind of job that reads the new rows, a name of `hpc-rl data check --kind`."""
    becomes: str
    """Columns of the new row, for the documentation."""
    options: str = ""
    """Options of the job."""


class Unlike(Exception):
    """A row does not have the form of its shape. The message has the reason."""


def shape_of(row: Row) -> str | None:
    """Return the name of the shape of a row that has to be converted, or None if it has none."""
    return next((name for name, shape in SHAPES.items() if shape.matches(row)), None)


def _sharegpt(row: Row) -> Row:
    name = _sharegpt_column(row)
    assert name is not None
    if "chosen" in row and "rejected" in row:
        pair = {side: [_turn(row[side])] for side in ("chosen", "rejected")}
        return {"prompt": _turns(row[name]), **pair, **_others(row, name, *pair)}
    if "kto_tag" in row:
        return {"response": _turns(row[name]), "label": row["kto_tag"], **_others(row, name, "kto_tag")}
    turns = _turns(row[name])
    is_answered = any(turn.get("role") == "assistant" for turn in turns)
    return {"messages": turns, **_others(row, name)} if is_answered else {}


def _sharegpt_column(row: Row) -> str | None:
    if row.get(_CHATS[0]) == []:
        return _CHATS[0]  # public data sets have such rows
    found = (name for name in _CHATS if isinstance(row.get(name), list) and row[name])
    return next((name for name in found if isinstance(row[name][0], Mapping) and "from" in row[name][0]), None)


def _turns(value: Any) -> list[Message]:
    return [_turn(one) for one in value]


def _turn(turn: Any) -> Message:
    """Return a message in ShareGPT's form, or one that has a role, as a message."""
    if isinstance(turn, Mapping) and "role" in turn:
        return dict(turn)
    speaker = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(speaker, str) or speaker not in _ROLES or "value" not in turn:
        raise Unlike(f'a turn is not of the form {{"from": ..., "value": ...}} with one of {", ".join(_ROLES)}')
    rest = _others(turn, "from", "value")
    if speaker in ("function_call", "tool_call"):
        try:
            calls = json.loads(turn["value"])
        except (TypeError, ValueError) as error:
            raise Unlike(f"a turn of {speaker} is no JSON") from error
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": calls if isinstance(calls, list) else [calls],
            **rest,
        }
    return {"role": _ROLES[speaker], "content": turn["value"], **rest}


def _alpaca(row: Row) -> Row:
    more, answer = _first(row, "input", "context"), _first(row, "output", "response")
    parts = [row[name] for name in ("instruction", more) if name and row[name]]
    if not all(isinstance(part, str) for part in parts) or not parts:
        raise Unlike("`instruction` and `input` have to be text, and one of them not empty")
    messages: list[Message] = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Unlike("`history` has to be a list of pairs")
        # The earlier answers are part of the prompt.
        earlier = {"role": "assistant", "content": pair[1], "train": False}
        messages += [{"role": "user", "content": pair[0]}, earlier]
    messages += [{"role": "user", "content": "\n\n".join(parts)}, {"role": "assistant", "content": row[answer or ""]}]
    return {"messages": messages, **_others(row, "instruction", more, answer, "history")}


def _is_alpaca(row: Row) -> bool:
    return "instruction" in row and bool(_first(row, "input", "context")) and bool(_first(row, "output", "response"))


def _hh(row: Row) -> Row:
    chosen, rejected = _hh_turns(row["chosen"]), _hh_turns(row["rejected"])
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    pair = {"chosen": chosen[same:], "rejected": rejected[same:]}
    return {"prompt": chosen[:same], **pair, **_others(row, *pair)}


def _hh_turns(text: str) -> list[Message]:
    _, *parts = _HH_TURN.split("\n\n" + text.lstrip("\n"))
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": said.strip()} for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _is_hh(row: Row) -> bool:
    return all(isinstance(row.get(name), str) and "Human:" in row[name][:10] for name in ("chosen", "rejected"))


def _kto(row: Row) -> Row:
    return {"prompt": row["prompt"], "response": row["completion"], **_others(row, "prompt", "completion", "response")}


def _ultrafeedback(row: Row) -> Row:
    rated = [(_rating(one), one.get("response")) for one in row["completions"] if isinstance(one, Mapping)]
    scored = [(score, text) for score, text in rated if score is not None]
    if len(scored) < 2:
        raise Unlike("fewer than two `completions` have a score")
    best, worst = max(scored, key=lambda one: one[0]), min(scored, key=lambda one: one[0])
    if best[0] == worst[0]:
        return {}
    found = {"prompt": row["instruction"], "chosen": best[1], "rejected": worst[1], "margin": best[0] - worst[0]}
    return {**found, **_others(row, "instruction", "completions")}


def _rating(completion: Mapping[str, Any]) -> float | None:
    for name in ("fine-grained_score", "overall_score"):
        value = completion.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _is_ultrafeedback(row: Row) -> bool:
    found = row.get("completions")
    return "instruction" in row and isinstance(found, list) and all(isinstance(one, Mapping) for one in found)


def _verl(row: Row) -> Row:
    answer = row["reward_model"].get("ground_truth")
    return {"messages": row["prompt"], "answer": answer, **_others(row, "prompt", "messages", "answer")}


def _is_verl(row: Row) -> bool:
    return isinstance(row.get("reward_model"), Mapping) and "prompt" in row and "data_source" in row


def _openai_pair(row: Row) -> Row:
    asked = row["input"]
    pair = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    return {"prompt": asked["messages"], **pair, **_others(asked, "messages"), **_others(row, *_OPENAI_PAIR)}


_OPENAI_PAIR = ("input", "preferred_output", "non_preferred_output")


def _is_openai_pair(row: Row) -> bool:
    return (
        all(name in row for name in _OPENAI_PAIR) and isinstance(row["input"], Mapping) and "messages" in row["input"]
    )


def _completion(row: Row) -> Row:
    asked = row["prompt"]
    prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    answer = row["completion"]
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not isinstance(prompt, list) or not isinstance(turns, list):
        raise Unlike(f"`prompt` has {kind_of(asked)} and `completion` {kind_of(answer)}; text or messages are needed")
    said = [isinstance(one, Mapping) and one.get("role") == "assistant" for one in prompt]
    earlier = [{**one, "train": False} if own else one for one, own in zip(prompt, said, strict=True)]
    return {"messages": [*earlier, *turns], **_others(row, "prompt", "completion")}


def _others(row: Mapping[str, Any], *used: str | None) -> Row:
    return {name: value for name, value in row.items() if name not in used}


def _first(row: Row, *names: str) -> str | None:
    return next((name for name in names if name in row), None)


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: all(name in row for name in names)


SHAPES: dict[str, RowShape] = {
    "verl": RowShape(
        "`data_source`, `prompt`, `reward_model` with `ground_truth` (verl's parquet for RL)", _is_verl, _verl, "ppo",
        "`messages`, `answer`, and all others for the reward function",
    ),
    "openai-preference": RowShape(
        "`input` with `messages`, `preferred_output`, `non_preferred_output`", _is_openai_pair, _openai_pair, "dpo",
        "`prompt`, `chosen`, `rejected`, `tools`",
    ),
    "sharegpt-pair": RowShape(
        "`conversations` of `from` and `value`, `chosen`, `rejected`",
        lambda row: _sharegpt_column(row) is not None and _has("chosen", "rejected")(row), _sharegpt, "dpo",
        "`prompt`, `chosen`, `rejected`",
    ),
    "sharegpt-label": RowShape(
        "`conversations` of `from` and `value`, `kto_tag`",
        lambda row: _sharegpt_column(row) is not None and "kto_tag" in row, _sharegpt, "dpo",
        "`response` (a whole chat), `label`", "data.label_key=label algorithm.loss=kto",
    ),
    "sharegpt": RowShape(
        "`conversations` of `from` and `value`, also with `system` and `tools`",
        lambda row: _sharegpt_column(row) is not None, _sharegpt, "sft",
        "`messages`; rows in which nobody answers are left out",
    ),
    "ultrafeedback": RowShape(
        "`instruction`, `completions` with `response` and scores", _is_ultrafeedback, _ultrafeedback, "dpo",
        "`prompt`, `chosen` (the best), `rejected` (the worst), `margin`; rows with equal scores are left out",
    ),
    "hh": RowShape(
        "`chosen`, `rejected`, as text with `Human:` and `Assistant:`", _is_hh, _hh, "dpo",
        "`prompt`, `chosen`, `rejected`",
    ),
    "kto": RowShape(
        "`prompt`, `completion`, `label`", _has("prompt", "completion", "label"), _kto, "dpo",
        "`prompt`, `response`, `label`", "data.label_key=label algorithm.loss=kto",
    ),
    "alpaca": RowShape(
        "`instruction`, `input` (or `context`), `output` (or `response`), also with `system` and `history`",
        _is_alpaca, _alpaca, "sft", "`messages`; the prompt is the instruction, an empty line, and the input",
    ),
    "prompt-completion": RowShape(
        "`prompt`, `completion`, as text or messages", _has("prompt", "completion"), _completion, "sft",
        "`messages`; only the completion carries loss",
    ),
}  # fmt: skip
"""Name -> shape. The first that matches a row is its shape."""
