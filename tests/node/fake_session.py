"""A session of training checks without torch.

    python -m tests.node.fake_session RANK RESULTS FOLDER LAUNCHER NAME=FATE...

Fates: pass; die (a rank writes why, and exits); kill (by a signal); hang; never and broken (no check starts).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hpc_rl.formats.acceptance import Launcher, Line, append, read, unfinished


def main(rank: int, results: Path, folder: Path, launcher: Launcher, fates: dict[str, str]) -> None:
    if rank > 0 or "never" in fates.values():
        signal.pause()
    if "broken" in fates.values():
        sys.exit("hpc-rl: no module named torch")
    lines = [Line(name, launcher, "planned", f"{name} is broken", f"{name}=off", deadline_s=1.0) for name in fates]
    known = {line.name for line in read(results)}
    append(results, [line for line in lines if line.name not in known])
    for line in unfinished(read(results), launcher):
        append(results, [Line(**{**line.__dict__, "state": "started"})])
        if fates[line.name] == "die":
            (folder / "rank0.error").write_text("RuntimeError: CUDA error")
            sys.exit(1)
        if fates[line.name] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fates[line.name] == "hang":
            signal.pause()
        append(results, [line.ended("passed", "well", 0.5)])


if __name__ == "__main__":
    words = dict(word.split("=") for word in sys.argv[5:])
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], words)  # type: ignore[arg-type]
