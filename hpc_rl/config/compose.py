"""From job file and overrides to a validated configuration: Hydra composes, the schema decides.

    compose("sft", ["model=qwen2.5-0.5b", "optim.lr=1e-4"]) -> SftConfig

All errors are reported at once, each with its dotted key.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpc_rl.config.groups import check_choices, groups, recipe_for
from hpc_rl.config.job import JobConfig
from hpc_rl.config.keys import MISSING, documented_keys, find_annotation, leaf_types, nearest
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.origins import line_in, origins
from hpc_rl.config.references import resolve, short
from hpc_rl.config.tree import flat, merged, put, read_tree, yaml_text
from hpc_rl.errors import UserError
from hpc_rl.software.secrets import refuse_secrets

FillIn = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From nested tables without the schema's defaults to dotted key -> value for keys that they leave open."""


class IncompleteError(UserError):
    """Required keys are missing, and nothing else is wrong."""

    def __init__(self, keys: Sequence[str], example: str) -> None:
        self.keys = keys
        super().__init__(
            f"{', '.join(keys)}: required, but not given\n"
            "`hpc-rl init` writes a starter project that sets all of them; or complete the command, for example:\n"
            f"  {example}"
        )


def compose(
    job: str,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    site: Mapping[str, Any] | None = None,
    fill_in: Sequence[FillIn] = (),
    typed: Sequence[str] = (),
) -> JobConfig:
    """Compose the configuration of one job: schema defaults < profile < job file < overrides < settings.

    The job file is `configs/<job>.yaml` in the working folder if it exists, otherwise the shipped one. It names the
    groups that can be chosen: recipe, model and algorithm.

    Args:
        job: name of a row of KINDS.
        overrides: `key=value` or `group=name`, as typed on the command line. If the schema's type is text, the value is
            taken literally; otherwise Hydra's grammar reads it (numbers, lists, tables).
        settings: dotted key -> value that needs no parsing (command-line flags).
        site: dotted key -> value of the cluster's profile (`Profile.values`); keys that this kind of job does not have
            are left out.
        fill_in: choose keys that depend on all others, one after another; each sees what those before it chose.
        typed: the command, which a message completes; empty if it is none of a command line.

    Raises:
        UserError: a key is unknown or missing, a value is invalid, or an override cannot be read.
    """
    return compose_each(job, overrides, [()], settings, site, fill_in, typed)[0]


def compose_each(
    job: str,
    overrides: Sequence[str],
    points: Sequence[Sequence[str]],
    settings: Mapping[str, Any] | None = None,
    site: Mapping[str, Any] | None = None,
    fill_in: Sequence[FillIn] = (),
    typed: Sequence[str] = (),
) -> list[JobConfig]:
    """Compose one configuration for each point of a sweep. Hydra runs once, unless a point names a group.

    Args:
        overrides: the overrides of all points.
        points: each point's own overrides, which are applied after those of all.

    Raises:
        UserError: see `compose`.
    """
    known = groups()
    found, base = [], None
    for own in points:
        if any(_needs_hydra(word, known) for word in own):
            tree = _tree(job, [*overrides, *own], site)
        else:
            base = base or _tree(job, overrides, site)
            tree = _with_values(job, copy.deepcopy(base), own)
        for key, value in (settings or {}).items():
            put(tree, key, value)
        resolve(KINDS[job].schema, tree)
        for choose in fill_in:
            for key, value in choose(tree).items():
                put(tree, key, value)
        words = [*overrides, *own]
        given = [*words, *(f"{key}={value}" for key, value in (settings or {}).items())]
        command = typed or ["hpc-rl", "submit", job, *_as_words(settings or {}), *words]
        example = partial(_example_command, job, tree, command=command)
        config = validate(job, tree, example, origins(job, given))
        refuse_secrets({key: str(value) for key, value in flat(config.model_dump(mode="json")).items()})
        found.append(config)
    return found


def compose_partly(
    job: str, overrides: Sequence[str] = (), site: Mapping[str, Any] | None = None
) -> tuple[JobConfig, list[str]]:
    """Compose a configuration to look at: required keys that are missing are `???`, and are returned by name."""
    tree, schema = _tree(job, overrides, site), KINDS[job].schema
    resolve(schema, tree)
    try:
        schema.model_validate(tree)
    except ValidationError as error:
        missing = _only_missing(schema, error)
    else:
        missing = []
    for key in missing:
        put(tree, key, MISSING)
    return validate(job, tree), missing


def load_config(job: str, path: Path) -> JobConfig:
    """Read a configuration that `dump` wrote.

    Raises:
        UserError: the file is missing, is not YAML, or does not fit the schema.
    """
    return validate(job, read_tree(path), origin=lambda key: line_in(path, key))


def validate(
    job: str,
    tree: Any,
    example: Callable[[Sequence[str]], str] | None = None,
    origin: Callable[[str], str] = lambda key: "",
) -> JobConfig:
    """Check a nested table against the job's schema.

    Args:
        example: returns a command that gives the missing keys; called if nothing else is wrong.
        origin: returns `FILE, line N: ` for the line that sets a key, or an empty text.

    Raises:
        UserError: names every problem, a line each.
    """
    schema = KINDS[job].schema
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        if example and (missing := _only_missing(schema, error)):
            raise IncompleteError(missing, example(missing)) from None
        lines = [line for details in error.errors() for line in _problem(schema, dict(details)).splitlines()]
        raise UserError("\n".join(f"{origin(_key_in(line))}{line}" for line in lines)) from None


def dump(config: BaseModel | Mapping[str, Any]) -> str:
    """Write a configuration, or a part of one, as YAML; `load_config` reads that of a whole one."""
    return yaml_text(config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config))


def _tree(job: str, overrides: Sequence[str], site: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the configuration as nested tables, without the schema's defaults."""
    schema = KINDS[job].schema
    texts, rest = _split_overrides(job, overrides)
    check_choices(rest, {name: f"{name}.path" for name in groups() if find_annotation(schema, f"{name}.path")})
    tree = _hydra_tree(job, rest)
    for name, section in schema.model_fields.items():
        # Sections that are not mentioned exist too, so that each of their required keys is reported.
        if (
            isinstance(section.annotation, type)
            and issubclass(section.annotation, BaseModel)
            and tree.get(name) is None
        ):
            tree[name] = {}
    if site:
        below: dict[str, Any] = {}
        for key, value in site.items():
            if find_annotation(schema, key):
                put(below, key, value)
        tree = merged(below, tree)
    for key, text in texts.items():
        put(tree, key, text)
    return tree


def _with_values(job: str, tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tree with plain values put in, which are parsed with Hydra's grammar but not composed again."""
    texts, rest = _split_overrides(job, overrides)
    for word in rest:
        put(tree, word.partition("=")[0].lstrip("+"), _parsed(word))
    for key, text in texts.items():
        put(tree, key, text)
    return tree


def _needs_hydra(override: str, known: set[str]) -> bool:
    """Return whether an override chooses a file of a group, or refers to another key."""
    return override.partition("=")[0].lstrip("+") in known or "${" in override or override.startswith("~")


def _parsed(override: str) -> Any:
    """Return the value of one `key=value` in Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        (found,) = OverridesParser.create().parse_overrides(["++" + override.lstrip("+")])
        return found.value()
    except (HydraException, ValueError) as error:  # ValueError: a number with thousands of digits
        raise UserError(_unreadable(override)) from error


def _unreadable(override: str) -> str:
    key, _, text = override.partition("=")
    quoted = f"; quote text: \"{key}='{text}'\"" if not set(text) & set("'\"") else ""
    return (
        f"{override}: the value {short(text)!r} cannot be read; close all brackets and quotes, write a list as "
        f"{key}=[A,B] and a table as '{key}={{a: 1, b: 2}}'{quoted}"
    )


def _hydra_tree(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from hpc_rl.config.hydra_files import composed

    known = groups()
    try:
        return composed(job, [_for_hydra(text, known) for text in overrides])
    except OverrideParseException as error:
        raise UserError(_unreadable(error.override.lstrip("+"))) from error
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise UserError(_first_sentence(job, error, overrides)) from error


def _split_overrides(job: str, overrides: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """Split overrides into those whose type is text, which are taken literally, and those that Hydra reads."""
    schema = KINDS[job].schema
    texts: dict[str, str | None] = {}
    rest: list[str] = []
    for override in overrides:
        key, equals, raw = override.partition("=")
        key = key.lstrip("+")
        if not equals or not key or key.startswith("-"):
            example = (
                f"put -- before the program: hpc-rl submit {job} -- {override}"
                if KINDS[job].takes_program
                else "write key=value, for example trainer.total_epochs=3"
            )
            raise UserError(f"{override!r} is not an option: {example}")
        if key == "site":
            raise UserError(f"{override}: choose a site profile with --site {raw or 'NAME'}")
        if _is_text(schema, key) and not raw.startswith("["):
            texts[key] = None if raw == "null" else _unquoted(raw)
        else:
            # A later override replaces earlier ones of the same key, and of all keys of a section.
            texts = {name: value for name, value in texts.items() if not f"{name}.".startswith(f"{key}.")}
            rest.append(override)
    return texts, rest


def _is_text(schema: type[BaseModel], key: str) -> bool:
    return str in leaf_types(find_annotation(schema, key))


def _unquoted(raw: str) -> str:
    return raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"" else raw


def _for_hydra(override: str, known: set[str]) -> str:
    """Return an override in the form `++key=value`, which sets keys that the job file does not name."""
    key = override.partition("=")[0].lstrip("+")
    return override if key in known else "++" + override.lstrip("+")


def _first_sentence(job: str, error: Exception, overrides: Sequence[str]) -> str:
    if group := re.match(r"Could not override '(\w+)'", str(error)):
        return (
            f"{group[1]}: {job} has no choice of {group[1]}; the defaults list in configs/{job}.yaml does not name it"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    mark = getattr(error, "problem_mark", None)
    if mark:  # errors of YAML have a line number
        return f"{mark.name}, line {mark.line + 1}: not valid YAML: {error.problem}"  # type: ignore[attr-defined]
    typed = f" (in: {' '.join(overrides)})" if overrides else ""
    options = getattr(error, "options", None)  # a file in a defaults list that does not exist
    return f"{lines[0]}{typed}" + (f"; choose one of {', '.join(options)}" if options else "")


def _only_missing(schema: type[BaseModel], error: ValidationError) -> list[str]:
    """Return the required keys that are missing; empty if there is any other problem."""
    found = error.errors()
    is_all = all(details["type"] == "missing" for details in found)
    return [_missing_key(schema, details["loc"]) for details in found] if is_all else []


def _missing_key(schema: type[BaseModel], loc: Sequence[int | str]) -> str:
    """Return a missing key by its dotted name; the first key of a section that needs any one of several."""
    key = ".".join(map(str, loc))
    section = find_annotation(schema, key)
    is_section = isinstance(section, type) and issubclass(section, BaseModel)
    return f"{key}.{next(iter(section.model_fields))}" if is_section else key


def _as_words(settings: Mapping[str, Any]) -> list[str]:
    """Return words of a command line that stand for settings."""
    nodes = ["--nodes", str(settings["trainer.nnodes"])] if "trainer.nnodes" in settings else []
    others = {key: "null" if value is None else value for key, value in settings.items() if key != "trainer.nnodes"}
    return [*nodes, *(f"{key}={value}" for key, value in others.items())]


def _example_command(job: str, tree: Mapping[str, Any], missing: Sequence[str], command: Sequence[str]) -> str:
    """Return a complete command: what was typed, and words that set the missing keys."""
    nodes = tree.get("trainer", {}).get("nnodes", 1)
    examples = dict(KINDS[job].examples)
    recipe = recipe_for(nodes) if {"model.path", "reward.function"} <= {*missing} else None
    if recipe is not None:
        examples |= {"model.path": f"recipe={recipe}", "reward.function": ""}
    added = " ".join(examples.get(key, f"{key}=VALUE") for key in missing).split()
    return shlex.join([*command, *added])


def _key_in(problem: str) -> str:
    """Return the dotted key with which a message begins."""
    found = re.match(r"[\w.-]+(?=:? )", problem)
    return found[0].rstrip(".") if found else ""


def _problem(schema: type[BaseModel], details: Any) -> str:
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        if isinstance(inside := details.get("input"), Mapping) and inside:  # a section: name what is in it
            return "\n".join(_unknown(schema, f"{key}.{name}") for name in flat(inside))
        return _unknown(schema, key)
    if details["type"] == "missing":
        return f"{_missing_key(schema, details['loc'])}: required, but not given"
    lines = problem_text(details).splitlines()
    return "\n".join(line if not key or line.startswith(f"{key}.") else f"{key}: {line}" for line in lines)


def _unknown(schema: type[BaseModel], key: str) -> str:
    """Return the message for a key that a kind of job does not have."""
    meanings = {name: meaning for name, _, _, meaning in documented_keys(schema)}
    sections = dict.fromkeys(name.rpartition(".")[0] for name in meanings if "." in name)
    return f"{key}: unknown key{nearest(key, [*meanings, *sections], meanings)}"


_EXPECTED = {
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_type": "expected a whole number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "list_type": "expected a list, such as [A,B]",
}
"""Type of a ValidationError's error -> what was expected. Other types have pydantic's text."""


def problem_text(details: Any) -> str:
    """Describe one of a ValidationError's errors in words, without its key."""
    message: str = _EXPECTED.get(details["type"]) or details["msg"].removeprefix("Value error, ")
    if details["type"] == "literal_error":
        message = re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), message)
    found = details.get("input")
    if details["type"] == "literal_error" and isinstance(found, str):
        choices = re.findall("'([^']*)'", details["ctx"]["expected"])
        return f"{message}, found {short(repr(found))}{nearest(found, choices)}"
    if details["type"] == "string_type" and isinstance(found, int | float):
        return f"{message}, found {found!r}: quote it"  # YAML reads 0123 and 1_000 as numbers
    return message if details["type"] == "value_error" else f"{message}, found {short(repr(found))}"
