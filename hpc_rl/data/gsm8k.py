"""GSM8K (grade-school word problems) as chat rows, with the final number in a column of its own for rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.data.reading.formats import is_file, read_rows
from hpc_rl.data.reading.hub import load_split
from hpc_rl.errors import UserError
from hpc_rl.system.files import write_jsonl

_SPLITS = ("train", "test")
_MARK = "####"


def prepare(source: str, out: Path) -> dict[str, int]:
    """Write train.jsonl and test.jsonl with columns `messages` (user, assistant) and `answer` (the number after ####).

    Args:
        source: a folder with train.jsonl or test.jsonl (or both) of raw rows (question, answer), one such file (its
            split is test if its name contains "test", otherwise train), or a `datasets` name (openai/gsm8k:main).
        out: folder to write to; created if it does not exist.

    Returns:
        the number of rows written, by split.

    Raises:
        UserError: the source does not exist or cannot be loaded, or has a row that is not in GSM8K's form.
    """
    splits = _sources(source)
    if any(
        Path(file).resolve() == (out / f"{split}.jsonl").resolve() for split, file in splits.items() if is_file(file)
    ):
        raise UserError(f"{out} contains the raw files, which would be overwritten: choose another folder for --out")
    counts = {}
    for split, file in splits.items():
        rows: Iterable[dict[str, Any]] = read_rows(file) if is_file(file) else load_split(file, split)
        counts[split] = write_jsonl(out / f"{split}.jsonl", _converted(rows, f"{file} ({split})"))
        if not counts[split]:
            raise UserError(f"{file}: the data set is empty")
    return counts


def _sources(source: str) -> dict[str, str]:
    """Return the file or the data set to read for each split."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = {split: str(path / f"{split}.jsonl") for split in _SPLITS if (path / f"{split}.jsonl").is_file()}
        if not found:
            raise UserError(f"{path}: no train.jsonl or test.jsonl in this folder")
        return found
    if is_file(source):
        return {"test" if "test" in path.stem else "train": str(path)}
    return dict.fromkeys(_SPLITS, source)


def _converted(rows: Iterable[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, start=1):
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str) or _MARK not in answer:
            raise UserError(
                f"{where}, row {number}: not a GSM8K row (text in `question`, and in `answer` a number after {_MARK}); "
                f"columns: {', '.join(map(str, row))}"
            )
        yield {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "answer": answer.rpartition(_MARK)[2].strip().replace(",", ""),
        }
