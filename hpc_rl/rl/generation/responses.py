"""The rows of responses.jsonl, and the files in which finished blocks wait until all are finished.

A block is one file, which is renamed when it is complete. The last step joins all of them, in the order of the data.
"""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.data.reading.rows import to_prompt
from hpc_rl.errors import UserError
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.generation.plan import Block, GenerationPlan, PlacedPrompt
from hpc_rl.rl.loop.batches import score_or_none
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import read_json, replacing, write_atomically, write_jsonl, writing

Row = dict[str, Any]
Measures = Mapping[str, tuple[float, int]]
"""What a block measured: metric -> its value, and the number of responses that have it; see measures.py."""
STOPPED, TRUNCATED, FAILED = "stopped", "truncated", "failed"
COLUMNS = frozenset(
    {
        *("data", "index", "prompt", "answer", "sample", "response", "conversation"),
        *("tokens", "logprob", "finish", "logprobs", "score"),
    }
)
"""Names of the columns of a response. Columns of the data that have one of these names are left out."""
_PLAN = "plan.json"
_MEASURES = ".measures.json"


def response_rows(
    block: Block,
    completions: Sequence[Completion],
    texts: Sequence[str],
    scores: Scores | None,
    data: PromptConfig,
    logprobs: bool,
) -> list[Row]:
    """Return the rows of a block; docs/generation.md describes the columns.

    Args:
        completions: n for each prompt, in order.
        texts: the completions as text; of conversations, the model's last turns.
        scores: of the completions; None if there is no reward.
        logprobs: whether to write the log-probability of each token.
    """
    n = len(completions) // len(block.prompts)
    values = [None] * len(completions) if scores is None else [score_or_none(value) for value in scores.values]
    return [
        {
            **_prompt_columns(block.prompts[number // n], data),
            "sample": number % n,
            "response": text,
            **_own_columns(completion, logprobs),
            **({} if scores is None else {"score": value}),
        }
        for number, (completion, text, value) in enumerate(zip(completions, texts, values, strict=True))
    ]


def _own_columns(completion: Completion, logprobs: bool) -> Row:
    """Return the columns of what the model sampled, and the conversation if it is one."""
    own = completion.logprobs if completion.mask is None else completion.logprobs[completion.mask]
    found: Row = {
        "tokens": completion.sampled,
        "logprob": _sum(own),
        "finish": finish_of(completion),
    }
    if logprobs:
        found["logprobs"] = base64.b64encode(own.astype("<f4").tobytes()).decode()
    if isinstance(completion, Conversed):
        # Messages of the user's environment may hold values that JSON does not have.
        found["conversation"] = json.loads(json.dumps(completion.messages, default=str))
    return found


def finish_of(completion: Completion) -> str:
    """Return how a response ended."""
    if completion.finished:
        return STOPPED
    return FAILED if isinstance(completion, Conversed) and completion.outcome.error is not None else TRUNCATED


def _sum(logprobs: NDArray[np.float32]) -> float | None:
    """Return the log-probability of a response, or None if the engine did not get those of the tokens."""
    total = float(logprobs.sum(dtype="float64"))
    return None if math.isnan(total) else round(total, 6)


def _prompt_columns(asked: PlacedPrompt, data: PromptConfig) -> Row:
    """Return the columns of a row's prompt: those of the data, with fixed names for prompt and answer."""
    messages, answer = to_prompt(asked.prompt.row, data, "")
    own = asked.prompt.row[data.prompt_key]
    left_out = {data.prompt_key, data.answer_key, *COLUMNS}
    others = {name: value for name, value in asked.prompt.row.items() if name not in left_out}
    is_text = messages[-1]["content"] == own  # instead of messages as JSON text
    fixed = {"data": asked.source, "index": asked.index, "prompt": own if is_text else messages}
    return {**others, **fixed, **({} if data.answer_key is None else {"answer": answer})}


class Parts:
    """The finished blocks of a run.

    Raises:
        UserError: the run directory has blocks, or all responses, of another plan.
        RunError: the run directory cannot be written.
    """

    def __init__(self, run: RunDir, plan: GenerationPlan) -> None:
        self._run = run
        self._folder = run.response_parts
        self._plan = plan
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
        before = read_json(self._folder / _PLAN)
        after = plan.as_dict()
        if before and before != after and self.finished():
            changed = [name for name in after if before.get(name) != after[name]]
            raise UserError(
                f"{run.path} has responses that were generated with other settings ({', '.join(changed)} changed), and "
                "new ones would not fit them: undo the change, choose another --job-name, or remove "
                f"{self._folder} and {run.responses} to start over"
            )
        if before != after:
            with writing(self._folder):
                write_atomically(self._folder / _PLAN, json.dumps(after) + "\n")

    @property
    def is_joined(self) -> bool:
        """Whether responses.jsonl is complete."""
        return self._run.responses.is_file()

    def finished(self) -> set[int]:
        """Return the numbers of the finished blocks."""
        if self.is_joined:
            return set(range(self._plan.blocks))
        every = range(self._plan.blocks)
        return {number for number in every if self._path(number).is_file() and self._measures(number).is_file()}

    def write(self, number: int, rows: Sequence[Row], measures: Measures) -> None:
        """Write a finished block, whole or not at all."""
        with writing(self._measures(number)):
            write_atomically(self._measures(number), json.dumps(measures) + "\n")
        write_jsonl(self._path(number), rows)

    def measured(self) -> list[Measures]:
        """Return what the finished blocks measured; nothing if they are joined."""
        numbers = [] if self.is_joined else sorted(self.finished())
        return [read_json(self._measures(number)) for number in numbers]

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove finished blocks, so that they are generated again."""
        for number in numbers:
            self._path(number).unlink(missing_ok=True)
            self._measures(number).unlink(missing_ok=True)

    def join(self) -> None:
        """Write responses.jsonl from all blocks, in the order of the data, and remove the blocks.

        Raises:
            RunError: it cannot be written, for example to a full disk. The blocks stay.
        """
        responses = self._run.responses
        if not self.is_joined:
            with writing(responses), replacing(responses) as partial, partial.open("xb") as whole:
                for number in range(self._plan.blocks):
                    with self._path(number).open("rb") as part:
                        shutil.copyfileobj(part, whole)
        for part in [*self._folder.glob("*.jsonl"), *self._folder.glob(f"*{_MEASURES}")]:
            part.unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.jsonl"

    def _measures(self, number: int) -> Path:
        return self._folder / f"{number:06d}{_MEASURES}"


def read_responses(path: Path) -> Iterator[Row]:
    """Yield the rows of a responses.jsonl that this program wrote."""
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
