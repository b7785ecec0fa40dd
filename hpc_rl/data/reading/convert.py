"""Data files in one of the shapes of public data sets, written as rows that training reads: `hpc-rl data convert`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.config.training.preferences import PreferenceDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.reading.row_checks import AnyData, check_row
from hpc_rl.data.reading.shapes import SHAPES, RowShape, Unlike, shape_of
from hpc_rl.data.reading.sources import all_rows
from hpc_rl.errors import UserError
from hpc_rl.system.files import write_jsonl


@dataclass(frozen=True)
class Converted:
    """What was written."""

    rows: int
    left_out: int
    """Rows from which there is nothing to learn."""
    name: str
    """The name of the shape."""
    shape: RowShape


def convert(file: str, output: Path, name: str | None = None) -> Converted:
    """Convert the rows of a file or data set, and write them atomically as JSON lines.

    Args:
        name: the shape of the rows; None: that of the first row.

    Raises:
        UserError: a row has another shape, or is not valid. Then the output is not changed.
    """
    if output.suffix.lower() != ".jsonl":
        raise UserError(f"--output {output}: JSON lines are written; name a file that ends in .jsonl")
    if Path(file).exists() and output.exists() and Path(file).samefile(output):
        raise UserError(f"--output {output} is the file that is read; name another one")
    first = next(all_rows([file], "train"))
    name = name or shape_of(first[0])
    if name is None:
        columns = ", ".join(sorted(map(str, first[0])))
        raise UserError(
            f"{first[1]}: none of the shapes {', '.join(SHAPES)} has the columns {columns}; if training can read them "
            "with options such as data.prompt_key, nothing has to be converted (hpc-rl data check)"
        )
    shape = SHAPES[name]
    left_out: list[str] = []
    rows = write_jsonl(output, _rows(file, name, shape, left_out))
    return Converted(rows, len(left_out), name, shape)


def _rows(file: str, name: str, shape: RowShape, left_out: list[str]) -> Iterator[Row]:
    data, is_empty = _reader(shape), True
    for row, where in all_rows([file], "train"):
        if not shape.matches(row):
            columns = ", ".join(sorted(map(str, row)))
            raise UserError(f"{where}: the shape {name} has {shape.columns}; found the columns {columns}")
        try:
            found = shape.convert(row)
        except Unlike as error:
            raise UserError(f"{where}: {error} (shape {name})") from error
        if not found:
            left_out.append(where)
            continue
        check_row(found, data, f"{where}, converted")
        is_empty = False
        yield found
    if is_empty:
        raise UserError(f"{file}: there is nothing to learn from any row (shape {name})")


def _reader(shape: RowShape) -> AnyData:
    files = ["converted"]
    if shape.kind == "ppo":
        return PromptDataConfig(train_files=files)
    if shape.kind == "dpo":
        return PreferenceDataConfig(train_files=files, label_key="label" if shape.options else None)
    return DataConfig(train_files=files)
