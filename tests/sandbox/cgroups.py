"""Gives every machine its own part of the cgroup v1 hierarchies, which the machine sees as the root."""

from pathlib import Path

from tests.sandbox.processes import DEADLINE_S, wait_until

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = {"cpuset", "memory", "freezer", "devices", "cpuacct"}
"""What Slurm uses. Without `cpu`, each job step has as much weight as any other session of this machine. In groups of
that hierarchy, all nodes of a cluster together would have the weight of one."""
NEEDED = {"cpuset", "memory", "freezer"}


def hierarchies(mounts: str | None = None) -> list[Path]:
    """Return the mount points of the cgroup v1 hierarchies, or none if Slurm cannot confine jobs with them."""
    found: set[str] = set()
    points: dict[Path, None] = {}
    for line in (Path("/proc/self/mounts").read_text() if mounts is None else mounts).splitlines():
        _, point, kind, options = line.split()[:4]
        controllers = CONTROLLERS & set(options.split(","))
        if kind == "cgroup" and controllers and Path(point).parent == ROOT:
            found |= controllers
            points[Path(point)] = None
    return list(points) if found >= NEEDED else []


def create(group: str, machine: str) -> list[Path]:
    """Create GROUP/MACHINE in each hierarchy and return the folders."""
    made = []
    for point in hierarchies():
        for path in (point / group, point / group / machine):
            path.mkdir(exist_ok=True)
            for inherited in (
                "cpuset.cpus",
                "cpuset.mems",
            ):  # these are empty at first, and an empty set accepts no process
                if (path / inherited).exists():
                    (path / inherited).write_text((path.parent / inherited).read_text())
        made.append(point / group / machine)
    return made


def remove(group: str, machine: str = "", timeout: float = DEADLINE_S) -> None:
    """Remove GROUP, or one MACHINE in it, after their processes were killed."""
    tops = [point / group / machine for point in hierarchies()]
    wait_until(
        lambda: all([_remove_tree(top) for top in tops]), f"cgroups {group} to go", timeout, lambda: _tasks(tops)
    )


def _remove_tree(top: Path) -> bool:
    if not top.exists():
        return True
    # rmdir removes a cgroup directory although it contains files. The deepest one goes first.
    for directory in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), reverse=True):
        try:
            directory.rmdir()
        except OSError:  # a process in it, or in a directory below, has not ended yet
            return False
    return True


def _tasks(tops: list[Path]) -> str:
    return "\n".join(f"{path}: {path.read_text().split()}" for top in tops for path in top.rglob("cgroup.procs"))
