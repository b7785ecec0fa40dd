"""setup.cfg: what an installation contains."""

import configparser
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")


def _pairs(option: str) -> dict[str, str]:
    """Return the lines `key = value` of an option."""
    lines = (line.split("=") for line in CONFIG["options"][option].strip().splitlines())
    return {key.strip(): value.strip() for key, value in lines}


def test_every_package_is_installed() -> None:
    listed = set(CONFIG["options"]["packages"].split())
    there = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "hpc_rl").rglob("__init__.py")}
    assert {name for name in listed if not name.startswith("hpc_rl.shipped")} == there


def test_every_shipped_folder_is_installed() -> None:
    folders = {name: ROOT / path for name, path in _pairs("package_dir").items()}
    there: dict[str, set[str]] = {}
    for name, folder in folders.items():
        for found in folder.rglob("*"):
            if found.is_file():
                there.setdefault(".".join((name, *found.parent.relative_to(folder).parts)), set()).add(found.suffix)
    listed = set(CONFIG["options"]["packages"].split())
    assert {name for name in listed if name.startswith("hpc_rl.shipped")} == there.keys()
    patterns = {name: CONFIG["options.package_data"].get(name) for name in there}
    assert patterns == {name: ", ".join(f"*{suffix}" for suffix in sorted(found)) for name, found in there.items()}


def test_every_file_beside_the_code_is_installed() -> None:
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, found in CONFIG["options.package_data"].items()
        for pattern in found.replace(",", " ").split()
    ]
    files = [path for path in (ROOT / "hpc_rl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    packages = {init.parent for init in (ROOT / "hpc_rl").rglob("__init__.py")}
    data = [path for path in files if path.suffix != ".py" or path.parent not in packages]
    missing = [
        name for path in data if not any(fnmatch(name := str(path.relative_to(ROOT)), pattern) for pattern in patterns)
    ]
    assert data and not missing


def test_demos_need_no_test_package() -> None:
    program = "import sys; sys.modules['pytest'] = None; import tests.demo, tests.demo_pipeline, tests.demo_tools"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
