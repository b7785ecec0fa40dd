"""From recipe and overrides to a validated configuration: Hydra composes, the schema decides.

    compose("sft", ["model=qwen2.5-0.5b", "optim.lr=1e-4"]) -> SftConfig

All errors are reported at once, each with its dotted key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from hpc_rl.config.job import JobConfig
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.sft import SftConfig
from hpc_rl.errors import UserError
from hpc_rl.host.shipped import shipped

SCHEMAS: dict[str, type[JobConfig]] = {
    "sft": SftConfig,
    "ppo": PpoConfig,
    "torchrun": JobConfig,
    "ray": RayJobConfig,
    "doctor": RayJobConfig,
}


def compose(
    job: str,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    site: Mapping[str, Any] | None = None,
) -> JobConfig:
    """The configuration of one job kind: schema defaults < profile < recipe < overrides < settings.

    The recipe is `configs/<job>.yaml`, in the working folder if there is one, else the shipped one.

    Args:
        overrides: `key=value` or `group=name`, as typed on the command line. Where the schema wants text, the value is
            taken as it stands; elsewhere Hydra's grammar reads it (numbers, lists, tables).
        settings: dotted key -> value that needs no parsing (command-line flags).
        site: dotted key -> value of the cluster's profile (`Profile.values`); keys that this kind of job does not have
            are left out.

    Raises:
        UserError: unknown keys, values that do not fit, or an override that cannot be read.
    """
    return validate(job, _tree(job, overrides, settings or {}, site))


def compose_partly(
    job: str, overrides: Sequence[str] = (), site: Mapping[str, Any] | None = None
) -> tuple[JobConfig, list[str]]:
    """Like `compose`, for looking at: required keys that were not given stand as `???` and are returned by name."""
    tree = _tree(job, overrides, {}, site)
    try:
        SCHEMAS[job].model_validate(tree)
    except ValidationError as error:
        missing = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "missing"]
    else:
        missing = []
    for key in missing:
        put(tree, key, "???")
    return validate(job, tree), missing


def load_config(job: str, path: Path) -> JobConfig:
    """A configuration that `dump` wrote.

    Raises:
        UserError: the file is missing, no YAML, or does not fit the schema.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise UserError(f"no configuration at {path}") from error
    except YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    return validate(job, tree)


def validate(job: str, tree: Any) -> JobConfig:
    """Check a nested dict against the job's schema; every problem is named in one error."""
    schema = SCHEMAS[job]
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        problems = [_problem(schema, dict(details)) for details in error.errors()]
        raise UserError("\n".join(problems)) from None


def dump(config: BaseModel) -> str:
    """YAML of every key, readable by `load_config`."""
    import yaml

    # ASCII only: PyYAML writes some Unicode line breaks as they are and reads them back as spaces.
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)
    return text


def documented_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, meaning) of every option, in the schema's order."""
    for name, field in schema.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from documented_keys(annotation, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _yaml_value(field.default)
        yield f"{prefix}{name}", _type_name(annotation), default, " ".join((field.description or "").split())


def _tree(
    job: str, overrides: Sequence[str], settings: Mapping[str, Any], site: Mapping[str, Any] | None
) -> dict[str, Any]:
    schema = SCHEMAS[job]
    texts, rest = _split_overrides(schema, overrides)
    tree = _hydra_tree(job, rest)
    for name, field in schema.model_fields.items():
        # A section that nobody mentioned is there all the same, so that its required keys are named one by one.
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and tree.get(name) is None:
            tree[name] = {}
    if site:
        below: dict[str, Any] = {}
        for key, value in site.items():
            if find_annotation(schema, key):
                put(below, key, value)
        tree = _merged(below, tree)
    for key, value in {**texts, **settings}.items():
        put(tree, key, value)
    return tree


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

    own = Path.cwd() / "configs"
    folders = [own, shipped("configs")] if own.is_dir() and own != shipped("configs") else [shipped("configs")]
    recipes = next(folder for folder in [*folders, shipped("configs")] if (folder / f"{job}.yaml").is_file())
    groups = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    search = ",".join(f"'file://{folder}'" for folder in folders)
    arguments = [f"hydra.searchpath=[{search}]", *(_for_hydra(text, groups) for text in overrides)]
    try:
        with initialize_config_dir(config_dir=str(recipes), version_base="1.3"):
            tree = OmegaConf.to_container(hydra_compose(job, overrides=arguments), resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:  # ValueError: a group set to null
        raise UserError(_first_sentence(error, overrides)) from error
    assert isinstance(tree, dict)
    return tree  # type: ignore[return-value]


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
    return str in _leaf_types(find_annotation(schema, key))


def find_annotation(schema: type[BaseModel], key: str) -> Any:
    """The type of a dotted key, or None where the schema has no such key."""
    annotation: Any = schema
    for part in key.split("."):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(part)
            if field is None:
                return None
            annotation = field.annotation
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            return None
    return annotation


def _leaf_types(annotation: Any) -> set[Any]:
    """The plain types inside unions, lists and annotations; a Literal counts as the types of its values."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) in (dict, tuple):
        return set()
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return set().union(*map(_leaf_types, parts)) if parts else {annotation}


def _unquoted(raw: str) -> str:
    return raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"" else raw


def _for_hydra(override: str, groups: set[str]) -> str:
    """`++key=value` sets a key whether or not the recipe names it; the schema says later whether it exists."""
    key = override.partition("=")[0].lstrip("+")
    return override if key in groups else "++" + override.lstrip("+")


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables."""
    *parents, last = key.split(".")
    for parent in parents:
        child = tree.get(parent)
        if not isinstance(child, dict):
            child = tree[parent] = {}
        tree = child
    tree[last] = value


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


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that was probably meant: by its whole name, or by its last part."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        by_leaf = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [by_leaf[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], by_leaf, n=1)]
    return f"; did you mean {close[0]}?" if close else ""


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(map(_type_name, get_args(annotation)))}]"
    if origin is not None:
        return " | ".join(map(_type_name, get_args(annotation)))
    return "null" if annotation is type(None) else annotation.__name__


def _yaml_value(value: Any) -> str:
    import yaml

    value = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("...\n").strip()
