"""From recipe and overrides to a validated configuration: Hydra composes, the schema decides.

    compose("sft", ["model=qwen2.5-0.5b", "optim.lr=1e-4"]) -> SftConfig

All errors are reported at once, each with its dotted key.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpc_rl.config.job import JobConfig
from hpc_rl.config.keys import documented_keys, find_annotation, leaf_types, nearest, put
from hpc_rl.config.kinds import KINDS
from hpc_rl.errors import UserError
from hpc_rl.host.shipped import shipped

FillIn = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From nested tables without the schema's defaults to dotted key -> value of what they leave open."""


def compose(
    job: str,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    site: Mapping[str, Any] | None = None,
    fill_in: FillIn | None = None,
) -> JobConfig:
    """Compose the configuration of one job: schema defaults < profile < recipe < overrides < settings.

    The recipe is `configs/<job>.yaml`: the one in the working folder if there is one, else the shipped one.

    Args:
        job: name of a row of KINDS.
        overrides: `key=value` or `group=name`, as typed on the command line. If the schema asks for text, the value is
            taken as it is; otherwise Hydra's grammar reads it (numbers, lists, tables).
        settings: dotted key -> value that needs no parsing (command-line flags).
        site: dotted key -> value of the cluster's profile (`Profile.values`); keys that this kind of job does not have
            are left out.
        fill_in: decides what depends on the machine, once everything else is known.

    Raises:
        UserError: unknown keys, values that do not fit, or an override that cannot be read.
    """
    return compose_each(job, overrides, [()], settings, site, fill_in)[0]


def compose_each(
    job: str,
    overrides: Sequence[str],
    points: Sequence[Sequence[str]],
    settings: Mapping[str, Any] | None = None,
    site: Mapping[str, Any] | None = None,
    fill_in: FillIn | None = None,
) -> list[JobConfig]:
    """Compose one configuration for each point of a sweep. Hydra runs once, unless a point names a group.

    Args:
        overrides: those of all points.
        points: each point's own overrides, which come after those of all.

    Raises:
        UserError: as `compose`.
    """
    schema, groups = KINDS[job].schema, _groups()
    found, base = [], None
    for own in points:
        if any(_needs_hydra(word, groups) for word in own):
            tree = _tree(job, [*overrides, *own], site)
        else:
            base = base or _tree(job, overrides, site)
            tree = _with_values(schema, copy.deepcopy(base), own)
        for key, value in (settings or {}).items():
            put(tree, key, value)
        for key, value in (fill_in(tree) if fill_in else {}).items():
            put(tree, key, value)
        found.append(validate(job, tree))
    return found


def compose_partly(
    job: str, overrides: Sequence[str] = (), site: Mapping[str, Any] | None = None
) -> tuple[JobConfig, list[str]]:
    """Like `compose`, for looking at: required keys that were not given are `???`, and are returned by name."""
    tree = _tree(job, overrides, site)
    try:
        KINDS[job].schema.model_validate(tree)
    except ValidationError as error:
        missing = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "missing"]
    else:
        missing = []
    for key in missing:
        put(tree, key, "???")
    return validate(job, tree), missing


def load_config(job: str, path: Path) -> JobConfig:
    """Read a configuration that `dump` wrote.

    Raises:
        UserError: the file is missing, is not YAML, or does not fit the schema.
    """
    return validate(job, load_tree(path))


def load_tree(path: Path) -> dict[str, Any]:
    """The nested tables of a YAML file, unchecked.

    Raises:
        UserError: the file is missing, or is not a table in YAML.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise UserError(f"no configuration at {path}") from error
    except YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a table of options")
    return tree  # type: ignore[return-value]


def validate(job: str, tree: Any) -> JobConfig:
    """Check a nested dict against the job's schema; every problem is named in one error."""
    schema = KINDS[job].schema
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        problems = [_problem(schema, dict(details)) for details in error.errors()]
        raise UserError("\n".join(problems)) from None


def dump(config: BaseModel | Mapping[str, Any]) -> str:
    """YAML of a configuration, or of a part of one; that of a whole one is readable by `load_config`."""
    import yaml

    values = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)

    # ASCII only: PyYAML writes some Unicode line breaks as they are and reads them back as spaces.
    text: str = yaml.safe_dump(values, sort_keys=False, width=120)
    return text


def _tree(job: str, overrides: Sequence[str], site: Mapping[str, Any] | None) -> dict[str, Any]:
    """The configuration as nested tables, without the schema's defaults."""
    schema = KINDS[job].schema
    texts, rest = _split_overrides(schema, overrides)
    tree = _hydra_tree(job, rest)
    for name, section in schema.model_fields.items():
        # A section that nobody mentioned is there all the same, so that its required keys are named one by one.
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
        tree = _merged(below, tree)
    for key, text in texts.items():
        put(tree, key, text)
    return tree


def _with_values(schema: type[BaseModel], tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tree with plain values put in, read as Hydra reads them but without composing again."""
    texts, rest = _split_overrides(schema, overrides)
    for word in rest:
        put(tree, word.partition("=")[0].lstrip("+"), _parsed(word))
    for key, text in texts.items():
        put(tree, key, text)
    return tree


def _needs_hydra(override: str, groups: set[str]) -> bool:
    """Whether an override chooses a file of a group, or refers to another key."""
    return override.partition("=")[0].lstrip("+") in groups or "${" in override or override.startswith("~")


def _parsed(override: str) -> Any:
    """The value of one `key=value` in Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        (found,) = OverridesParser.create().parse_overrides(["++" + override.lstrip("+")])
    except HydraException as error:
        raise UserError(_first_sentence(error, [override])) from error
    return found.value()


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both tables, key by key; what stands in `above` wins, and lists are not joined."""
    tables = {key for key in below.keys() & above.keys() if isinstance(below[key], dict)}
    both = {key: _merged(below[key], above[key]) for key in tables if isinstance(above[key], dict)}
    return {**below, **above, **both}


def _hydra_tree(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    folders = _folders()
    recipes = next(folder for folder in [*folders, shipped("configs")] if (folder / f"{job}.yaml").is_file())
    groups = _groups()
    search = ",".join(f"'file://{folder}'" for folder in folders)
    arguments = [f"hydra.searchpath=[{search}]", *(_for_hydra(text, groups) for text in overrides)]
    try:
        with initialize_config_dir(config_dir=str(recipes), version_base="1.3"):
            tree = OmegaConf.to_container(hydra_compose(job, overrides=arguments), resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:  # ValueError: a group set to null
        raise UserError(_first_sentence(error, overrides)) from error
    assert isinstance(tree, dict)
    return tree  # type: ignore[return-value]


def _folders() -> list[Path]:
    """Folders with recipes and groups: the user's own first."""
    own = Path.cwd() / "configs"
    return [own, shipped("configs")] if own.is_dir() and own != shipped("configs") else [shipped("configs")]


def _groups() -> set[str]:
    """Names of the groups: recipe, model, algorithm, and any of the user's own."""
    return {path.name for folder in _folders() for path in folder.iterdir() if path.is_dir()}


def _split_overrides(schema: type[BaseModel], overrides: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """Values that the schema wants as text, and the overrides that Hydra reads."""
    texts: dict[str, str | None] = {}
    rest: list[str] = []
    for override in overrides:
        key, equals, raw = override.partition("=")
        key = key.lstrip("+")
        if not equals or not key or key.startswith("-"):
            raise UserError(f"{override!r} is no option: write key=value, for example trainer.total_epochs=3")
        if key == "site":
            raise UserError(f"{override}: a site profile is an option, --site {raw or 'NAME'}")
        if _wants_text(schema, key) and not raw.startswith("["):
            texts[key] = None if raw == "null" else _unquoted(raw)
        else:
            # The last word on a key counts, a word on the whole section too.
            texts = {name: value for name, value in texts.items() if not f"{name}.".startswith(f"{key}.")}
            rest.append(override)
    return texts, rest


def _wants_text(schema: type[BaseModel], key: str) -> bool:
    """Whether the value of a dotted key is a string (alone, or one of the types it may have)."""
    return str in leaf_types(find_annotation(schema, key))


def _unquoted(raw: str) -> str:
    return raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"" else raw


def _for_hydra(override: str, groups: set[str]) -> str:
    """`++key=value` sets a key whether or not the recipe names it; the schema says later whether it exists."""
    key = override.partition("=")[0].lstrip("+")
    return override if key in groups else "++" + override.lstrip("+")


def _first_sentence(error: Exception, overrides: Sequence[str]) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    asked = f" (in: {' '.join(overrides)})" if overrides else ""
    mark = getattr(error, "problem_mark", None)  # YAML's errors know their place
    place = f"{mark.name}, line {mark.line + 1}: {error.problem}" if mark else f"{lines[0]}{asked}"  # type: ignore[attr-defined]
    return place


def _problem(schema: type[BaseModel], details: Any) -> str:
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        known = [name for name, *_ in documented_keys(schema)]
        sections = dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name)
        return f"{key}: unknown key{nearest(key, [*known, *sections])}"
    if details["type"] == "missing":
        return f"{key}: required, not given (write {key}=...)"
    message = problem_text(details)
    return f"{key}: {message}" if key else message


def problem_text(details: Any) -> str:
    """One of a ValidationError's errors in words, without its key."""
    message: str = details["msg"].removeprefix("Value error, ")
    found = details.get("input")
    if details["type"] == "string_type" and isinstance(found, int | float):
        return f"{message}, found {found!r}: quote it"  # YAML makes numbers of 0123 and 1_000
    return message if details["type"] == "value_error" else f"{message}, found {found!r}"
