"""The command that adds an extra, for every way to install the project."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.software.installation import _requirement, install_command

CHECKOUT = Path(__file__).parents[2]


def test_this_checkout_is_installed_again_with_the_extra() -> None:
    assert install_command("train") == f"pip install -e '{CHECKOUT}[train]'"
    assert install_command("rl", "/opt/my env/python") == f"'/opt/my env/python' -m pip install -e '{CHECKOUT}[rl]'"


def test_pip_accepts_the_command() -> None:
    command = f"{install_command('train', sys.executable)} --dry-run --no-deps --no-index --no-build-isolation"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "Would install hpc-rl" in done.stdout or "already satisfied" in done.stdout


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"dir_info": {"editable": True}}, "-e '{path}[train]'"),
        ({"dir_info": {}}, "'{path}[train]'"),
        ({"archive_info": {}}, "'{path}[train]'"),
    ],
)
def test_a_file_or_folder_that_pip_has_recorded(info: dict[str, object], expected: str, tmp_path: Path) -> None:
    source = tmp_path / "a folder"
    source.mkdir()
    found = _requirement(json.dumps({"url": source.as_uri(), **info}), "train", Path("/nowhere"))
    assert found == expected.replace("{path}", str(source))


def test_a_commit_that_pip_has_recorded() -> None:
    info = {"url": "https://git.example.org/group/hpc-rl", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    expected = "'hpc-rl[rl] @ git+https://git.example.org/group/hpc-rl@abc'"
    assert _requirement(json.dumps(info), "rl", Path("/nowhere")) == expected


def test_without_a_source_that_exists_the_command_names_a_checkout(tmp_path: Path) -> None:
    gone = json.dumps({"url": (tmp_path / "gone.whl").as_uri(), "archive_info": {}})
    for text in ("", gone):
        assert _requirement(text, "train", tmp_path).startswith("'/path/to/hpc-rl[train]', where /path/to/hpc-rl is")
    (tmp_path / "setup.cfg").write_text("")
    assert _requirement(gone, "train", tmp_path) == f"-e '{tmp_path}[train]'"
