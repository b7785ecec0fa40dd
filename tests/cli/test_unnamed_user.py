"""Commands of a user id that has no entry in the user database, as in a container or while sssd is down."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = ("unshare", "--user", "--map-user=54321", "--map-group=54321")
AS_NOBODY = (*NOBODY, sys.executable, "-c")


@pytest.mark.parametrize(
    "command",
    [
        ("site", "show"),
        ("runs",),
        ("status", "x"),
        ("config", "torchrun"),
        ("doctor", "--local"),
        ("submit", "torchrun", "--dry-run", "trainer.device=cpu", "--", "train.py"),
    ],
)
@pytest.mark.parametrize("has_home", [True, False])
def test_a_user_without_a_name_sees_no_traceback(tmp_path: Path, command: tuple[str, ...], has_home: bool) -> None:
    if subprocess.run([*NOBODY, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let users create user namespaces")
    (tmp_path / "train.py").touch()
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    environ = {**kept, **({"HOME": str(tmp_path)} if has_home else {})}
    words = [*NOBODY, sys.executable, "-m", "hpc_rl.cli", *command]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert "Traceback" not in done.stderr
    if not has_home:
        assert done.returncode == 2 and "HOME is not set: set HOME to your home folder" in done.stderr
    elif command[0] != "doctor":
        assert done.returncode == (2 if command[0] == "status" else 0), done.stderr


def test_libraries_find_a_name() -> None:
    if subprocess.run([*NOBODY, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let users create user namespaces")
    code = "import getpass; from hpc_rl.system.ownership import name_user; name_user(); print(getpass.getuser())"
    environ = {name: value for name, value in os.environ.items() if name not in ("USER", "LOGNAME")}
    shown = subprocess.run([*AS_NOBODY, code], env=environ, capture_output=True, text=True, timeout=600, check=True)
    assert shown.stdout == "uid54321\n"
