"""Selection of training data from scored responses: best of n, best against worst, or all above a threshold.

Rows are those of responses.jsonl (docs/generation.md): the responses to a prompt are adjacent and share `data` and
`index`. A response whose reward failed has the score null and is never selected. Only the prompt in hand is in memory,
and a hash of each row that was selected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hpc_rl.data.reading.formats import Row, read_rows
from hpc_rl.data.reading.rows import unlearned
from hpc_rl.data.templates.messages import READ_KEYS, Message
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.system.files import write_jsonl


@dataclass
class SelectionCounts:
    """What became of the responses."""

    prompts: int = 0
    responses: int = 0
    failed: int = 0
    """Responses whose reward failed."""
    unscored: int = 0
    """Prompts without enough scored responses."""
    equal: int = 0
    """Prompts whose scored responses all have the same score (pairs)."""
    unlike: int = 0
    """Pairs of conversations that differ first in something else than a turn of the assistant."""
    below: int = 0
    """Responses below the threshold."""
    duplicates: int = 0
    """Rows that had been selected before."""
    rows: int = 0
    """Rows that were selected."""

    def __str__(self) -> str:
        text = (
            f"{counted(self.rows, 'row')} from {counted(self.responses, 'response')} "
            f"to {counted(self.prompts, 'prompt')}"
        )
        lost = [
            (self.failed, "response", " without a score"),
            (self.unscored, "prompt", " without enough scores"),
            (self.equal, "prompt", " with equal scores"),
            (self.unlike, "pair", " whose first difference is not in a turn of the assistant"),
            (self.below, "response", " below the threshold"),
            (self.duplicates, "duplicate", ""),
        ]
        return "; ".join([text, *(counted(count, noun) + what for count, noun, what in lost if count)])


class Response(NamedTuple):
    """A row of a file of responses."""

    row: Row
    file: str
    number: int

    @property
    def where(self) -> str:
        """Its place for errors."""
        return f"{self.file}, row {self.number}"

    @property
    def group(self) -> tuple[object, ...]:
        """What the responses to a prompt have in common."""
        return self.row.get("data"), self.row.get("index")


Choose = Callable[[Sequence[Row], SelectionCounts], Iterable[Row]]
"""From the scored responses to a prompt to the rows to write."""


def _selected(
    files: Iterable[Iterable[Response]], choose: Choose, compares: bool, counts: SelectionCounts
) -> Iterator[Row]:
    """Yield the rows that are selected from the responses to one prompt after the other.

    Args:
        files: the rows of each file.
        compares: whether several responses to a prompt are needed.
    """
    seen: set[bytes] = set()
    for responses in files:
        for _, group in groupby(responses, key=lambda response: response.group):
            scored = _scored(list(group), compares, counts)
            for row in choose(scored, counts) if scored else ():
                key = hashlib.blake2b(_text(row), digest_size=16).digest()
                counts.duplicates += key in seen
                if key not in seen:
                    seen.add(key)
                    counts.rows += 1
                    yield row
    if counts.failed == counts.responses:
        raise UserError(
            f"none of {counts.responses:,} responses has a score, because the reward failed for all of them: "
            "fix the reward function and generate again"
        )
    if not counts.rows:
        raise UserError(f"nothing was selected: {counts}")


def _scored(group: Sequence[Response], compares: bool, counts: SelectionCounts) -> list[Row]:
    """Return the responses to a prompt that have a score; none if there are not enough of them."""
    for response in group:
        check_response(response)
    if compares and len(group) == 1:
        raise UserError(
            f"{group[0].where}: the prompt has one response, but best-of-n and pairs compare several: generate "
            "with rollout.n=2 or more, or select by threshold"
        )
    scored = [response.row for response in group if response.row["score"] is not None]
    counts.prompts += 1
    counts.responses += len(group)
    counts.failed += len(group) - len(scored)
    if len(scored) < (2 if compares else 1):
        counts.unscored += 1
        return []
    return scored


def best_of_n(scored: Sequence[Row], _counts: SelectionCounts) -> list[Row]:
    """Return the response with the highest score, the first of several, as a chat."""
    return [as_chat_row(max(scored, key=lambda row: row["score"]))]


def best_and_worst(scored: Sequence[Row], counts: SelectionCounts) -> list[Row]:
    """Return the responses with the highest and the lowest score as a pair; nothing if all scores are equal."""
    best, worst = max(scored, key=lambda row: row["score"]), min(scored, key=lambda row: row["score"])
    if best["score"] == worst["score"]:
        counts.equal += 1
        return []
    return _comparable([_pair(best, worst)], counts)


def all_pairs(scored: Sequence[Row], counts: SelectionCounts) -> list[Row]:
    """Return all pairs of responses with different scores: the comparisons that a reward model learns from (Ouyang et
    al. 2022, https://arxiv.org/abs/2203.02155, section 3.5)."""
    found = [_pair(better, worse) for better in scored for worse in scored if better["score"] > worse["score"]]
    counts.equal += not found
    return _comparable(found, counts)


def _pair(better: Row, worse: Row) -> Row:
    chosen, rejected = (row.get("conversation", row["response"]) for row in (better, worse))
    margin = better["score"] - worse["score"]
    return {
        "prompt": better["prompt"],
        "chosen": chosen,
        "rejected": rejected,
        "margin": margin,
        **_for_template(better),
    }


def _for_template(row: Row) -> Row:
    """Return the columns from which the chat template made the prompt, such as tools."""
    return {name: row[name] for name in READ_KEYS if row.get(name) is not None}


def _comparable(pairs: Sequence[Row], counts: SelectionCounts) -> list[Row]:
    """Return the pairs without those of conversations that no training accepts; see to_pair in preference_rows.py."""
    found = [pair for pair in pairs if isinstance(pair["chosen"], str) or _differ_in_turn(pair)]
    counts.unlike += len(pairs) - len(found)
    return found


def _differ_in_turn(pair: Row) -> bool:
    """Return whether the first messages that differ are turns of the assistant."""
    both = zip(pair["chosen"], pair["rejected"], strict=False)
    first = next((messages for messages in enumerate(both) if messages[1][0] != messages[1][1]), None)
    return first is not None and first[0] > 0 and all(message["role"] == "assistant" for message in first[1])


def above(threshold: float) -> Callable[[Sequence[Row], SelectionCounts], list[Row]]:
    """Return the choice of all responses with at least this score, as chats."""

    def choose(scored: Sequence[Row], counts: SelectionCounts) -> list[Row]:
        kept = [row for row in scored if row["score"] >= threshold]
        counts.below += len(scored) - len(kept)
        return [as_chat_row(row) for row in kept]

    return choose


def as_chat_row(row: Row) -> Row:
    """Return prompt and response of a row as a chat for supervised fine-tuning, with the score. Turns of the assistant
    in the prompt are not learned, because the model did not write them."""
    prompt: str | list[Message] = row["prompt"]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    told = row.get("conversation", [*asked, {"role": "assistant", "content": row["response"]}])
    messages = [*unlearned(told[: len(asked)]), *told[len(asked) :]]
    return {"messages": messages, "score": row["score"], **_for_template(row)}


_COMPARING: dict[str, Choose] = {"best-of-n": best_of_n, "pairs": best_and_worst, "all-pairs": all_pairs}
"""Method of `hpc_rl.config.training.select` that compares the responses to a prompt -> what it chooses of them."""


def select(files: Sequence[str], method: str, threshold: float | None, output: Path) -> SelectionCounts:
    """Select rows from files of responses, and write them atomically.

    Raises:
        UserError: a file cannot be read or written, its rows are not scored responses, a prompt has a single response
            although several are compared, or nothing was selected. Then the output is not changed.
    """
    compares = method != "threshold"
    if not compares and threshold is None:
        raise ValueError("a selection by threshold needs a threshold")
    choose = _COMPARING[method] if compares else above(threshold or 0.0)
    counts = SelectionCounts()
    write_jsonl(output, _selected(map(_responses, files), choose, compares, counts))
    return counts


def check_scored(file: str) -> None:
    """Raise UserError if the first row of a file is not a scored response."""
    for response in _responses(file):
        check_response(response)
        return
    raise UserError(f"{file} has no responses: name a responses.jsonl of hpc-rl submit generate")


def check_response(response: Response) -> None:
    """Raise UserError if a row is not a response with a score (a number, or null if the reward failed)."""
    row, where = response.row, response.where
    if missing := [name for name in ("index", "prompt", "response") if name not in row]:
        raise UserError(
            f"{where}: no column {missing[0]!r}, so this is not a response: name a responses.jsonl of hpc-rl submit "
            "generate"
        )
    if "score" not in row:
        raise UserError(
            f"{where}: the responses have no scores: generate them with a reward, such as reward.function=gsm8k"
        )
    score = row["score"]
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise UserError(f"{where}: column 'score' has {score!r}; a number or null is needed")


def _responses(file: str) -> Iterator[Response]:
    for number, row in enumerate(read_rows(file), 1):
        yield Response(row, file, number)


def _text(row: Row) -> bytes:
    """Return what makes two selected rows the same: all but their scores."""
    kept = {name: value for name, value in row.items() if name not in ("score", "margin")}
    return json.dumps(kept, sort_keys=True, default=str).encode()
