"""The checks of vLLM's API against the installed vLLM; `make test-vllm-api` runs them against the wheels for GPUs."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.rl.rollout.vllm.test_engine import needs_vllm
from tests.vllm_wheels import PROCESSES, admitted_versions, oldest, run_checks, unpack


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("files", PROCESSES)
def test_the_installed_vllm_has_the_api_that_the_engine_uses(files: tuple[str, ...]) -> None:
    assert run_checks(files).returncode == 0


def test_the_range_of_versions_has_two_ends() -> None:
    """Only what was checked is admitted: the interface of vLLM's weight transfer changes between minor versions."""
    admitted = admitted_versions()
    assert oldest(admitted) == SpecifierSet("==0.32.0")
    assert admitted.contains("0.33.7") and not admitted.contains("0.34.0") and not admitted.contains("0.31.9")


def test_only_python_files_and_metadata_are_unpacked(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.33.1-cp38-abi3-manylinux_2_28_x86_64.whl"
    members = ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm-0.33.1.dist-info/METADATA")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in members:
            archive.writestr(name, "")
    tree = unpack(wheel)
    assert unpack(wheel) == tree
    assert [(tree / name).exists() for name in members] == [True, False, True]
