"""A stand-in for apptainer that writes down what it was given, and does as it is told."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers import write_python_program

_TEXT = """\
import json, os, signal, sys, time
words = [word for word in sys.argv[1:] if word != "--silent"]
if words == ["--version"]:
    print("apptainer version 1.4.5")
    sys.exit()
if words == ["buildcfg"]:
    print(os.environ.get("FAKE_BUILDCFG", "APPTAINER_SUID_INSTALL=0"))
    sys.exit()
file = words[words.index("--env-file") + 1] if "--env-file" in words else None
seen = {{"argv": words, "env": dict(os.environ)}}
if file:
    seen |= {{"env_file": open(file).read(), "env_mode": oct(os.stat(file).st_mode & 0o777)}}
with open({log!r}, "a") as log:
    log.write(json.dumps(seen) + "\\n")
how = os.environ.get("FAKE_" + words[0].upper(), "0")
if words[0] == "build":
    print("INFO:    Starting build...", os.environ.get("FAKE_SAYS", ""), flush=True)
    if "--sandbox" in words:
        os.makedirs(words[-2] + "/usr/read-only")
        os.chmod(words[-2] + "/usr/read-only", 0o555)
    else:
        content = {sif!r}
        open(words[-2], "wb").write(content if how == "0" else content[:70])
if how == "slow":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    open({log!r} + ".started", "w").close()
    time.sleep(60)
if how == "137":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""


def sif_bytes(architecture: bytes = b"02", size: int = 300, magic: bytes = b"SIF_MAGIC\0") -> bytes:
    """The smallest file that passes for a SIF."""
    numbers = (0, 0, 0, 0, 0, 0, 128, size - 128)
    header = struct.pack(
        "<32s10s3s3s16s8q", b"#!/usr/bin/env run-singularity\n", magic, b"01", architecture, b"", *numbers
    )
    return header.ljust(size, b"x")


class FakeApptainer:
    """On a PATH of its own: `environ` has it in front. FAKE_EXEC and FAKE_BUILD say how it ends."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        folder.mkdir()
        self.log = folder / "log"
        write_python_program(folder / "apptainer", _TEXT.format(log=str(self.log), sif=sif_bytes()), "-SE")
        self.environ = {**environ, "PATH": f"{folder}:{environ['PATH']}"}

    @property
    def started(self) -> Path:
        """Is there once a slow one has begun."""
        return Path(f"{self.log}.started")

    def calls(self, command: str) -> list[dict[str, Any]]:
        """What each call of a command was given: argv, env, and the environment file's text and mode."""
        if not self.log.exists():
            return []
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [call for call in found if call["argv"][0] == command]
