"""The programs that create containers, where the user nobody can run them: what root starts belongs to nobody."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("usr/bin/apptainer", "usr/lib/x86_64-linux-gnu/apptainer/bin/starter")


@contextmanager
def reachable_path(environ: dict[str, str], within: Path = Path("/tmp")) -> Iterator[str]:
    """Yield a PATH with apptainer. The one that .ci/install-apptainer installs is copied out of root's home folder."""
    found = Path(str(shutil.which("apptainer", path=environ["PATH"])))
    prefix = found.parents[2]
    if os.geteuid() != 0 or not (prefix / PROGRAMS[1]).exists() or prefix == Path("/"):
        yield environ["PATH"]
        return
    with tempfile.TemporaryDirectory(prefix="hpc-rl-apptainer-", dir=within) as folder:
        Path(folder).chmod(0o755)
        copy = Path(folder) / "apptainer"
        shutil.copytree(prefix, copy, symlinks=True)
        libraries = copy / "usr/lib/x86_64-linux-gnu"
        for program in PROGRAMS:
            interpreter = ["--set-interpreter", str(libraries / "ld-linux-x86-64.so.2")]
            command = ["patchelf", "--force-rpath", "--set-rpath", str(libraries), *interpreter, str(copy / program)]
            subprocess.run(command, check=True, timeout=600)
        yield f"{environ['PATH']}:{copy}/usr/bin".replace(str(found.parent), "")
