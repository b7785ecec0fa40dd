"""Reads the recordings that `python -m tests.doctor.record` makes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import RunStatus

RECORDED = Path(__file__).parent / "recorded"
JOB_LOG = "job-local-7.log"


@dataclass(frozen=True)
class Recording:
    state: str
    files: dict[str, str]
    """Path in the run directory -> text."""

    def unpack(self, run: Path, state: str | None = None) -> tuple[RunDir, RunStatus]:
        """Write the run directory, with the state as recorded or as given."""
        for name, text in self.files.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(text)
        state = state or self.state
        status = {"job_id": "local-7", "state": state, "exit_code": int(state != "COMPLETED")}
        (run / "status.json").write_text(json.dumps(status))
        (run / "job.json").write_text(json.dumps({"job_id": "local-7", "host": "node1", "pid": 1, "start_time": 0}))
        return RunDir(run), RunStatus("first", str(run), "local-7", state, log=str(run / JOB_LOG))

    def with_lines(self, name: str, *lines: str) -> Recording:
        """Return the same run with further lines at the end of one of its files."""
        files = {**self.files, name: self.files.get(name, "") + "".join(f"{line}\n" for line in lines)}
        return Recording("FAILED", files)


def read(name: str) -> Recording:
    text = (RECORDED / f"{name}.txt").read_text()
    head, *parts = re.split(r"^==> (.+) <==\n", text, flags=re.MULTILINE)
    found = re.search(r"^# state: (.+)$", head, re.MULTILINE)
    assert found is not None
    return Recording(found[1], dict(zip(parts[::2], parts[1::2], strict=True)))
