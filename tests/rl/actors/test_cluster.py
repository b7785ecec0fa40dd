"""The Ray cluster that the driver connects to, or starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray._private.node

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import UserError
from hpc_rl.rl.actors import cluster

REQUIRED = ["model.path=m", "data.train_files=t.jsonl", "reward.function=exact", "trainer.device=cpu"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options with which Ray is started."""
    options: dict[str, Any] = {}

    def init(**given: Any) -> None:
        options.update(given)
        if "_temp_dir" in given:
            options["private"] = Path(given["_temp_dir"]).parent.stat()

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster, "_authenticate", lambda _: None)
    return options


def connect(folder: Path, *options: str) -> bool:
    """Connect and disconnect; return whether a cluster was started."""
    config = compose("ppo", [*REQUIRED, *options])
    assert isinstance(config, PpoConfig)
    with cluster.connected(config, folder) as started_here:
        return started_here


def test_a_cluster_of_this_machine_that_others_may_have_started_is_never_joined(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address, Ray would join the one that /tmp/ray/ray_current_cluster names."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert connect(tmp_path)
    assert (asked["address"], asked["_node_ip_address"]) == ("local", "127.0.0.1")
    assert {"RAY_worker_niceness": "0"}.items() <= os.environ.items()


def test_the_files_of_a_cluster_of_this_machine_are_private(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray makes its own folder accessible to everyone. The paths of its sockets have to be short."""
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert connect(tmp_path)
    folder = Path(asked["_temp_dir"]).parent
    assert folder.parent == Path("/tmp") and not folder.exists()
    assert asked["private"].st_mode & 0o777 == 0o700 and asked["private"].st_uid == os.getuid()
    assert connect(tmp_path, f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray")
    assert asked["_temp_dir"] == f"{tmp_path}/ray"


def test_the_jobs_cluster_is_joined(asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not connect(tmp_path, "ray_kwargs.ray_init.num_cpus=3")
    assert asked["address"] == "10.0.0.1:6379" and "num_cpus" not in asked


def test_a_slow_start_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "_authenticate", lambda _: None)
    outcomes: list[str] = []

    def init(**_: Any) -> None:
        if outcome := outcomes.pop(0):
            raise Exception(outcome)  # as Ray does

    monkeypatch.setattr(cluster.ray, "init", init)
    slow = "The current node timed out during startup. This could happen because"
    assert cluster._TOO_SLOW in Path(ray._private.node.__file__).read_text()
    outcomes += [slow, slow, ""]
    assert connect(tmp_path) and not outcomes
    outcomes += [slow] * 4
    with pytest.raises(
        UserError,
        match=r"^Ray's processes did not start within 30 s, 3 times\. This machine has a load of .* less load$",
    ):
        connect(tmp_path)
    assert outcomes == [slow]
    outcomes[:] = ["another", ""]
    with pytest.raises(Exception, match=r"^another$"):
        connect(tmp_path)
