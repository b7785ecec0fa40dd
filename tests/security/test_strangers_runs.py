"""What a user opens may be another user's: a run, each of whose files can be anything, and commands on it.

The commands run as VICTIM, the run belongs to INTRUDER, or to VICTIM who has unpacked it from an archive.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.marks import long
from tests.security.strangers import KINDS, SECRET, Place, files_of, make_place
from tests.security.users import INTRUDER, VICTIM, Done, Terminal, needs_root

pytestmark = [pytest.mark.security, needs_root, pytest.mark.timeout(900)]
DEADLINE_S = 60
"""Of one command, however busy the machine is."""
COMMANDS = {
    "status": ["status", "RUN"],
    "status as JSON": ["status", "--json", "RUN"],
    "logs": ["logs", "RUN"],
    "logs of a node": ["logs", "--node", "0", "RUN"],
    "explain": ["explain", "RUN"],
    "watch": ["watch", "--once", "RUN"],
    "report": ["report", "RUN"],
    "runs": ["runs", "PARENT"],
    "runs as JSON": ["runs", "--json", "--sort", "val/loss", "PARENT"],
    "clean": ["clean", "RUN"],
    "verify": ["runs", "--verify", "RUN"],
    "wandb": ["wandb", "sync", "RUN"],
    "stop": ["stop", "RUN"],
    "cancel": ["cancel", "RUN"],
    "requeue": ["requeue", "RUN"],
    "attach": ["attach", "RUN", "true"],
    "explain a file": ["explain", "FILE"],
    "after": ["submit", "torchrun", "--dry-run", "--after", "RUN", "--", "true"],
}
QUICK_FILES = ("job.json", "status.json", "metrics.jsonl", "config.yaml", "job-7.log", "attempt-1/node0-usage.jsonl")
QUICK_KINDS = ("FIFO", "link", "huge", "texts")


@pytest.fixture
def place() -> Iterator[Place]:
    base = Path(tempfile.mkdtemp(prefix="hpc-rl-strangers-", dir="/tmp"))
    yield make_place(base)
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    home = Path(tempfile.mkdtemp(prefix="hpc-rl-home-", dir="/tmp"))
    os.chown(home, VICTIM, VICTIM)
    with Terminal(VICTIM, home) as found:
        yield found
    shutil.rmtree(home)


def problems(done: Done, name: str, place: Place, shows_control: bool = False) -> list[str]:
    """Return what is wrong with how a command ended."""
    found = [f"{name}: still waiting, or killed for its memory"] if done.code is None else []
    found += (
        [f"{name}: {done.messages[-1500:]}"] if "Traceback" in done.text or done.code not in (0, 1, 2, None) else []
    )
    found += [f"{name}: the private file is shown"] if SECRET in done.text else []
    found += [f"{name}: control characters"] if any(char in done.text for char in "\x1b\x07\x9b\u202e") else []
    return found


@pytest.mark.parametrize(
    ("kind", "owner"),
    [
        *((kind, INTRUDER) for kind in QUICK_KINDS),
        *(long(kind, INTRUDER) for kind in KINDS if kind not in QUICK_KINDS),
        *(long(kind, VICTIM) for kind in KINDS),
    ],
)
def test_every_file_can_be_anything(
    place: Place, terminal: Terminal, request: pytest.FixtureRequest, kind: str, owner: int
) -> None:
    """Each file of a run in turn, and all commands on it. `make test` tries some files only."""
    marks = request.config.getoption("-m")
    names = files_of(place.run) if "security" in str(marks) else QUICK_FILES
    found: list[str] = []
    whole = place.base / "whole"
    place.run.path.rename(whole)
    for name in names:
        shutil.copytree(whole, place.run.path)
        KINDS[kind](place.run.path / name, place)
        if kind != "hard link":
            place.give(place.run.path, owner)
        found += [f"{name}: {problem}" for problem in commands_on(place, terminal, place.run.path / name)]
        shutil.rmtree(place.run.path)
    assert not found, "\n".join(found[:20])


def commands_on(place: Place, terminal: Terminal, file: Path) -> Iterator[str]:
    words = {"RUN": str(place.run.path), "PARENT": str(place.run.path.parent), "FILE": str(file)}
    for name, command in COMMANDS.items():
        done = terminal.hpc_rl(*(words.get(word, word) for word in command), folder=place.home, deadline_s=DEADLINE_S)
        shown = "explain a file" if name == "explain a file" and file.is_symlink() else ""
        yield from (problem for problem in problems(done, name, place) if not shown or "private" not in problem)
    yield from place.lost()
