from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hpc_rl.rl.actors import process
from hpc_rl.rl.actors.process import (
    group_environment,
    keep_temporary_files_in_the_job,
    new_group_dir,
    own_folder,
)


@pytest.mark.parametrize(("sees_node", "visible"), [(False, ""), (True, "4,5")])
def test_a_process_begins_with_its_log_and_its_own_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees_node: bool, visible: str
) -> None:
    logs: list[Path] = []
    monkeypatch.setattr(process, "log_to", logs.append)
    monkeypatch.setattr(process, "assigned_devices", list)
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "4,5"})
    process.begin(tmp_path, sees_node)
    assert logs == [tmp_path] and os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_the_folder_of_a_group_is_removed_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, ray = tmp_path / "attempt-1", tmp_path / "0.7.abc" / "ray"
    logs.mkdir()
    ray.mkdir(parents=True)
    monkeypatch.setenv("RAY_TMPDIR", str(ray))
    assert new_group_dir(logs, is_on_one_node=True).parent == ray
    assert new_group_dir(logs, is_on_one_node=False).parent == logs
    monkeypatch.delenv("RAY_TMPDIR")
    assert new_group_dir(logs, is_on_one_node=True).parent == logs


def test_temporary_files_are_removed_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    site, ray = tmp_path / "site", tmp_path / "site" / "0.7.abc" / "ray"
    ray.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(site))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    keep_temporary_files_in_the_job()
    assert tempfile.gettempdir() == str(site)
    monkeypatch.setenv("RAY_TMPDIR", str(ray))
    with own_folder("adapters-") as folder:
        assert Path(folder).parent == ray and Path(folder).name.startswith("adapters-")
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    keep_temporary_files_in_the_job()
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(ray)


def test_the_process_group_finds_the_ranks_of_this_node() -> None:
    environment = group_environment(5, 8, on_node=4, group_dir=Path("/run/g"))
    assert environment["LOCAL_RANK"] == "0"
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("5", "8", "4")
