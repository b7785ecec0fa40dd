"""Slurm clusters for tests, which tests/sandbox starts on this machine. If it cannot, the tests are skipped."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.docker_images import AS_USER, write_docker_archive
from tests.sandbox.cluster import Cluster, missing
from tests.sandbox.processes import DEADLINE_S
from tests.sandbox.variants import LARGE

# Without job control a shell starts background commands with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray gives its workers a niceness of 15, by which they get almost no time beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

# Commands say what they do if they take long, which depends on the load of this machine.
os.environ["HPC_RL_QUIET"] = "1"

# Ray's workers import what tests send them, and look into no folder that only this process knows.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))

_numbers = itertools.count()

# No test depends on speed. Otherwise hypothesis allows 0.2 s for an example, and 1 s for drawing ten of them. Each run
# draws other examples, so that half of the usual hundred find as much within two runs.
_SLOW = hypothesis.HealthCheck.too_slow
hypothesis.settings.register_profile("any speed", deadline=None, max_examples=50, suppress_health_check=[_SLOW])
hypothesis.settings.load_profile("any speed")


@pytest.fixture(scope="session", autouse=True)
def state_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Parent of the folders for $XDG_STATE_HOME, so that the lists of folders with runs stay out of the home folder."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "session"))
        yield folder


@pytest.fixture(autouse=True)
def _state_folder(state_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a list of its own: what other tests have submitted changes no plan."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state_folders / str(next(_numbers))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slurm-tree", default="", metavar="DIR", help="use the Slurm of another Debian: its root directory"
    )


@pytest.fixture(scope="session")
def slurm_tree(request: pytest.FixtureRequest) -> str:
    """Root directory of a Debian with another Slurm. Empty for this machine's Slurm."""
    tree: str = request.config.getoption("--slurm-tree")
    if tree and not Path(tree).is_dir():
        pytest.skip(f"{tree} does not exist: run .ci/install-slurm-new")
    return tree


def sandbox_cluster(name: str, **spec: Any) -> Iterator[Cluster]:
    """Start a cluster that ends with the fixture or with this process. Its name is unique to this session.

    Its jobs run on any core of this machine: bound, the jobs of all nodes and clusters would share the first core.
    """
    spec.setdefault("binds_cores", False)
    if lacking := missing(bool(spec.get("accounting"))):
        pytest.skip(lacking)
    with Cluster(name=f"{name}-{os.getpid()}", **spec) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_cluster(slurm_tree: str) -> Iterator[Cluster]:
    """Four nodes with 2 CPUs, 6000 MB and 2 fake GPUs each, without accounting. Tests leave it as it was."""
    yield from sandbox_cluster("pytest", nodes=4, cpus=2, memory_mb=6000, gpus=2, tree=slurm_tree)


@pytest.fixture(scope="session")
def accounting_cluster(slurm_tree: str) -> Iterator[Cluster]:
    """Two such nodes with slurmdbd, so that sacct works."""
    nodes = {"nodes": 2, "cpus": 2, "memory_mb": 6000, "gpus": 2}
    yield from sandbox_cluster("pytest-acct", **nodes, accounting=True, tree=slurm_tree)


@pytest.fixture(scope="session")
def large_cluster(slurm_tree: str) -> Iterator[Cluster]:
    """A thousand nodes without slurmd and a thousand held jobs, for commands that must not become slower."""
    for cluster in sandbox_cluster("pytest-large", **LARGE, tree=slurm_tree):
        hold = ["sbatch", "--hold", "--output=/dev/null", "--array=0-99", "--wrap=true"]
        for _ in range(10):
            cluster.run(hold, cwd=cluster.shared, check=True)
        yield cluster


@pytest.fixture(scope="session")
def apptainer_environ() -> dict[str, str]:
    """An environment with a real apptainer: this machine's, or the one that .ci/install-apptainer installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    installed = os.environ.get("HPC_RL_APPTAINER") or cache / "hpc-rl" / "apptainer"
    environ = {**os.environ, "PATH": f"{os.environ['PATH']}:{installed}/usr/bin"}
    if not shutil.which("apptainer", path=environ["PATH"]):
        pytest.skip("no apptainer on PATH, and .ci/install-apptainer installed none")
    return environ


@pytest.fixture(scope="session")
def built_image(apptainer_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with a shell, this Python and hpc-rl, built by `hpc-rl image build` from a Docker archive."""
    folder = tmp_path_factory.mktemp("image")
    write_docker_archive(folder / "tiny.tar")
    command = [*AS_USER, sys.executable, "-m", "hpc_rl.cli", "image", "build", "--from", "docker-archive:tiny.tar"]
    offline = ["--build-arg", "extras=", "--build-arg", "pip=--no-index --no-deps"]
    done = subprocess.run(
        [*command, "--out", "hpc-rl.sif", *offline],
        cwd=folder, env=apptainer_environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "hpc-rl.sif"
