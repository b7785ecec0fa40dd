"""Offline runs as wandb writes them, and wandb's own upload of them to a server of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.wandb_sync import is_uploaded, offline_runs
from tests.tracking.wandb_server import WandbServer, wandb_server

KEY = "0123456789abcdef0123456789abcdef01234567"
WRITER = """
import os, sys, time
from pathlib import Path
from hpc_rl.config.compose import compose
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.tracker import Tracker

folder, wandb_id, first, last, end = sys.argv[1:]
words = ["model.path=m", "data.train_files=a", "trainer.logger=[wandb]", "trainer.project_name=p"]
config = compose("sft", [*words, "trainer.wandb_mode=offline"])
tracker = Tracker(config, RunDir(Path(folder)), wandb_id or None, is_main=True)
for step in range(int(first), int(last) + 1):
    tracker.log(step, {"train/loss": 1 / step, **{f"many/{k}": k + step for k in range(40)}}, total_steps=100)
if end == "finish":
    tracker.finish()
else:
    print("written", flush=True)
    time.sleep(60)
"""


def environment(home: Path, **changes: str) -> dict[str, str]:
    """No way to any account but the one given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**kept, "HOME": str(home), "NETRC": str(home / "netrc"), **changes}


def attempt(run: Path, wandb_id: str, first: int, last: int) -> str:
    """One attempt of a run, in a process of its own as in a job; the wandb id."""
    command = [sys.executable, "-c", WRITER, str(run), wandb_id, str(first), str(last), "finish"]
    subprocess.run(command, env=environment(run), check=True, timeout=600, capture_output=True)
    return offline_runs(RunDir(run))[-1].stem.removeprefix("run-")


def killed_attempt(run: Path, wandb_id: str, first: int, last: int) -> None:
    """The same, killed while it runs, as when a node is lost."""
    command = [sys.executable, "-c", WRITER, str(run), wandb_id, str(first), str(last), "sleep"]
    with subprocess.Popen(
        command, env=environment(run), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        deadline = time.monotonic() + 600
        while offline_runs(RunDir(run))[-1].stat().st_size < 100_000:
            assert time.monotonic() < deadline, "wandb has written nothing"
            time.sleep(0.05)
        os.killpg(writer.pid, signal.SIGKILL)


def next_second() -> None:
    """wandb names its folders by the second."""
    now = int(time.time())
    while int(time.time()) == now:
        time.sleep(0.02)


def sync(run: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_rl.cli", "wandb", "sync", str(run)]
    environ = {"WANDB_API_KEY": KEY, **environ}
    return subprocess.run(
        command, cwd=run.parent, env=environment(run.parent, **environ), capture_output=True, text=True, timeout=600
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("trainer: {wandb_proxy: null}\nslurm: {python: null}\n")
    return tmp_path / "mine"


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as started:
        yield started


def test_a_run_in_three_attempts_is_one_run_there(run: Path, server: WandbServer) -> None:
    wandb_id = attempt(run, "", 1, 3)
    next_second()
    killed_attempt(run, wandb_id, 4, 400)
    next_second()
    assert attempt(run, wandb_id, 401, 402) == wandb_id
    killed = offline_runs(RunDir(run))[1]
    os.truncate(killed, killed.stat().st_size - 1)  # wandb may have come to the end of a record
    done = sync(run, WANDB_BASE_URL=server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line["step"] for _, line in sorted(server.history[wandb_id].items())]
    assert list(server.history) == [wandb_id] and steps[:4] == [1, 2, 3, 4] and steps[-2:] == [401, 402]
    assert steps == sorted(steps) and len(steps) > 50, "the killed attempt's lines are there, up to the last ones"
    lines = done.stdout.splitlines()
    assert ["which is incomplete: the attempt was killed" in line for line in lines] == [False, True, False, False]
    assert lines[3] == f"  {server.url}/me/p/runs/{wandb_id}"
    assert "all 3 offline wandb runs are already uploaded" in sync(run, WANDB_BASE_URL=server.url).stdout
    assert all(key and key.startswith("Basic ") for path, key in server.requests if path == "/graphql")
    written = "".join(file.read_text(errors="replace") for file in run.rglob("*") if file.is_file())
    assert KEY not in done.stdout + done.stderr + written
    assert not (run.parent / "wandb").exists()


def test_what_has_grown_since_it_was_uploaded_is_new(run: Path) -> None:
    folder = run / "wandb" / "offline-run-20260101_000000-abc"
    folder.mkdir(parents=True)
    file, mark = folder / "run-abc.wandb", folder / "run-abc.wandb.synced"
    file.write_bytes(b"opened!")
    assert offline_runs(RunDir(run)) == [], "nothing was written yet"
    file.write_bytes(bytes(100))
    assert offline_runs(RunDir(run)) == [file] and not is_uploaded(file)
    mark.touch()
    assert is_uploaded(file)
    os.utime(file, (time.time() + 5, time.time() + 5))
    assert not is_uploaded(file)


def test_mistakes_are_a_line_and_the_proxy_of_the_run_is_used(run: Path, server: WandbServer) -> None:
    none = sync(run)
    assert none.returncode == 2 and "run mine has no offline wandb runs" in none.stderr
    attempt(run, "", 1, 2)
    no_login = sync(run, WANDB_API_KEY="", WANDB_BASE_URL=server.url)
    assert no_login.returncode == 2 and "wandb has no login on this machine: run `wandb login`" in no_login.stderr
    without = sync(run, PYTHONPATH=f"{without_wandb(run.parent)}:{os.environ.get('PYTHONPATH', '')}")
    assert without.returncode == 2 and "wandb is not installed here" in without.stderr
    server.status = 401
    refused = sync(run, WANDB_BASE_URL=server.url)
    assert refused.returncode == 1 and "wandb could not upload: " in refused.stderr
    assert "the key is not known here" in refused.stderr + (run / "wandb" / "sync.log").read_text()
    began = time.monotonic()
    unreachable = sync(run, WANDB_BASE_URL="http://127.0.0.1:9", WANDB__GRAPHQL_RETRY_MAX="1")
    assert unreachable.returncode == 1 and "wandb could not upload" in unreachable.stderr
    assert time.monotonic() - began < 600, "wandb's own settings would try for twenty minutes"
    for done in (none, no_login, without, refused, unreachable):
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1

    server.status = 200
    server.requests.clear()
    (run / "config.yaml").write_text(f"trainer: {{wandb_proxy: '{server.url}'}}\n")
    through_proxy = sync(run, WANDB_BASE_URL="http://wandb.invalid")
    assert through_proxy.returncode == 0, through_proxy.stdout + through_proxy.stderr
    assert server.requests[0][0] == "http://wandb.invalid/graphql"


def without_wandb(folder: Path) -> Path:
    """A folder for PYTHONPATH whose sitecustomize hides the wandb package."""
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.machinery as m\n"
        "find = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(\n"
        "    lambda cls, name, *more: None if name == 'wandb' else find(name, *more))\n"
    )
    return hidden
