from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.system import search_path


def test_modules_start_without_the_working_folder() -> None:
    assert search_path.module_command("a.b", "c") == [sys.executable, "-P", "-m", "a.b", "c"]


def test_the_folders_of_the_parent_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, parents = tmp_path / "mine", tmp_path / "parents"
    for folder in (mine, parents):
        folder.mkdir()
    (mine / "json.py").write_text("raise SystemExit('json')")
    (mine / "sitecustomize.py").write_text("import os\nos._exit(9)")
    (mine / "in_mine.py").write_text("VALUE = 'own'")
    (parents / "in_parents.py").write_text("VALUE = 'beside'")
    monkeypatch.chdir(mine)
    monkeypatch.syspath_prepend(parents)
    code = "from hpc_rl.system.search_path import look_last; look_last(); import json, os, in_mine, in_parents\n"
    code += "print(in_mine.VALUE, in_parents.VALUE, 'HPC_RL_LOOK_LAST' in os.environ)"
    environ = {**os.environ, **search_path.look_last_variables()}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == "own beside False\n", done.stderr


def test_programs_of_the_user_start_as_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    ours = search_path.safe_variables()
    assert set(ours) == {"PYTHONSAFEPATH"} and ours["PYTHONSAFEPATH"]
    assert search_path.users_environment({"A": "1", **ours}) == {"A": "1"}
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the user's own wish
    assert search_path.safe_variables() == {"PYTHONSAFEPATH": "1"}
    assert search_path.users_environment({"PYTHONSAFEPATH": "1"}) == {"PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"PYTHONPATH": ":/a"}, {"PYTHONPATH": "/a"}),
        ({"LD_LIBRARY_PATH": "/a::/b:"}, {"LD_LIBRARY_PATH": "/a:/b"}),
        ({"PATH": ""}, {"PATH": ""}),
        ({"PATH": "/a:.", "OTHER": ":"}, {}),
    ],
)
def test_empty_entries(given: dict[str, str], left: dict[str, str]) -> None:
    assert search_path.without_empty_entries(given) == left
