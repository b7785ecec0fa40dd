"""The example of docs/extending.md for a container runtime, run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.images.runtimes import RUNTIMES
from hpc_rl.submission.preflight import checks
from hpc_rl.submission.script.render import render_container
from tests.images.test_run_options import image_job
from tests.submission.script.test_render import check_shell

DOCS = Path(__file__).parents[2] / "docs"
SECTION = "## Container runtime\n"
CH_RUN = """#!/bin/sh
for word in "$@"; do
  case $word in --set-env=*) cp "${word#--set-env=}" "$RECORD.env" ;; esac
done
printf '%s\\n' "$@" > "$RECORD"
"""
"""A fake ch-run, which keeps its arguments and the file with the environment."""


def section() -> str:
    """The section in docs/extending.md, or in the fragment that it is made of."""
    (text,) = {page.read_text() for page in DOCS.glob("*extending*.md") if SECTION in page.read_text()}
    return text.partition(SECTION)[2].partition("\n## ")[0]


@pytest.fixture
def charliecloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with the row of the example."""
    (example,) = re.findall(r"```python\n(.*?)```", section(), re.DOTALL)
    for name, row in RUNTIMES.items():
        monkeypatch.setitem(RUNTIMES, name, row)
    monkeypatch.setitem(RUNTIMES, "charliecloud", RUNTIMES["apptainer"])  # so that it is removed at the end
    exec(compile(example, "docs/extending.md", "exec"), {})


@pytest.mark.usefixtures("charliecloud")
def test_the_example_runs_a_job_in_an_image(tmp_path: Path) -> None:
    for folder in ("bin", "local", "image"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin" / "ch-run").write_text(CH_RUN)
    (tmp_path / "bin" / "ch-run").chmod(0o755)
    settings = {"container.image": str(tmp_path / "image"), "container.runtime": "charliecloud", "container.gpu": "nv"}
    script = render_container(image_job(tmp_path / "run", tmp_path, **settings))
    check_shell(script)
    (call,) = re.findall(r'^"\$runtime".*$', section(), re.MULTILINE)
    assert f"\n{call}\n" in script
    (tmp_path / "container.sh").write_text(script)
    environ = {
        **{"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "local")},
        **{"SLURM_JOB_ID": "7", "RECORD": str(tmp_path / "called"), "HF_TOKEN": "a secret"},
    }
    command = ["bash", str(tmp_path / "container.sh"), "python3", "-m", "some thing"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "called").read_text().splitlines()
    assert words[0] == "--bind" and words[1].endswith("/tmp:/tmp") and words[2] == "--unset-env=*"
    assert words[3:7] == ["--cd", str(tmp_path), "--bind", str(tmp_path)]
    image = words.index(str(tmp_path / "image"))
    assert words[image + 1 :] == ["--", "env", "HOME=/tmp", "python3", "-m", "some thing"]
    assert "HF_TOKEN='a secret'" in (tmp_path / "called.env").read_text()


@pytest.mark.usefixtures("charliecloud")
def test_a_runtime_that_cannot_unpack_runs_from_the_image(tmp_path: Path) -> None:
    settings = {"container.image": str(tmp_path), "container.unpack": "always"}
    for runtime, unpacks in (("apptainer", True), ("charliecloud", False)):
        script = render_container(image_job(tmp_path / "run", tmp_path, **settings, **{"container.runtime": runtime}))
        assert ("unpack() {" in script) == unpacks


@pytest.mark.usefixtures("charliecloud")
def test_the_login_node_checks_the_image_of_the_example(tmp_path: Path) -> None:
    settings = {"container.image": str(tmp_path / "none"), "container.runtime": "charliecloud"}
    with pytest.raises(UserError, match="create one with ch-convert"):
        checks.check(image_job(tmp_path / "run", tmp_path, **settings))


@pytest.mark.usefixtures("charliecloud")
def test_the_login_node_lists_the_row_of_the_example(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pyxis, charliecloud"):
        checks.check(image_job(tmp_path / "run", tmp_path, **{"container.runtime": "docker"}))
