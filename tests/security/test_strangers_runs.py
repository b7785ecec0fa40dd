"""What a user opens may be another user's: a run, each of whose files can be anything, and commands on it.

The commands run as VICTIM, the run belongs to INTRUDER, or to VICTIM who has unpacked it from an archive.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.run_dir import RunDir
from tests.marks import long
from tests.security.strangers import CONTROL, KINDS, SECRET, Place, correct_checksums, files_of, make_place
from tests.security.users import INTRUDER, REPOSITORY, VICTIM, Done, Terminal, as_ordinary, needs_root
from tests.tracking.runs import make_run

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
    "lend": ["lend", "--dry-run", "RUN"],
    "attach": ["attach", "RUN", "true"],
    "explain a file": ["explain", "FILE"],
    "after": ["submit", "torchrun", "--dry-run", "--after", "RUN", "--", "true"],
}
ALONE = (
    *("job.json", "status.json", "config.yaml", "metrics.jsonl", "job-7.log", ".lock", "attempt-1/node0-usage.jsonl"),
    *("attempt-1", "checkpoints", "checkpoints/step-00000001", "model", "wandb"),
)
"""Files and folders on which it depends what else is read. All others are planted together."""
QUICK_FILES, QUICK_KINDS = ALONE[:5], ("FIFO", "link", "huge", "texts")
"""What `make test` tries."""
OWN_KINDS = (*QUICK_KINDS, "link to a folder", "nested", "aliases")


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


def problems(done: Done, name: str) -> list[str]:
    """Return what is wrong with how a command ended."""
    found = [f"{name}: still waiting, or killed for its memory"] if done.code is None else []
    found += (
        [f"{name}: {done.messages[-1500:]}"] if "Traceback" in done.text or done.code not in (0, 1, 2, None) else []
    )
    found += [f"{name}: the private file is shown"] if SECRET in done.text else []
    found += [f"{name}: control characters"] if any(char in done.text for char in "\x1b\x07\x9b\u202e") else []
    return found


@pytest.mark.parametrize(
    ("kind", "owner", "is_whole"),
    [
        *((kind, INTRUDER, False) for kind in QUICK_KINDS),
        *(long(kind, INTRUDER, True) for kind in KINDS),
        *(long(kind, VICTIM, True) for kind in OWN_KINDS),
    ],
)
def test_every_file_can_be_anything(place: Place, terminal: Terminal, kind: str, owner: int, is_whole: bool) -> None:
    """Each file of a run in turn, and all commands on it."""
    together = tuple(name for name in files_of(place.run) if name not in ALONE)
    cases = [*((name,) for name in ALONE), together] if is_whole else [(name,) for name in QUICK_FILES]
    found: list[str] = []
    whole = place.base / "whole"
    place.run.path.rename(whole)
    for names in cases:
        shutil.copytree(whole, place.run.path)
        for name in names:
            KINDS[kind](place.run.path / name, place)
        if kind != "hard link":
            place.give(place.run.path, owner)
        found += [f"{names[:3]}: {problem}" for problem in commands_on(place, terminal, place.run.path / names[0])]
        shutil.rmtree(place.run.path)
    assert not found, "\n".join(found[:20])


def commands_on(place: Place, terminal: Terminal, file: Path) -> Iterator[str]:
    words = {"RUN": str(place.run.path), "PARENT": str(place.run.path.parent), "FILE": str(file)}
    for name, command in COMMANDS.items():
        done = terminal.hpc_rl(*(words.get(word, word) for word in command), folder=place.home, deadline_s=DEADLINE_S)
        may_show = name == "explain a file"  # VICTIM names this file, which may be a link to one of VICTIM's
        yield from (problem for problem in problems(done, name) if not (may_show and "is shown" in problem))
    yield from place.lost()


# What belongs to another user is read as data


@pytest.mark.parametrize(
    "words", [["wandb", "sync"], ["attach"], ["stop"], ["cancel"], ["requeue"], ["lend"]], ids=" ".join
)
def test_what_acts_for_the_user_refuses_the_run_of_another(place: Place, terminal: Terminal, words: list[str]) -> None:
    done = terminal.hpc_rl(*words, str(place.run.path), folder=place.home)
    assert done.code == 2 and "belongs to" in done.messages and not done.out, done.text


def test_the_python_of_another_users_run_is_not_started(place: Place) -> None:
    """wandb is not installed for the user, and the run's Python is one that INTRUDER has written."""
    python = place.base / "intruder" / "python"
    python.write_text(f'#!/bin/sh\necho "$WANDB_API_KEY" > {place.home}/started\n')
    python.chmod(0o755)
    place.run.latest_settings.write_text(f"slurm:\n  python: {python}\ntrainer:\n  wandb_proxy: http://127.0.0.1:9\n")
    without = place.home / "without"
    without.mkdir()
    (without / "sitecustomize.py").write_text(WITHOUT_WANDB)
    with Terminal(VICTIM, place.home, PYTHONPATH=f"{without}:{REPOSITORY}", WANDB_API_KEY="k" * 40) as terminal:
        done = terminal.hpc_rl("wandb", "sync", str(place.run.path))
        assert done.code == 2 and f"belongs to user {INTRUDER}" in done.messages, done.text
        assert not (place.home / "started").exists()
        own = place.home / "own"  # a run of one's own may name the Python of its job
        shutil.copytree(place.run.path, own)
        place.give(own, VICTIM)
        terminal.hpc_rl("wandb", "sync", str(own))
        assert (place.home / "started").read_text() == "k" * 40 + "\n"


WITHOUT_WANDB = """
import importlib.machinery, sys

class Finder:
    def find_spec(name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, None) if name == "wandb" else None

sys.meta_path.insert(0, Finder)
"""


def test_the_id_of_a_job_is_no_path(place: Place, terminal: Terminal) -> None:
    (place.run.path / "job-..").mkdir()
    way = os.path.relpath(place.secret.with_suffix(""), place.run.path / "job-..")
    for record in (place.run.job, place.run.status):
        record.write_text(json.dumps({"job_id": f"../{way}", "state": "FAILED", "exit_code": 1, "attempt": 1}))
    place.give(place.run.path, INTRUDER)
    for command in ("status", "logs", "explain", "report"):
        assert SECRET not in terminal.hpc_rl(command, str(place.run.path), folder=place.home).text
    assert not place.lost()


def test_the_report_about_another_users_run_is_written_here(place: Place, terminal: Terminal) -> None:
    before = (place.run.report.read_bytes(), sorted(place.run.path.iterdir()))
    done = terminal.hpc_rl("report", str(place.run.path), folder=place.home)
    assert (done.code, done.out) == (0, "report.html\n") and b"theirs" in (place.home / "report.html").read_bytes()
    assert (place.run.report.read_bytes(), sorted(place.run.path.iterdir())) == before


def test_no_link_is_followed_where_another_user_can_write(place: Place, terminal: Terminal) -> None:
    """INTRUDER guesses the temporary name, and plants links under it as fast as possible."""
    shared = place.base / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    lines = f"""
import os
while True:
    first = int(open("/proc/loadavg").read().split()[-1])
    for pid in range(first, first + 20):
        try:
            os.symlink("{place.secret}", f"{shared}/.page.html.{os.uname().nodename}.{{pid}}.partial")
        except FileExistsError:
            pass
"""
    planting = subprocess.Popen(as_ordinary(INTRUDER, sys.executable, "-c", lines))
    try:
        for _ in range(6):
            terminal.hpc_rl("report", str(place.run.path), "--out", str(shared / "page.html"), folder=place.home)
    finally:
        planting.kill()
        planting.wait()
    assert any(shared.iterdir()) and not place.lost()


def test_a_damaged_run_costs_a_line(place: Place, terminal: Terminal) -> None:
    good = RunDir(place.run.path.parent / "good")
    make_run(good.path.parent, "good")
    good.write_status("8", 1, "COMPLETED", 0)
    for name in ("job.json", "status.json", "metrics.jsonl", "attempt-1/node0-usage.jsonl"):
        KINDS["texts"](place.run.path / name, place)
    place.run.samples.unlink()
    os.mkfifo(place.run.samples)
    place.give(place.run.path.parent, INTRUDER)
    done = terminal.hpc_rl("runs", str(place.run.path.parent), folder=place.home)
    row = next(line for line in done.out.splitlines() if line.startswith("good"))
    assert done.code == 0 and "COMPLETED" in row and "20/20" in row
    notes = done.messages.splitlines()
    assert [line.split(": ")[1].rpartition("/")[2] for line in notes] == ["samples.jsonl is left out", *(
        f"{name} is left out" for name in ("job.json", "status.json")
    )], notes  # fmt: skip


@pytest.mark.slow
def test_an_export_runs_nothing(place: Place, terminal: Terminal) -> None:
    place.give(place.run.path, 0)
    step = place.run.checkpoints / "step-00000001"
    created = place.home / "created"
    program = b"cposix\nmkdir\n(V" + str(created).encode() + b"\ntR."
    (step / "model" / ".metadata").write_bytes(program)
    correct_checksums(step)
    for uid in (INTRUDER, VICTIM):
        place.give(place.run.path, uid)
        for source in (place.run.path, step):
            done = terminal.hpc_rl("export", str(source), str(place.home / "out"), folder=place.home, deadline_s=600)
            assert done.code == 2 and "posix.mkdir, which hpc-rl does not admit" in done.messages, done.text
    assert not created.exists() and not (place.home / "out").exists()


def test_no_control_character_reaches_the_terminal(place: Place, terminal: Terminal) -> None:
    """They are in the names of columns, in texts of the data, and in a log."""
    data = place.base / "intruder" / "data.jsonl"
    rows = [{f"role{CONTROL}": CONTROL, "messages": [{"role": CONTROL, "content": CONTROL}]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = place.run.path / "job-7.log"
    log.write_text(f"{CONTROL}\nhpc-rl: {CONTROL}\nRuntimeError: CUDA out of memory {CONTROL}\n\x1b[32mgreen\x1b[0m\n")
    place.give(place.base / "intruder", INTRUDER)
    for words in (["data", "check", str(data)], *(command for command in COMMANDS.values() if "RUN" in command)):
        done = terminal.hpc_rl(*(str(place.run.path) if word == "RUN" else word for word in words), folder=place.home)
        assert problems(done, words[0]) == [], words
    shown = terminal.hpc_rl("logs", str(place.run.path)).out
    assert r"\x1b]52;c;cm0gLXJmIH4=\x07" in shown and shown.endswith("\ngreen\n")


def test_nothing_is_deleted_through_a_link_or_of_another_user(place: Place, terminal: Terminal) -> None:
    own, other = place.home / "runs" / "own", place.home / "runs" / "other"
    for path in (own, other):
        shutil.copytree(place.run.path, path)
    (place.home / "runs" / "link").symlink_to(own)
    place.give(place.home / "runs", VICTIM)
    place.give(other / "attempt-1" / "ray", INTRUDER)
    before = sorted(place.home.rglob("*"))
    for name, said in {"link": "is a link to", "other": "attempt-1/ray belongs to another user"}.items():
        done = terminal.hpc_rl("clean", "own", name, "--whole", "--yes", folder=place.home)
        assert done.code == 2 and f"nothing was removed: {place.home}/runs/{name}" in done.messages, done.text
        assert said in done.messages and sorted(place.home.rglob("*")) == before
    done = terminal.hpc_rl("clean", str(place.run.path), "--whole", "--yes", folder=place.home)
    assert done.code != 0 and place.run.metrics.exists()
    done = terminal.hpc_rl("clean", "own", "--whole", "--yes", folder=place.home)
    assert done.code == 0 and not own.exists() and other.exists(), done.text
