"""Images: what they are built from, by which command, and that a build is whole or nothing. With a fake apptainer."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl import __version__
from hpc_rl.errors import UserError
from hpc_rl.images import build
from hpc_rl.images.build import ImageBuild, file_sha256, make
from hpc_rl.images.definition import Builder, ImageSource, build_argv, cause_of_failure, definition_args, parse_source
from hpc_rl.images.wheel import pack_wheel
from tests.fake_apptainer import FakeApptainer, sif_bytes

APPTAINER = Builder("/usr/bin/apptainer", "apptainer version 1.4.5")
PINNED = "registry.example.org/group/image@sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "source", "moving"),
    [
        ("docker://python:3.12", ImageSource("docker", "python:3.12"), True),
        (f"docker://{PINNED}", ImageSource("docker", PINNED), False),
        ("docker-daemon:mine:latest", ImageSource("docker-daemon", "mine:latest"), True),
    ],
)
def test_sources_elsewhere(text: str, source: ImageSource, moving: bool) -> None:
    assert (parse_source(text), source.is_moving, source.uri) == (source, moving, text)


def test_sources_that_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.tar", "x.sif"):
        (tmp_path / name).write_bytes(b"1234")
    assert parse_source("docker-archive:a.tar:mine") == ImageSource("docker-archive", f"{tmp_path}/a.tar:mine")
    assert parse_source("docker-archive:a.tar:mine").file == tmp_path / "a.tar"
    assert parse_source("x.sif") == ImageSource("localimage", f"{tmp_path}/x.sif")
    assert not parse_source("x.sif").is_moving


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python:3.12", "not a docker://NAME"),
        ("https://x/y.sif", "not a docker://NAME"),
        ("docker:python:3.12", "write docker://NAME:TAG"),
        ("docker://", "write docker://NAME:TAG"),
        ("docker-archive:none.tar", "no such file or folder"),
        ("none.sif", "no such file or folder"),
        ("docker://me:secret@registry/x", "contains a password in an address"),
    ],
)
def test_sources_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        parse_source(text)
    assert "secret@" not in str(caught.value)


def test_the_command_is_this() -> None:
    zstd = ["--mksquashfs-args", "-comp zstd -Xcompression-level 3"]
    variables = ["--build-arg", "extras=rl", "--build-arg", "pip="]
    built = build_argv(APPTAINER, Path("/o/x.sif"), "/d/hpc-rl.def", build_args={"extras": "rl", "pip": ""})
    assert built == ["/usr/bin/apptainer", "build", *zstd, *variables, "/o/x.sif", "/d/hpc-rl.def"]
    folder = build_argv(APPTAINER, Path("/o/box"), "/i/x.sif", sandbox=True)
    assert folder == ["/usr/bin/apptainer", "build", "--sandbox", "/o/box", "/i/x.sif"]
    other = build_argv(Builder("singularity", "singularity-ce version 4.1"), Path("/o/x.sif"), "docker://x")
    assert other == ["singularity", "build", "/o/x.sif", "docker://x"]


def test_variables_of_the_definition() -> None:
    found = definition_args(
        ImageSource("docker", "python:3.12"), Path("/w/x.whl"), None, ["extras=", "pip=--index-url=a=b"]
    )
    assert found == {
        **{"bootstrap": "docker", "from": "python:3.12", "wheel": "/w/x.whl"},
        **{"source": "docker://python:3.12", "digest": "unknown", "extras": "", "pip": "--index-url=a=b"},
    }
    for word, said in (("extras", "write KEY=VALUE"), ("pip=--index-url=https://me:pw@host/", "contains a password")):
        with pytest.raises(UserError, match=said):
            definition_args(ImageSource("docker", "x"), Path("x.whl"), None, [word])


@pytest.mark.parametrize(
    ("log", "meaning"),
    [
        ("FATAL: write /tmp/x: no space left on device", "out of space: remove files in /c"),
        ("FATAL: GET https://x/v2: UNAUTHORIZED: authentication required", "APPTAINER_DOCKER_USERNAME"),
        ("MANIFEST_UNKNOWN: manifest unknown; unknown tag=nope", "the registry has no such name or tag"),
        ("dial tcp: lookup x: no such host", "docker-archive:FILE"),
        ("FATAL: something else", ""),
    ],
)
def test_known_failures_are_explained(log: str, meaning: str) -> None:
    found = cause_of_failure(log, Path("/c"))
    assert meaning in found and bool(meaning) == bool(found)


@pytest.mark.parametrize("about", ["hpc_rl.egg-info/PKG-INFO", "hpc_rl-9.dist-info/METADATA"])
def test_the_wheel_is_the_running_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: str) -> None:
    file = tmp_path / about
    file.parent.mkdir()
    file.write_text("Name: hpc-rl\nVersion: 9\n")
    monkeypatch.syspath_prepend(tmp_path)
    with zipfile.ZipFile(pack_wheel(tmp_path)) as wheel:
        names = set(wheel.namelist())
        recorded = {
            line.split(",")[0] for line in wheel.read(f"hpc_rl-{__version__}.dist-info/RECORD").decode().split()
        }
        assert wheel.read(f"hpc_rl-{__version__}.dist-info/METADATA") == b"Name: hpc-rl\nVersion: 9\n"
    assert names == recorded
    shipped = {"apptainer/hpc-rl.def", "configs/sft.yaml", "slurm_templates/container.sh.j2"}
    assert {f"hpc_rl/shipped/{name}" for name in shipped} | {"hpc_rl/images/wheel.py", "hpc_rl/py.typed"} <= names
    assert not any("__pycache__" in name or name.startswith("hpc_rl/tests") for name in names)


class Bench:
    """A folder to build in, a fake apptainer, and nothing else."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.work, self.out = tmp, tmp / "local", tmp / "images"
        for folder in (self.work, self.out):
            folder.mkdir()
        (tmp / "a.tar").write_bytes(b"archive")
        self.fake = FakeApptainer(tmp / "bin", {**os.environ, "TMPDIR": str(self.work)})

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "hpc_rl.cli", "image", *arguments]

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env={**self.fake.environ, **environ}, cwd=self.tmp,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Everything but the runtime's cache."""
        files = [path for folder in (self.work, self.out) for path in folder.rglob("*")]
        return sorted(path.name for path in files if path.name not in ("cache", f"{os.getuid()}.hpc-rl-images"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


BUILD = ("build", "--from", "docker-archive:a.tar", "--out", "images/x.sif")


def test_a_build_leaves_the_image_and_its_origin(bench: Bench) -> None:
    done = bench.run(*BUILD, "--build-arg", "extras=rl")
    assert done.returncode == 0, done.stderr
    assert "Starting build" in done.stderr and "digest sha256:" in done.stdout
    assert bench.left() == ["x.sif", "x.sif.json"]
    facts = json.loads((bench.out / "x.sif.json").read_text())
    assert facts["source"] == f"docker-archive:{bench.tmp}/a.tar"
    assert facts["digest"] == file_sha256(bench.tmp / "a.tar") and facts["sha256"] == file_sha256(bench.out / "x.sif")
    assert (facts["hpc_rl"], facts["build_args"], facts["format"]) == (__version__, ["extras=rl"], "sif")
    call = bench.fake.calls("build")[0]
    cache, work = Path(call["env"]["APPTAINER_CACHEDIR"]), Path(call["env"]["APPTAINER_TMPDIR"])
    assert cache.parent == work.parent and cache.is_relative_to(bench.work) and cache.parent.stat().st_mode & 0o077 == 0
    assert call["argv"][-1].endswith("apptainer/hpc-rl.def") and f"digest={facts['digest']}" in call["argv"]


def test_an_unpacked_folder_replaces_another_only_by_force(bench: Bench) -> None:
    (bench.tmp / "x.sif").write_bytes(sif_bytes())
    assert bench.run("unpack", "x.sif", "images/box").returncode == 0
    refused = bench.run("unpack", "x.sif", "images/box")
    assert refused.returncode == 2 and "images/box exists" in refused.stderr
    done = bench.run("unpack", "x.sif", "images/box", "--force")
    assert done.returncode == 0, done.stderr
    assert bench.left() == ["box", "box.json", "read-only", "usr"]
    assert json.loads((bench.out / "box.json").read_text())["format"] == "sandbox"


def test_a_tag_without_a_digest_is_warned_of(bench: Bench) -> None:
    done = bench.run("pull", "docker://python:3.12", "--out", "images/x.sif")
    assert done.returncode == 0 and "docker://python:3.12 may refer to another image later" in done.stderr
    assert bench.fake.calls("build")[0]["argv"][-1] == "docker://python:3.12"
    pinned = bench.run("pull", f"docker://{PINNED}", "--out", "images/y.sif")
    assert "later" not in pinned.stderr and f"digest {PINNED.partition('@')[2]}" in pinned.stdout


@pytest.mark.parametrize("how", ["1", "255", "137"])
def test_a_build_that_fails_half_way_leaves_nothing(bench: Bench, how: str) -> None:
    done = bench.run(*BUILD, FAKE_BUILD=how, FAKE_SAYS="write: no space left on device")
    assert done.returncode == 1, done.stderr
    assert f"build failed with exit code {how}: out of space: remove files in {bench.work}" in done.stderr
    assert "Traceback" not in done.stderr and bench.left() == []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing_and_no_other_runs_beside_it(bench: Bench, number: int) -> None:
    environ = {**bench.fake.environ, "FAKE_BUILD": "slow"}
    with subprocess.Popen(bench.command(*BUILD), env=environ, cwd=bench.tmp, stderr=subprocess.PIPE, text=True) as slow:
        wait_for(bench.fake.started.exists)
        second = bench.run(*BUILD)
        assert second.returncode == 2 and "another build of" in second.stderr
        slow.send_signal(number)
        _, said = slow.communicate(timeout=600)
    assert (
        slow.returncode == 130 and "interrupted: the incomplete image was removed" in said and "Traceback" not in said
    )
    assert bench.left() == []


def test_what_cannot_be_built_is_refused_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no folder" in bench.run(*BUILD[:-1], "nowhere/x.sif").stderr
    assert "--definition none.def: no such file" in bench.run(*BUILD, "--definition", "none.def").stderr
    assert "no apptainer and no singularity on PATH" in bench.run(*BUILD, PATH="/nowhere").stderr
    (bench.tmp / "apptainer").write_text("#!/nowhere/python\n")
    (bench.tmp / "apptainer").chmod(0o755)
    refused = bench.run(*BUILD, PATH=str(bench.tmp))
    assert refused.returncode == 2
    assert f"{bench.tmp}/apptainer does not start: No such file or directory" in refused.stderr
    (bench.tmp / "apptainer").write_text("#!/bin/sh\nexec sleep 3600\n")
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"--version did not end within 0\.1 s"):
        patch.setenv("PATH", f"{bench.tmp}:{os.environ['PATH']}")
        patch.setattr(build, "VERSION_TIMEOUT_S", 0.1)
        build.find_builder()
    (bench.tmp / "cut.sif").write_bytes(sif_bytes(size=1000)[:900])
    assert "is incomplete" in bench.run("unpack", "cut.sif", "box").stderr
    assert bench.left() == []
    monkeypatch.setenv("PATH", bench.fake.environ["PATH"])
    monkeypatch.setenv("TMPDIR", str(bench.work))
    monkeypatch.setattr(build.shutil, "disk_usage", lambda _path: SimpleNamespace(free=5))
    with pytest.raises(UserError, match=r"has 5 bytes free, and building from .* may take 28: set TMPDIR"):
        make(ImageBuild(parse_source(f"docker-archive:{bench.tmp}/a.tar"), bench.out / "x.sif"))
    assert bench.left() == []
