"""The cgroups of this process, and what the kernel counts in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_rl.system.cgroups import oom_kills, own_cgroups


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cg/memory/job/step").mkdir(parents=True)
    return tmp_path


def found(machine: Path, own: str, mounts: str | None = None) -> list[str]:
    (machine / "proc/self/cgroup").write_text(own)
    if mounts is not None:
        (machine / "proc/self/mountinfo").write_text(mounts)
    return [str(path.relative_to(machine)) for path in own_cgroups(machine / "proc", machine / "cg")]


STEP = ["cg/memory/job/step", "cg/memory/job", "cg/memory"]


def test_the_nearest_cgroup_is_first_and_its_parents_follow(machine: Path) -> None:
    assert found(machine, "4:memory:/job/step\n") == STEP
    assert found(machine, "0::/memory/job\n") == ["cg/memory/job", "cg/memory", "cg"]


def test_a_hierarchy_that_is_mounted_from_below_its_root(machine: Path) -> None:
    """As in a container: /proc has the path on the host."""
    mounts = f"36 35 0:31 / {machine}/cg/memory rw - cgroup cgroup rw,memory\n"
    mounts += f"37 35 0:31 /box {machine}/cg/memory rw - cgroup cgroup rw,memory\n"
    assert found(machine, "4:memory:/box/job/step\n", mounts) == STEP
    assert found(machine, "4:memory:/boxes/job\n", mounts) == ["cg/memory"]


def test_a_cgroup_that_is_not_visible_has_its_visible_parents(machine: Path) -> None:
    assert found(machine, "4:memory:/job/step/task\n") == STEP
    assert found(machine, "4:memory:/elsewhere\n9:pids:/job\n") == ["cg/memory"]


def test_the_counter_is_that_of_the_nearest_cgroup(tmp_path: Path) -> None:
    near, far = tmp_path / "a/b", tmp_path / "a"
    near.mkdir(parents=True)
    assert oom_kills([near, far]) is None
    (far / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert oom_kills([near, far]) == 7
    (near / "memory.events").write_text("low 0\nmax 31\noom 5\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills([near, far]) == 3


def test_a_kernel_without_the_counter(tmp_path: Path) -> None:
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert oom_kills([tmp_path]) is None
