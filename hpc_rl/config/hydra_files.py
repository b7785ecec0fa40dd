"""The files below `configs/`, composed by Hydra.

Hydra merges tables key by key, and cannot merge a table with a list. A table that is a value (`VALUES`) has to replace
the value of another file instead, as lists do. So Hydra sees such a table as a list.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf

from hpc_rl.config.groups import check_own, choices, file_of, folders
from hpc_rl.config.tree import VALUES, compose_yaml, flat, put, read_yaml
from hpc_rl.errors import UserError
from hpc_rl.software.shipped import shipped

_TABLE = "a table"
"""First element of a list whose second element is a table."""
_read: list[Path] = []
"""Files that Hydra has read for the present configuration, in order."""


class _Files(ConfigSource):
    """The files of all folders with job files and groups."""

    @staticmethod
    def scheme() -> str:
        return "hpc-rl"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; put tables that are values into lists. Hydra reads no file that would never end."""
        file = _file(config_path)
        check_own(file)
        _read.append(file)
        try:
            compose_yaml(file)
            text = io.StringIO(read_yaml(file, named=True).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 text") from error
        text.name = str(file)  # Hydra's messages name it
        header = self._get_header_dict(text.getvalue())
        config: Any = OmegaConf.load(text)
        package = header["package"]
        section = config_path.rpartition("/")[0].replace("/", ".") if package is None else package
        prefix = f"{section}." if section not in ("", "_global_") else ""
        tables: Any = OmegaConf.to_container(config)
        for key, value in flat(tables, prefix).items() if isinstance(tables, dict) else ():
            if key in VALUES and isinstance(value, dict):
                OmegaConf.update(config, key.removeprefix(prefix), [_TABLE, value], merge=False)
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header=header)

    def is_config(self, config_path: str) -> bool:
        return _file(config_path).is_file()

    def is_group(self, config_path: str) -> bool:
        return any(os.path.isdir(folder / config_path) for folder in folders())  # noqa: PTH112 - a name may be too long

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        """Return the names in a group, which Hydra's messages list."""
        return choices(config_path)


def composed(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what a job file and the chosen files of groups set, as nested tables without the schema's defaults.

    A file in ./configs takes precedence over a shipped one of the same name.

    Args:
        overrides: in Hydra's grammar.

    Raises:
        UserError: a file may be of another user, is not text, or includes itself.
        HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError: as Hydra reports them.
    """
    _read.clear()
    try:
        with _hydra():
            tree: Any = OmegaConf.to_container(compose(job, overrides=list(overrides)), resolve=True)
    except RecursionError as error:
        own = ", ".join(str(path.relative_to(folders()[0])) for path in _read if path.is_relative_to(folders()[0]))
        raise UserError(
            f"the recipe includes itself: in configs/, one of {own} leads back to itself; correct its `defaults:`"
        ) from error
    for key, value in flat(tree).items():
        if key in VALUES and isinstance(value, list) and value[:1] == [_TABLE]:
            put(tree, key, value[1])
    return tree  # type: ignore[no-any-return]


def composed_files(job: str, chosen: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """Return the files that `composed` merges; a later one takes precedence.

    Args:
        chosen: the overrides that choose files of groups.

    Returns:
        each file, and the section into which its keys go: `model.`, or an empty text.
    """
    with _hydra() as loader:
        entries = loader.compute_defaults_list(job, list(chosen), RunMode.RUN).defaults
    files = [(_file(entry.config_path), f"{entry.package}." if entry.package else "") for entry in entries]
    return [(path, section) for path, section in files if path.is_file()]  # the others are Hydra's own


def _file(config_path: str) -> Path:
    return file_of("", config_path.removesuffix(".yaml"))


@contextmanager
def _hydra() -> Iterator[ConfigLoader]:
    """Start Hydra with the folders that have job files and groups."""
    with initialize_config_dir(config_dir=str(shipped("configs")), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        sources = loader.get_sources()
        main = next(index for index, source in enumerate(sources) if source.provider == "main")
        sources[main] = _Files("main", f"{_Files.scheme()}://configs")
        yield loader
