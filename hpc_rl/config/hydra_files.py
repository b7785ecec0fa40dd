"""The files below `configs/`, composed by Hydra.

Hydra merges tables key by key, and cannot merge a table with a list. A table that is a value (`VALUES`) has to replace
the value of another file instead, as lists do. So Hydra sees such a table as a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from hpc_rl.config.groups import check_own, folders
from hpc_rl.config.tree import VALUES, compose_yaml, flat, put
from hpc_rl.host.shipped import shipped

_TABLE = "a table"
"""First element of a list whose second element is a table."""


class _Files(FileConfigSource):
    """A folder with job files and groups."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; put tables that are values into lists. Hydra reads no file that would never end."""
        file = Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml")
        check_own(file)
        if file.exists():
            compose_yaml(file)
        found = super().load_config(config_path)
        package = found.header["package"]
        section = config_path.rpartition("/")[0].replace("/", ".") if package is None else package
        prefix = f"{section}." if section not in ("", "_global_") else ""
        tables: Any = OmegaConf.to_container(found.config)
        for key, value in flat(tables, prefix).items() if isinstance(tables, dict) else ():
            if key in VALUES and isinstance(value, dict):
                OmegaConf.update(found.config, key.removeprefix(prefix), [_TABLE, value], merge=False)
        return found


def composed(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what a job file and the chosen files of groups set, as nested tables without the schema's defaults.

    A file in ./configs takes precedence over a shipped one of the same name.

    Args:
        overrides: in Hydra's grammar.

    Raises:
        HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError: as Hydra reports them.
        RecursionError: a file includes itself.
    """
    with initialize_config_dir(config_dir=str(shipped("configs")), version_base="1.3"):
        sources = GlobalHydra.instance().config_loader().get_sources()
        main = next(index for index, source in enumerate(sources) if source.provider == "main")
        sources[main : main + 1] = [_Files("main", str(folder)) for folder in folders()]
        tree: Any = OmegaConf.to_container(compose(job, overrides=list(overrides)), resolve=True)
    for key, value in flat(tree).items():
        if key in VALUES and isinstance(value, list) and value[:1] == [_TABLE]:
            put(tree, key, value[1])
    return tree  # type: ignore[no-any-return]
