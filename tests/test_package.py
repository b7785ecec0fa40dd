"""setup.cfg: what an installation contains."""

import configparser
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")


def test_every_package_is_installed() -> None:
    listed = set(CONFIG["options"]["packages"].split())
    there = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "hpc_rl").rglob("__init__.py")}
    assert {name for name in listed if not name.startswith("hpc_rl.shipped")} == there


def test_every_file_beside_the_code_is_installed() -> None:
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, found in CONFIG["options.package_data"].items()
        for pattern in found.split()
    ]
    files = [path for path in (ROOT / "hpc_rl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    packages = {init.parent for init in (ROOT / "hpc_rl").rglob("__init__.py")}
    data = [path for path in files if path.suffix != ".py" or path.parent not in packages]
    missing = [
        name for path in data if not any(fnmatch(name := str(path.relative_to(ROOT)), pattern) for pattern in patterns)
    ]
    assert data and not missing
