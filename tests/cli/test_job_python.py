"""Commands on a login node whose Python has no torch: they continue in slurm.python."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import make_tiny_model
from tests.marks import long

HEAVY = ("torch", "transformers", "safetensors", "tokenizers", "datasets", "pyarrow", "ray", "vllm")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and the packages of a light login node."""
    folder = tmp_path_factory.mktemp("login")
    make_tiny_model(folder / "model")
    (folder / "data.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "?"}, ANSWER]}) + "\n")
    (folder / "light").mkdir()
    for package in (path for packages in site.getsitepackages() for path in Path(packages).iterdir()):
        if not package.name.startswith(HEAVY) and package.suffix != ".pth":
            (folder / "light" / package.name).symlink_to(package)
    return folder


ANSWER = {"role": "assistant", "content": "!"}


def on_login_node(folder: Path, *words: str, python: str | None) -> subprocess.CompletedProcess[str]:
    (folder / "site.yaml").write_text(json.dumps({"slurm": {"python": python}} if python else {}))
    light = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder / 'light'}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(light), "-m", "hpc_rl.cli", *words]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, input="/exit\n"
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("data", "check", "data.jsonl", "--model", "model"), "2 of them carry loss"),
        long(("chat", "model"), ""),
    ],
)
def test_a_command_that_needs_torch_runs_in_the_python_of_jobs(
    folder: Path, words: tuple[str, ...], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVIRONMENT", str(Path(sys.executable).parent))
    done = on_login_node(folder, *words, python=f"$ENVIRONMENT/{Path(sys.executable).name}")
    assert done.returncode == 0 and shown in done.stdout, done.stderr
    assert f"runs in {sys.executable} (slurm.python)" in done.stderr


@pytest.mark.parametrize("words", [("chat", "model"), ("data", "gsm8k", "--source", "openai/gsm8k", "--out", "out")])
def test_without_slurm_python_the_message_says_where_to_set_it(folder: Path, words: tuple[str, ...]) -> None:
    done = on_login_node(folder, *words, python=None)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "name the Python of your jobs in the site profile (slurm: {python: /path/to/python}" in done.stderr
    nowhere = on_login_node(folder, *words, python="/no/such/python")
    assert nowhere.returncode == 2 and "slurm.python /no/such/python is not on this machine" in nowhere.stderr
