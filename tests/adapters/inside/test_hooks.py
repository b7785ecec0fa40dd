import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.adapters.inside import on_path
from hpc_rl.adapters.inside.hooks import job_variables

REPOSITORY = Path(__file__).parents[3]


def run(folder: Path, code: str, *more: str) -> str:
    path = os.pathsep.join([str(Path(on_path.__path__[0])), str(REPOSITORY), *more])
    environ = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stderr, done.stderr
    return done.stdout


def test_the_users_own_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine', __name__)\n")
    code = "import sys; m = sys.modules; print('on_path' in str(sys.path), 'torch' in m, m['sitecustomize'].__file__)"
    assert run(tmp_path, code, str(tmp_path)) == f"mine sitecustomize\nFalse False {tmp_path}/sitecustomize.py\n"


def test_a_hook_runs_after_the_module_and_once(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/__init__.py").write_text("")
    (tmp_path / "lib/core.py").write_text("value = 1\n")
    (tmp_path / "hook.py").write_text("def attach(module):\n    print(module.value)\n    module.value = 2\n")
    code = (
        "from hpc_rl.adapters.inside import hooks; import sys\n"
        "sys.meta_path.insert(0, hooks.HookFinder({'lib.core': 'hook'}))\n"
        "import lib; print('not yet'); import lib.core; import importlib.util; print(lib.core.value)\n"
        "print(importlib.util.find_spec('lib.core').name, lib.core.__loader__.path.endswith('core.py'))\n"
    )
    assert run(tmp_path, code, str(tmp_path)) == "not yet\n1\n2\nlib.core True\n"


def test_a_program_without_hpc_rl_goes_on(tmp_path: Path) -> None:
    path = str(Path(on_path.__path__[0]))
    environ = {"PYTHONPATH": path, "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-c", "import sitecustomize; print('goes on')"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "goes on\n" and "neither asked to save nor resumed" in done.stderr


def test_a_library_that_does_not_fit_is_imported_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text("value = 1\n")
    (tmp_path / "hook.py").write_text("def attach(module):\n    module.absent\n")
    code = (
        "import contextlib, io, sys\n"
        "from hpc_rl.adapters.inside import hooks\n"
        "sys.meta_path.insert(0, hooks.HookFinder({'core': 'hook'}))\n"
        "with contextlib.redirect_stderr(io.StringIO()) as said:\n    import core\n"
        "print(core.value, 'does not fit core' in said.getvalue())\n"
    )
    assert run(tmp_path, code, str(tmp_path)) == "1 True\n"


def test_another_job_that_the_program_submits_has_no_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print([type(f).__name__ for f in sys.meta_path].count('HookFinder'))"
    for name, value in job_variables({"SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert run(tmp_path, code) == "1\n"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert run(tmp_path, code) == "0\n"
