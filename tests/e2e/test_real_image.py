"""Images with a real apptainer: built from an archive, inspected, and used to run commands like the tasks of a job."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_rl import __version__
from hpc_rl.config.compose import compose
from hpc_rl.images.build import file_sha256
from hpc_rl.images.run_options import CACHES
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.render import render_container
from tests.docker_images import AS_USER, write_docker_archive
from tests.sandbox.processes import DEADLINE_S
from tests.submission.script.test_render import NASTY

OPTIONS = ["--userns"] if os.getuid() == 0 else []


@pytest.fixture
def hpc_rl(apptainer_environ: dict[str, str], tmp_path: Path) -> Any:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*AS_USER, sys.executable, "-m", "hpc_rl.cli", *arguments], cwd=tmp_path, env=apptainer_environ,
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip

    return run


def test_the_image_says_where_it_comes_from(
    built_image: Path, apptainer_environ: dict[str, str], tmp_path: Path
) -> None:
    archive = f"docker-archive:{built_image.parent}/tiny.tar"
    digest = file_sha256(built_image.parent / "tiny.tar")
    facts = json.loads(built_image.with_name("hpc-rl.sif.json").read_text())
    assert (facts["source"], facts["digest"], facts["sha256"]) == (archive, digest, file_sha256(built_image))
    said = subprocess.run(
        ["apptainer", "--silent", "inspect", "--json", str(built_image)],
        env=apptainer_environ, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    ).stdout  # fmt: skip
    labels = json.loads(said)["data"]["attributes"]["labels"]
    assert labels["org.opencontainers.image.base.name"] == archive
    assert labels["org.opencontainers.image.base.digest"] == digest


def test_a_look_inside(built_image: Path, hpc_rl: Any, tmp_path: Path) -> None:
    report = json.loads(hpc_rl("image", "check", str(built_image), "--json").stdout)
    assert report["facts"]["packages"] == {"hpc-rl": __version__} and report["problems"] == []
    assert report["facts"]["shm_bytes"] > 0 and report["origin"]["format"] == "sif"
    write_docker_archive(tmp_path / "bare.tar", python=False)
    pulled = hpc_rl("image", "pull", "docker-archive:bare.tar", "--out", "bare.sif")
    assert pulled.returncode == 0, pulled.stderr
    bare = hpc_rl("image", "check", "bare.sif")
    assert bare.returncode == 1 and "it has no python3 on its PATH" in bare.stdout


def test_an_interrupted_build_leaves_nothing(
    built_image: Path, apptainer_environ: dict[str, str], tmp_path: Path
) -> None:
    # The last stage of a build waits here until the build is ended.
    held, begun = tmp_path / "bin" / "mksquashfs", tmp_path / "bin" / "begun"
    held.parent.mkdir()
    held.write_text(f'#!/bin/sh\ntouch "{begun}"\nwhile kill -0 $PPID; do sleep 0.1; done\n')
    held.chmod(0o755)
    (tmp_path / "local").mkdir()
    command = [sys.executable, "-m", "hpc_rl.cli", "image", "pull", f"docker-archive:{built_image.parent}/tiny.tar"]
    environ = {
        **apptainer_environ,
        "TMPDIR": str(tmp_path / "local"),
        "PATH": f"{held.parent}:{apptainer_environ['PATH']}",
    }
    with subprocess.Popen(
        [*AS_USER, *command, "--out", "x.sif"], cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True
    ) as building:
        deadline = time.monotonic() + DEADLINE_S
        while not begun.exists():
            assert building.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        building.send_signal(signal.SIGTERM)
        building.communicate(timeout=DEADLINE_S)
    assert building.returncode == 130
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "local"}
    assert [path.name for path in tmp_path.glob("local/*/*")] == ["cache"]


KEPT = f"hpc-rl-cache-{os.getuid()}"
"""The folder for compiled kernels, which stays for later jobs."""


class Task:
    """Runs container.sh of a job with the real runtime."""

    def __init__(self, image: Path, environ: dict[str, str], tmp: Path, **flags: Any) -> None:
        self.tmp, (self.data, self.local) = tmp, (tmp / "data", tmp / "local")
        for folder in (self.data, self.local, tmp / "run"):
            folder.mkdir()
        (self.data / "file").write_text("seen")
        settings = {"container.image": str(image), "container.options": OPTIONS, "trainer.device": "cpu"}
        settings |= {"container.binds": [f"{self.data}:/elsewhere:ro"], "container.unpack": "never", **flags}
        config = compose("torchrun", [], settings)
        self.script = tmp / "container.sh"
        self.script.write_text(render_container(Job("torchrun", config, RunDir(tmp / "run"), tmp)))
        plain = {
            name: value for name, value in environ.items() if name not in CACHES
        }  # torch sets some of them when it is imported
        self.environ = {**plain, "SLURM_JOB_ID": "7", "TMPDIR": str(self.local), "HF_HOME": str(tmp / "hf")}

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.script), *command], env={**self.environ, **environ}, cwd=self.tmp,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *command: str, **environ: str) -> tuple[int, str, str]:
        with self.start(*command, **environ) as running:
            out, error = running.communicate(timeout=DEADLINE_S)
        assert {path.name for path in self.local.iterdir()} <= {KEPT}
        return running.returncode, out, error


@pytest.fixture
def task(built_image: Path, apptainer_environ: dict[str, str], tmp_path: Path) -> Task:
    return Task(built_image, apptainer_environ, tmp_path, **{"slurm.env": {"MY_VALUE": "x", "MY_NODES": "x"}})


def test_environment_folders_and_binds_are_the_jobs(task: Task) -> None:
    program = (
        "import json, os, sys; open('/tmp/mine', 'w'); "
        "print(json.dumps([dict(os.environ), os.getcwd(), os.listdir('/tmp'), open('/elsewhere/file').read()]))"
    )
    code, out, error = task.run(
        "python3", "-c", program, MY_VALUE=NASTY, MY_NODES="vm,vm's", SECRET="1", PYTHONPATH="/host"
    )
    assert code == 0, error
    environ, folder, own_tmp, text = json.loads(out)
    assert (environ["MY_VALUE"], environ["MY_NODES"]) == (NASTY, "vm,vm's")
    assert (environ["HOME"], environ["IMAGE_SAYS"], environ["SLURM_JOB_ID"]) == ("/tmp", "hello", "7")
    assert not {"SECRET", "PYTHONPATH", "TMPDIR"} & environ.keys()
    assert (folder, text) == (str(task.tmp), "seen")
    # The working folder of this test may be in /tmp, and is bound into the task's own /tmp.
    assert "mine" in own_tmp and set(own_tmp) <= {"mine", KEPT, task.tmp.parts[2]}
    assert (task.tmp / "hf").is_dir() and environ["HF_HOME"] == str(task.tmp / "hf")


def test_files_outside_of_the_binds_do_not_change(task: Task) -> None:
    assert task.run("touch", "made-here")[0] == 0 and (task.tmp / "made-here").exists()
    assert task.run("touch", "/elsewhere/new")[0] != 0
    assert task.run("touch", "/opt/new")[0] != 0


def test_exit_codes_are_the_programs(task: Task) -> None:
    for code in (0, 3, 75):
        assert task.run("sh", "-c", f"exit {code}")[0] == code
    assert task.run("sh", "-c", "kill -9 $$")[0] == 137
    code, _, error = task.run("no-such-program")
    assert code == 127 and "no-such-program" in error  # of env, inside
    task.script.write_text(task.script.read_text().replace(":/elsewhere:ro", "-gone:/elsewhere"))
    code, _, error = task.run("true")
    assert code == 255 and "could not run" in error and "data-gone doesn't exist" in error


def test_a_termination_reaches_the_program(task: Task) -> None:
    waits = "trap 'echo saved; exit 9' TERM; touch begun; while true; do sleep 0.1; done"
    with task.start("bash", "-c", waits) as running:
        deadline = time.monotonic() + DEADLINE_S
        while not (task.tmp / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.terminate()
        out, _ = running.communicate(timeout=DEADLINE_S)
    assert (running.returncode, out) == (9, "saved\n")
    assert {path.name for path in task.local.iterdir()} <= {KEPT}


def test_local_nodes_run_in_an_unpacked_copy(
    built_image: Path, apptainer_environ: dict[str, str], hpc_rl: Any, tmp_path: Path
) -> None:
    (tmp_path / "driver.py").write_text(
        "import os, pathlib, time, hpc_rl\n"
        "print('rank', os.environ['RANK'], os.environ['APPTAINER_CONTAINER'], hpc_rl.__file__, flush=True)\n"
        "pathlib.Path('here-' + os.environ['RANK']).touch()\n"
        "deadline = time.monotonic() + 300\n"  # the first end of a rank would end the other before it has printed
        "while len(list(pathlib.Path().glob('here-*'))) < 2 and time.monotonic() < deadline:\n"
        "    time.sleep(0.1)\n"
        "raise SystemExit(7)\n"
    )
    packages = next(path for path in sys.path if path.endswith("-packages"))
    container = ["container.unpack=always", f"container.binds=[{packages}]", f"slurm.env.PYTHONPATH={packages}"]
    job = ["submit", "torchrun", "--local", "--nodes", "2", "--image", str(built_image), "trainer.device=cpu"]
    done = hpc_rl(*job, *container, "--", "driver.py")
    assert done.returncode == 7, done.stdout + done.stderr
    said = (tmp_path / "runs/torchrun-1/attempt-1/node1-rank1.log").read_text().split()
    assert said[:2] == ["rank", "1"] and said[2].endswith("/image") and ".image." in said[2]
    assert not Path(said[2]).parent.exists()
    # Packages are bound, but hpc-rl is the image's.
    assert not said[3].startswith((packages, str(Path(__file__).parents[2])))
