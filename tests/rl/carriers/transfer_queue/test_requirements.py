"""Whether a Python can use TransferQueue: pip's records say which version it has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.rl.carriers.transfer_queue import requirements


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that the package needs."""
    monkeypatch.setitem(sys.modules, "zmq", SimpleNamespace(has=lambda name: name == "curve"))
    monkeypatch.setitem(sys.modules, "msgspec", SimpleNamespace())


@pytest.mark.parametrize("version", ["0.1.9", "0.1.10", "0.1.12", "0.2", "1.0"])
def test_another_version_is_refused(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version, tmp_path, monkeypatch)
    wanted = rf"needs TransferQueue >= 0\.1\.11, < 0\.1\.12, and {sys.executable} has {version}: run pip install"
    assert re.search(wanted, str(requirements.problem()))


@pytest.mark.parametrize("version", ["0.1.11", "0.1.11.post1"])
def test_versions_that_work(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version, tmp_path, monkeypatch)
    assert requirements.problem() is None


@pytest.mark.parametrize("name", ["zmq", "msgspec"])
def test_a_missing_dependency_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("0.1.11", tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, name, None)
    assert re.search(rf"needs pyzmq and msgspec, and .*{name}", str(requirements.problem()))


def test_a_pyzmq_without_curve_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("0.1.11", tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "zmq", SimpleNamespace(has=lambda _: False))
    assert "needs a pyzmq with CURVE" in str(requirements.problem())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert re.search(r"has none: run pip install '\.\[transfer-queue\]'", str(requirements.problem()))


def test_another_python_runs_the_file_alone() -> None:
    """-S leaves out the installed packages."""
    asked = subprocess.run(
        [sys.executable, "-P", "-S", "-E", requirements.__file__], capture_output=True, text=True, check=True
    )
    assert f"and {sys.executable} has none: run pip install" in asked.stdout


def install(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put what pip records about an installed package in front of all others."""
    record = folder / f"transferqueue-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: TransferQueue\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
