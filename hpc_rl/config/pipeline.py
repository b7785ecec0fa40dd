"""Pipelines: stages that run one after the other, for several rounds. A pipeline is a YAML file.

    values: {model: null, prompts: null}          # KEY=VALUE on the command line; null: required
    rounds: 3
    stages:
      generate: {kind: generate, options: {model.path: "@model", data.files: "@prompts", rollout.n: 8}}
      select: {kind: select, options: {select.responses: "@generate", select.method: best-of-n}}
      train: {kind: sft, options: {model.path: "@model", data.train_files: "@select"}, becomes: model}

`@NAME` is a value, the result of a stage, or `@round`, the number of the round. A stage with `becomes: NAME` replaces
that value by its result, for the stages after it and the next round. The result of each kind is its row's `result` in
KINDS. `expand` is the whole meaning of a pipeline file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from hpc_rl.config.base import Section
from hpc_rl.config.groups import choices, file_of
from hpc_rl.config.keys import nearest
from hpc_rl.config.kinds import KINDS, piped, trained
from hpc_rl.config.tree import flat, read_tree
from hpc_rl.errors import UserError

ROUND = "round"
"""The name of the number of the round, in pipeline files and among the records of a pipeline's runs."""
_STAGE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_REFERENCE = re.compile(r"@([\w-]+)")


class StageConfig(Section):
    kind: str
    """Name of a job kind."""
    options: dict[str, Any] = {}
    """Options of the job: dotted keys, or nested tables."""
    becomes: str | None = None
    """Value that the result of this stage replaces."""


class PipelineConfig(Section):
    description: str = ""
    """A sentence for help pages."""
    values: dict[str, Any] = {}
    """Values that the command line can set, with their defaults. null: the command line has to set it."""
    rounds: int = Field(1, ge=1)
    """How many times the stages run."""
    before: dict[str, StageConfig] = {}
    """Stages that run once, before the first round. Their round is 0."""
    stages: dict[str, StageConfig] = Field(min_length=1)
    """Stages of each round, in order."""

    def problems(self) -> Iterator[str]:
        for name, stage in {**self.before, **self.stages}.items():
            if not _STAGE.fullmatch(name):
                yield f"stage {name!r}: use lower-case letters, digits and single hyphens"
            if stage.kind not in piped():
                yield f"stage {name}: there is no kind {stage.kind!r} for stages; choose one of {', '.join(piped())}"
            if stage.becomes is not None and stage.becomes not in self.values:
                yield (
                    f"stage {name}: becomes {stage.becomes}, which is none of the values: {', '.join(self.values)}; "
                    "add it to values"
                )
        for name in sorted(self.values.keys() & {*self.before, *self.stages, ROUND}):
            yield f"{name} is a value and also {'the number of the round' if name == ROUND else 'a stage'}: rename it"


@dataclass(frozen=True)
class PlannedStage:
    """A stage of one round, with all references replaced."""

    round: int
    name: str
    kind: str
    options: dict[str, Any]
    """Dotted key -> value."""
    result: Path
    """File or folder that the stage writes."""


def file_of_pipeline(name: str) -> Path:
    """Return the file of a pipeline: the file that is named, or one below ./configs/pipeline or a shipped one.

    Raises:
        UserError: there is none of that name. A file that is named need not exist.
    """
    is_file, known = name.endswith((".yaml", ".yml")), choices("pipeline")
    if not is_file and name not in known:
        raise UserError(
            f"there is no pipeline or kind {name!r}: choose one of the pipelines {', '.join(known)}, name a file "
            f"(.yaml), or begin a chain with one of the kinds {', '.join(trained())}"
            + nearest(name, [*known, *trained()])
        )
    return Path(name) if is_file else file_of("pipeline", name)


def load_pipeline(name: str) -> PipelineConfig:
    """Read a pipeline; see `file_of_pipeline`.

    Raises:
        UserError: there is no such file, or it is no valid pipeline.
    """
    path = file_of_pipeline(name)
    try:
        return PipelineConfig.model_validate(read_tree(path))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}".lstrip(": ") for one in error.errors()]
        raise UserError("\n".join(f"{path}: {line.replace('Value error, ', '')}" for line in lines)) from None


def expand(pipeline: PipelineConfig, given: Mapping[str, Any], rounds: int, folder: Path) -> list[PlannedStage]:
    """Return the stages of all rounds, in order.

    Args:
        given: values from the command line.
        folder: the pipeline's folder; a stage's run is FOLDER/NAME_ROUND-STAGE.

    Raises:
        UserError: a value is missing or unknown, or a stage needs something that no earlier stage produces.
    """
    if unknown := given.keys() - pipeline.values.keys():
        key, values, stages = (
            min(unknown),
            ", ".join(pipeline.values),
            ", ".join({**pipeline.before, **pipeline.stages}),
        )
        head, dot, rest = key.partition(".")
        close = difflib.get_close_matches(head, [*pipeline.before, *pipeline.stages] if dot else pipeline.values, n=1)
        raise UserError(
            f"{key}: the pipeline has no such value or stage; its values are {values or 'none'}; its stages, for "
            f"STAGE.KEY=VALUE, are {stages}" + (f"; did you mean {close[0]}{dot}{rest}?" if close else "")
        )
    names = {**pipeline.values, **given}
    if missing := [name for name, value in names.items() if value is None]:
        raise UserError(f"{', '.join(missing)}: required, but not given; write {missing[0]}=VALUE")
    found: list[PlannedStage] = []
    for number in range(rounds + 1):
        for name, stage in (pipeline.stages if number else pipeline.before).items():
            options = _resolved(flat(stage.options), {**names, ROUND: number}, name)
            result = KINDS[stage.kind].result_in(folder / f"{folder.name}_{number}-{name}")
            found.append(PlannedStage(number, name, stage.kind, options, result))
            names |= {name: str(result)} | ({stage.becomes: str(result)} if stage.becomes else {})
    return found


def _resolved(options: dict[str, Any], names: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Replace every `@NAME` in the values of the options, and in the names of files with weights."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(one) for one in value]
        if isinstance(value, dict):
            return {one_file(name): weight for name, weight in value.items()}
        reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if reference is None:
            return value
        if reference[1] not in names:
            raise UserError(
                f"stage {stage} needs {value}, but no earlier stage and no value has this name; there are "
                f"{', '.join(f'@{name}' for name in names)}"
            )
        return names[reference[1]]

    def one_file(name: Any) -> Any:
        found = resolve(name)
        if isinstance(found, list | dict):
            raise UserError(f"stage {stage}: {name} stands for several files, and a weight needs one file: name one")
        return found

    return {key: resolve(value) for key, value in options.items()}
