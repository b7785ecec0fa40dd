"""The state of a sandbox on disk: enough to remove the sandbox after its launcher was killed at any point."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tests.sandbox import cgroups, network
from tests.sandbox.processes import DEADLINE_S, Process, SandboxError, wait_until
from tests.sandbox.spec import Spec

PARENT = Path("/var/tmp")


class Record(NamedTuple):
    spec: Spec
    subnet: str
    owner: Process | None
    """The process with which the sandbox ends, or None if it runs until `down`."""


@contextmanager
def lock() -> Iterator[None]:
    """Lock names and addresses. The lock is on a directory, so that no file is left."""
    descriptor = os.open(PARENT, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def names() -> list[str]:
    return sorted(path.name.removeprefix("hpc-rl-sandbox-") for path in PARENT.glob("hpc-rl-sandbox-*"))


def claim(spec: Spec) -> str:
    """Claim the name, after removing the remains of all sandboxes whose launcher was killed.

    Returns the subnet of the sandbox.
    """
    with lock():
        for name in {spec.name, *names()}:
            if not in_use(name):
                remove(name)
            elif name == spec.name:
                raise SandboxError(f"sandbox {name} is up already: use it, take it down first, or choose another name")
        subnet = network.free_subnet(spec.name, taken={read(name).subnet for name in names()})
        spec.base.mkdir(mode=0o755)
        write(Record(spec, subnet, Process.of(os.getpid())))
    return subnet


def write(record: Record) -> None:
    text = json.dumps({"spec": asdict(record.spec), "subnet": record.subnet, "owner": record.owner})
    _write_atomically(record.spec.base / "sandbox.json", text)


def read(name: str) -> Record:
    try:
        fields = json.loads((Spec(name).base / "sandbox.json").read_text())
    except FileNotFoundError:
        raise SandboxError(f"there is no sandbox {name}; there are: {', '.join(names()) or 'none'}") from None
    owner = Process(*fields["owner"]) if fields["owner"] else None
    return Record(Spec.from_json(fields["spec"]), fields["subnet"], owner)


def in_use(name: str) -> bool:
    try:
        owner = read(name).owner
    except SandboxError:
        return False
    return owner.is_alive() if owner else any(process.is_alive() for process in machines(name).values())


def note_machine(name: str, machine: str, pid: int) -> None:
    path = Spec(name).base / "machines" / machine
    path.parent.mkdir(exist_ok=True)
    _write_atomically(path, "{} {}\n".format(*Process.of(pid)))


def machines(name: str) -> dict[str, Process]:
    """Return machine name -> its first process, which may have ended."""
    paths = sorted((Spec(name).base / "machines").glob("[!.]*"))
    return {path.name: Process(*map(int, path.read_text().split())) for path in paths}


def end_machine(name: str, machine: str) -> None:
    """End a machine as a power failure does: the kernel ends its processes, its network and its mounts."""
    if process := machines(name).get(machine):
        process.kill()
        wait_until(
            lambda: not process.is_alive(), f"{machine} of sandbox {name} (pid {process.pid}) to end", DEADLINE_S
        )
    cgroups.remove(Spec(name).group, machine)


def remove(name: str) -> None:
    """Remove everything that a sandbox of this name may have left."""
    for machine in machines(name):
        end_machine(name, machine)
    network.unplug_host(name)
    cgroups.remove(Spec(name).group)
    if Spec(name).base.exists():
        shutil.rmtree(Spec(name).base)


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)
