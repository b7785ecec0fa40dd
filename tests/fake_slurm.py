"""Slurm's programs that only write down how they were called: for what happens before and after a submission."""

from pathlib import Path

import pytest

_PROGRAMS = {
    "sbatch": """while [ -e "$0.hold" ]; do sleep 0.02; done
[ ! -e "$0.fails" ] || source "$0.fails"
cat "$0.text" 2> /dev/null || echo 7""",
    "squeue": """if [ -e "$0.text" ]; then cat "$0.text"; else echo Invalid job id specified >&2; exit 1; fi""",
    "scontrol": "echo Invalid job id specified >&2; exit 1",
    "scancel": """[ ! -e "$0.fails" ] || source "$0.fails\"""",
    "sinfo": "",
    "sacct": "",
}


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the programs on PATH; their folder. sbatch waits as long as there is sbatch.hold in it; squeue.text and
    sbatch.text are what these print; sbatch.fails and scancel.fails have commands with which they fail;
    PROGRAM.env has the variables of the last call.
    """
    programs = folder / "slurm"
    programs.mkdir()
    for name, lines in _PROGRAMS.items():
        path = programs / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "{programs}/calls"\nenv > "$0.env"\n{lines}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    return programs


def environment(programs: Path, program: str) -> dict[str, str]:
    """The variables with which a program was called last."""
    lines = (programs / f"{program}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def calls(folder: Path) -> list[str]:
    """What was called with which arguments, in order."""
    path = folder / "slurm" / "calls"
    return path.read_text().splitlines() if path.exists() else []
