"""Docker images made on the spot, with this machine's own programs in them: no network, no daemon."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

PROGRAMS = ("bash", "sh", "cat", "chmod", "df", "env", "grep", "kill", "ls", "mkdir", "rm", "sleep", "touch", "uname")
LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6")
"""What compiled Python packages, bound into the image, expect of any distribution."""
AS_USER = ("unshare", "--map-root-user") if os.getuid() == 0 else ()
"""Root of a container lacks what apptainer expects of root; in a user namespace it is content."""
_LEFT_OUT = {
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages"),
}
_LEFT_OUT_FILES = re.compile(r"\.a$|\.opt-\d\.pyc$|_tkinter|_test\w*\.cpython")
"""Compiled modules stay: an image is read-only, and every process would compile them again."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_docker_archive(path: Path, *, python: bool = True, architecture: str | None = None) -> Path:
    """What `docker save` writes: one layer with a shell, a few programs, and this Python with pip.

    The format is the Docker image specification's v1.2, "Combined Image JSON + Filesystem Changeset Format".
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("tmp", "var/tmp", "proc", "sys", "dev", "etc", "root", "home", "opt"):
            tar.addfile(_folder(folder))
        for file in ("etc/hosts", "etc/resolv.conf", "etc/passwd", "etc/group"):
            tar.addfile(tarfile.TarInfo(file))  # the runtime binds the host's over those that there are
        for inside, source in sorted({**_programs(), **(_python() if python else {})}.items()):
            tar.add(source, inside.lstrip("/"), recursive=False)
        if python:
            tar.addfile(_link("usr/bin/python3", os.path.realpath(sys._base_executable)))
    diff_id = f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"
    config = {
        "architecture": architecture or _ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "IMAGE_SAYS=hello"]},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    }
    manifest = [{"Config": "config.json", "RepoTags": ["tiny:1"], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("layer.tar", layer.getvalue()),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def _programs() -> dict[str, str]:
    found = {f"/bin/{name}": os.path.realpath(str(shutil.which(name))) for name in PROGRAMS}
    return found | _needed(found.values())


def _python() -> dict[str, str]:
    """Interpreter, standard library and pip, at the places where they are on this machine."""
    executable, stdlib = os.path.realpath(sys._base_executable), sysconfig.get_path("stdlib")
    files = {executable: executable}
    for folder, below, names in os.walk(stdlib):
        below[:] = [name for name in below if name not in _LEFT_OUT and not name.startswith("config-")]
        files |= {file: file for name in names if not _LEFT_OUT_FILES.search(file := f"{folder}/{name}")}
    site = f"{stdlib}/site-packages"
    pip = Path(sysconfig.get_path("purelib"))
    for source in [*pip.glob("pip/**/*"), *pip.glob("pip-*/*")]:
        if source.is_file() and source.suffix not in (".pyc", ".exe"):
            files[f"{site}/{source.relative_to(pip)}"] = str(source)
    libraries = _needed([executable, *(name for name in files if ".so" in Path(name).name)])
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name in LIBRARIES:
        if found := re.search(rf"\s{re.escape(name)} \(libc6,(?:x86-64|AArch64).* => (\S+)", known):
            libraries[found[1]] = os.path.realpath(found[1])
    return files | libraries


def _needed(programs: object) -> dict[str, str]:
    """Path -> file of every shared library that these need, the loader among them (ldd(1))."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout  # type: ignore[misc]
    paths = set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE))
    return {path: os.path.realpath(path) for path in paths}


def _folder(name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
    return entry


def _link(name: str, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry
