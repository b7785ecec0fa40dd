import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpc_rl.adapters.inside.hooks import ENV_HOOK, HOOKS, hooked
from hpc_rl.adapters.table import ADAPTERS
from tests.adapters.inside.hooked import hooked_environ


def run(folder: Path, code: str, *more: str, hook: str = "trainer") -> str:
    environ = hooked_environ(hook, *more)
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
        "from hpc_rl.adapters import inside; from hpc_rl.adapters.inside import hooks; import sys\n"
        "inside.__path__.append('.'); hooks.HOOKS['hook'] = ['lib.core']\n"
        "sys.meta_path.insert(0, hooks.HookFinder('hook'))\n"
        "import lib; print('not yet'); import lib.core; import importlib.util; print(lib.core.value)\n"
        "print(importlib.util.find_spec('lib.core').name, lib.core.__loader__.path.endswith('core.py'))\n"
    )
    assert run(tmp_path, code, str(tmp_path)) == "not yet\n1\n2\nlib.core True\n"


def test_a_program_without_hpc_rl_goes_on(tmp_path: Path) -> None:
    environ = hooked({"PATH": os.environ["PATH"]}, "trainer")
    command = [sys.executable, "-S", "-c", "import sitecustomize; print('goes on')"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "goes on\n" and "neither asked to save nor resumed" in done.stderr


def test_a_library_that_does_not_fit_is_imported_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text("value = 1\n")
    (tmp_path / "hook.py").write_text("def attach(module):\n    module.absent\n")
    code = (
        "import contextlib, io, sys\n"
        "from hpc_rl.adapters import inside; from hpc_rl.adapters.inside import hooks\n"
        "inside.__path__.append('.'); hooks.HOOKS['hook'] = ['core']\n"
        "sys.meta_path.insert(0, hooks.HookFinder('hook'))\n"
        "with contextlib.redirect_stderr(io.StringIO()) as said:\n    import core\n"
        "print(core.value, 'does not fit core' in said.getvalue())\n"
    )
    assert run(tmp_path, code, str(tmp_path)) == "1 True\n"


def test_another_job_that_the_program_submits_has_no_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print([type(f).__name__ for f in sys.meta_path].count('HookFinder'))"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    environ = hooked_environ("trainer")
    assert run(tmp_path, code) == "1\n"
    for name in (ENV_HOOK, "PYTHONPATH"):
        monkeypatch.setenv(name, environ[name])
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"


def test_a_library_that_the_program_only_uses_has_no_hook(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    for name in ("__init__", "trainer"):
        (tmp_path / f"transformers/{name}.py").touch()
    code = "import transformers.trainer; print('imported')"
    assert run(tmp_path, code, str(tmp_path), hook="lightning") == "imported\n"
    with pytest.raises(AssertionError, match=r"the adapter does not fit transformers\.trainer"):
        run(tmp_path, code, str(tmp_path), hook="trainer")


def test_each_adapter_has_a_row() -> None:
    assert {row.hook for row in ADAPTERS.values()} - {""} == HOOKS.keys()
    assert all(find_spec(f"hpc_rl.adapters.inside.{name}") for name in HOOKS)
