"""Site profiles: settings of a cluster, in YAML files with the keys of a job's configuration.

Profiles are layered. Later layers take precedence, key by key:

    environment   variables of sbatch, such as SBATCH_ACCOUNT and SLURM_CLUSTERS
    system-wide   /etc/hpc-rl/site.yaml, or the profile that $HPC_RL_SITE names
    user          ~/.config/hpc-rl/site.yaml
    project       ./site.yaml
    --site        a file, or the name of a shipped profile
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpc_rl.config.compose import problem_text
from hpc_rl.config.groups import check_own
from hpc_rl.config.groups import folders as config_folders
from hpc_rl.config.job import JobConfig
from hpc_rl.config.keys import documented_keys, find_annotation, nearest
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.lend import LendSection
from hpc_rl.config.ray import RayConfig
from hpc_rl.config.references import expanded_path
from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.config.tree import compose_yaml, put
from hpc_rl.errors import UserError
from hpc_rl.software.shipped import shipped
from hpc_rl.system.ownership import refuse_foreign, trust_group

ENV_SITE = "HPC_RL_SITE"
SYSTEM = Path("/etc/hpc-rl/site.yaml")
USER = Path("~/.config/hpc-rl/site.yaml")
PROJECT = Path("site.yaml")

VARIABLES = {
    "SLURM_CLUSTERS": "slurm.sbatch.clusters",
    "SBATCH_CLUSTERS": "slurm.sbatch.clusters",
    "SBATCH_ACCOUNT": "slurm.account",
    "SBATCH_CONSTRAINT": "slurm.constraint",
    "SBATCH_PARTITION": "slurm.partition",
    "SBATCH_QOS": "slurm.qos",
    "SBATCH_TIMELIMIT": "slurm.time",
}
"""Variables of sbatch that are part of the configuration -> key. The checks before submission need these values, and
scripts state them. Of two for the same key, the last one counts."""
_SECTIONS: dict[str, type[BaseModel]] = {
    name: section
    for name, field in JobConfig.model_fields.items()
    if isinstance(section := field.annotation, type) and issubclass(section, BaseModel)
} | {"trainer": TrainingConfig, "ray": RayConfig, "lend": LendSection}
"""Section of a profile -> its schema."""
_PICKED = {
    "trainer": ("n_gpus_per_node", "device", "logger", "project_name", "wandb_mode", "wandb_proxy"),
    "ray": ("dashboard", "object_store_gb", "first_port"),
    "lend": ("auto_most", "auto_at_a_time", "auto_look_s"),
}
"""Sections of which a profile may set only these keys. The other keys belong to a job."""


@dataclass(frozen=True)
class Origin:
    """The line that sets a value, or the variable, such as `$SBATCH_QOS`, which has no line."""

    file: Path
    line: int | None

    def __str__(self) -> str:
        return short(self.file) if self.line is None else f"{short(self.file)}, line {self.line}"


@dataclass(frozen=True)
class Layer:
    """One location of a profile."""

    name: str
    """system-wide, user, project or --site."""
    file: Path
    found: bool


@dataclass(frozen=True)
class Profile:
    """The merged layers."""

    values: Mapping[str, Any]
    """Dotted key -> value."""
    origins: Mapping[str, Origin]
    """Dotted key -> the line that sets it."""
    layers: tuple[Layer, ...]


def load_profile(site: str | None = None, environ: Mapping[str, str] = os.environ) -> Profile:
    """Load and merge the profiles that apply in this folder.

    Args:
        site: file or name of a profile, from `--site`.

    Raises:
        UserError: the profile does not exist, or has unknown keys or invalid values. All are listed, with their lines.
    """
    layers = tuple(_layers(site, environ))
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    problems: list[tuple[Origin, str]] = []
    for variable, key in VARIABLES.items():
        if value := environ.get(variable):
            values[key], origins[key] = value, Origin(Path(f"${variable}"), None)
    for layer in layers:
        if not layer.found:
            continue
        if layer.name == "project":
            refuse_foreign(f"site profile ./{layer.file}", layer.file)
        for key, value, line in read(layer.file):
            origin = Origin(layer.file, line)
            if problem := _unknown(key):
                problems.append((origin, f"{key}: {problem}"))
                continue
            for old in [old for old in values if _is_above(old, key) or _is_above(key, old)]:
                del values[old], origins[old]
            values[key], origins[key] = value, origin
        if isinstance(group := values.get("slurm.group"), str):
            trust_group(group)
    problems += _wrong_values(values, origins)
    if problems:
        in_order = sorted(problems, key=lambda found: (str(found[0].file), found[0].line or 0))
        raise UserError("\n".join(f"{origin}: {problem}" for origin, problem in in_order))
    return Profile(values, origins, layers)


def find(site: str) -> Path:
    """Return the file of a profile, given its path or name. A name is first looked up in ./configs/site.

    Raises:
        UserError: there is no such file.
    """
    try:
        path = Path(expanded_path(site))
    except ValueError as error:
        raise UserError(f"site profile: {error}") from error
    if "/" in site or path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"site profile {site}: there is no such file")
        return path
    for folder in config_folders():
        if (named := folder / "site" / f"{site}.yaml").is_file():
            check_own(named)
            return named
    raise UserError(f"site profile {site} does not exist; the shipped profiles are {', '.join(shipped_names())}")


def short(path: Path) -> str:
    """Return a path with the home folder written as `~`."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def shipped_names() -> list[str]:
    """Return the names of the shipped profiles."""
    return sorted(path.stem for path in (shipped("configs") / "site").glob("*.yaml"))


def read(path: Path) -> list[tuple[str, Any, int]]:
    """Return (dotted key, value, line) for each entry of a profile, in the order of the file.

    Raises:
        UserError: the file cannot be read, is not YAML, or sets a key twice.
    """
    import yaml

    try:
        loader, document = compose_yaml(path)
        if document is None:
            return []
        if not isinstance(document, yaml.MappingNode):
            raise UserError(f"{path}: a profile has sections with keys, such as `slurm:` and below it `partition: gpu`")
        return list(_flat(document, "", path, loader))
    except OSError as error:
        raise UserError(f"site profile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"site profile {path} is not a text file: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}, line {line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error


def _layers(site: str | None, environ: Mapping[str, str]) -> Iterator[Layer]:
    if named := environ.get(ENV_SITE):
        try:
            yield Layer("system-wide", find(named), True)
        except UserError as error:
            raise UserError(f"${ENV_SITE}: {error}") from error
    else:
        yield Layer("system-wide", SYSTEM, SYSTEM.is_file())
    for name, file in (("user", USER.expanduser()), ("project", PROJECT)):
        yield Layer(name, file, file.is_file())
    if site is not None:
        yield Layer("--site", find(site), True)


def _flat(mapping: Any, prefix: str, path: Path, loader: Any) -> Iterator[tuple[str, Any, int]]:
    import yaml

    lines: dict[str, int] = {}
    for key_node, value_node in mapping.value:
        key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if key in lines:
            raise UserError(f"{path}, line {line}: {key} is already set in line {lines[key]}")
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _flat(value_node, f"{key}.", path, loader)
        else:
            try:
                value = loader.construct_object(value_node, deep=True)
            except ValueError as error:  # an impossible date
                raise UserError(f"{path}, line {line}: {key}: {error}; put text in quotes") from error
            yield key, value, line


def _unknown(key: str) -> str | None:
    """Return what is wrong with a key, or None."""
    section, _, rest = key.partition(".")
    model = _SECTIONS.get(section)
    picked = _PICKED.get(section)
    if model is not None and not rest:
        return f"a section, which needs keys below it, such as {section}.{next(iter(picked or model.model_fields))}"
    if model is not None and find_annotation(model, rest) and (picked is None or rest in picked):
        return None
    if any(find_annotation(kind.schema, key) for kind in KINDS.values()):
        return "belongs to a job, not to a cluster: set it in configs/JOB.yaml or on the command line"
    return f"unknown key{nearest(key, [*profile_keys(), *_SECTIONS])}"


def profile_keys() -> Iterator[str]:
    """Yield every key that a profile may set."""
    for section, model in _SECTIONS.items():
        for name, *_ in documented_keys(model):
            if section not in _PICKED or name in _PICKED[section]:
                yield f"{section}.{name}"


def _wrong_values(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[tuple[Origin, str]]:
    """Return the invalid values. Combinations of keys are checked with the whole configuration later."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        put(tree, key, value)
    problems = []
    for section, found in tree.items():
        try:
            _SECTIONS[section].model_validate(found)
        except ValidationError as error:
            for details in error.errors():
                if details["loc"]:
                    key = ".".join(map(str, (section, *details["loc"])))
                    problems.append((_origin_of(key, origins), f"{key}: {problem_text(dict(details))}"))
    return problems


def _origin_of(key: str, origins: Mapping[str, Origin]) -> Origin:
    """Return the line that sets a key, or the nearest key above or below it."""
    above = key
    while above not in origins and "." in above:
        below = next((known for known in origins if _is_above(above, known)), None)
        if below is not None:
            return origins[below]
        above = above.rpartition(".")[0]
    return origins[above]


def _is_above(key: str, other: str) -> bool:
    return other.startswith(f"{key}.")
