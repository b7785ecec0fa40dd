"""A run directory of another user, each of whose files can be anything, and what a user must not lose to it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.run_dir import RunDir
from hpc_rl.training.checkpoints import checksums
from tests.security.users import INTRUDER, VICTIM
from tests.tracking.runs import make_run

SECRET = "correct-horse-battery-staple"
CONTROL = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;title\x07\x1b[2J\x9b2J\u202etxet\x1b[31m"
"""Writes to the clipboard, renames the window, clears it, and turns the text."""


@dataclass(frozen=True)
class Place:
    """Two homes on a machine, which all users can pass through."""

    base: Path

    @property
    def home(self) -> Path:
        """Of VICTIM."""
        return self.base / "victim"

    @property
    def secret(self) -> Path:
        """A file of VICTIM that others cannot read. It is a configuration, a log and a list of metrics at once."""
        return self.home / "private" / "secret.log"

    @property
    def run(self) -> RunDir:
        """A run of INTRUDER."""
        return RunDir(self.base / "intruder" / "runs" / "theirs")

    def give(self, path: Path, uid: int) -> None:
        """Give a folder and everything in it to a user."""
        for entry in (path, *path.rglob("*")):
            os.chown(entry, uid, uid, follow_symlinks=False)

    def lost(self) -> list[str]:
        """Return what VICTIM has lost."""
        found = [] if self.secret.read_text() == secret_text() else ["the file was overwritten"]
        readable = [path for path in self.home.rglob("*") if path.is_file() and path != self.secret]
        return found + [f"{path} has it" for path in readable if SECRET.encode() in path.read_bytes()]


def secret_text() -> str:
    return f"token: {SECRET}\n"


def make_place(base: Path) -> Place:
    base.chmod(0o755)
    place = Place(base)
    for folder, uid in ((place.home, VICTIM), (place.run.path.parents[1], INTRUDER)):
        folder.mkdir(mode=0o755)
        os.chown(folder, uid, uid)
    place.secret.parent.mkdir(mode=0o700)
    place.secret.write_text(secret_text())
    place.secret.chmod(0o600)
    place.give(place.home, VICTIM)
    make_whole_run(place.run)
    place.give(place.run.path.parents[1], INTRUDER)
    return place


def make_whole_run(run: RunDir) -> None:
    """Make a run that has failed, with every file that commands read."""
    make_run(run.path.parent, run.name, exit_code=1)
    job = {"job_id": "7", "kind": "eval", "submitted": "2026-01-01T00:00:00+0000", "command": ["hpc-rl"], "after": "6"}
    plan = {"phase": "training", "peak_gb": 1, "usable_gb": 2, "training_gb": 1, "less": [], "step_s": [1, 2]}
    job |= {"working_dir": str(run.path), "host": "login", "nodes": "n1", "lends_to": "/runs/math"}
    run.job.write_text(json.dumps({**job, "plan": plan}))
    run.write_status("7", 1, "FAILED", 1)
    run.script.write_text("#!/bin/bash\n#SBATCH --time=1\ntrue\n")
    metric = {"value": 0.5, "low": 0.4, "high": 0.6, "prompts": 9}
    data = {"file": "x", "name": "x", "prompts": 9, "failed": 0, "truncated": 0.0, "metrics": {"score": metric}}
    run.evaluation.write_text(json.dumps({"n": 1, "temperature": 1.0, "interval": "95 %", "data": [data]}))
    attempt = run.path / "attempt-1"
    texts = {
        run.stop: "user\n",
        run.lock: "7\n",
        run.path / ".submission": "",
        run.losses: "7 1 n1\n",
        run.git: "commit 1\n",
        run.responses: '{"prompt": "1", "response": "2", "score": 0.5}\n',
        run.selected: '{"messages": []}\n',
        run.endpoint: '{"url": "http://127.0.0.1:1", "key": "x"}\n',
        run.report: "<html>",
        run.path / "job-7.log": "hpc-rl: it failed\nValueError: x\n",
        attempt / "config.yaml": run.config.read_text(),
        attempt / ".outcome": "1\n",
        attempt / ".lost": "n1\n",
        attempt / ".job-end": "1\n",
        attempt / ".terminated": "TIMEOUT\n",
        attempt / ".hang": "rank 0 hangs\n",
        attempt / "flight-rank0": "x",
        attempt / "node0.log": "node\n",
        attempt / "node0-rank0.log": "rank\nValueError: x\n",
        attempt / "node0-driver.log": "driver\n",
        attempt / "ray" / "raylet.err": "Ray\n",
        run.model / "config.json": '{"architectures": ["Qwen2ForCausalLM"]}',
        run.path / "wandb" / "offline-run-1" / "run-1.wandb": ":W&B\x00 and more",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    make_checkpoint(run.checkpoints / "step-00000001")


def make_checkpoint(path: Path) -> None:
    """Make a checkpoint whose contents are no tensors, with correct checksums."""
    part = path / "model"
    files = {".metadata": "x", "__0_0.distcp": "x", "hf/config.json": "{}", "hf/tokenizer.json": "{}"}
    for name, text in files.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_text(text)
    progress = {"samples": 1, "dtype": "float32", "parts": ["model"], "step": 1}
    (path / "trainer.json").write_text(json.dumps(progress))
    correct_checksums(path)


def correct_checksums(path: Path) -> None:
    part = path / "model"
    names = [str(file.relative_to(part)) for file in part.rglob("*") if file.is_file() and file.name != checksums.NAME]
    checksums.write(part, {name: checksums.of_file(part / name) for name in names})
    checksums.write(
        path, {name: checksums.of_file(path / name) for name in ("trainer.json", f"model/{checksums.NAME}")}
    )


def files_of(run: RunDir) -> list[str]:
    """Return the names of all files and of some folders of a run."""
    folders = ["attempt-1", "checkpoints", "checkpoints/step-00000001", "model", "wandb"]
    return folders + sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())


def _in_place(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _sparse(path: Path) -> None:
    with _in_place(path).open("wb") as file:
        file.truncate(2**40)


def _wrong_types(path: Path, place: Place) -> None:
    """Write the same keys with values of other types; a text if the file is not JSON."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    values = ["x" + CONTROL, [], {}, None, True, -1, 1e308, 10**300, ["a", ["b"]], {"a": {"b": []}}]
    changed = []
    for line in lines or ["{}"]:
        try:
            found = json.loads(line)
        except ValueError:
            found = {}
        keys = found if isinstance(found, dict) else {}
        changed += [json.dumps({**keys, key: value}) for key in [*keys, "step", "time"] for value in values]
        changed += [json.dumps(dict.fromkeys([*keys, "step"], value)) for value in values]
    _in_place(path).write_text("\n".join(changed[:: max(1, len(changed) // 5000)]) + "\n")


def _one_wrong_type(value: object) -> Callable[[Path, Place], None]:
    """Replace each value of a file with one JSON object, so that the file remains one."""

    def plant(path: Path, place: Place) -> None:
        try:
            found = json.loads(path.read_text().splitlines()[0]) if path.is_file() else {}
        except (ValueError, IndexError):
            found = {}
        keys = found if isinstance(found, dict) else {}
        _in_place(path).write_text(json.dumps(dict.fromkeys([*keys, "step", "time"], value)) + "\n")

    return plant


def bomb() -> str:
    """Return a small YAML file that stands for 10^12 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join(lines) + "\n"


KINDS: dict[str, Callable[[Path, Place], object]] = {
    "FIFO": lambda path, _: os.mkfifo(_in_place(path), 0o666),
    "link": lambda path, place: _in_place(path).symlink_to(place.secret),
    "link to a folder": lambda path, place: _in_place(path).symlink_to(place.secret.parent),
    "link to a device": lambda path, _: _in_place(path).symlink_to("/dev/zero"),
    "hard link": lambda path, place: os.link(place.secret, _in_place(path)),
    "directory": lambda path, _: _in_place(path).mkdir(),
    "device": lambda path, _: os.mknod(_in_place(path), 0o20666, os.makedev(1, 5)),
    "huge": lambda path, _: _sparse(path),
    "empty": lambda path, _: _in_place(path).write_bytes(b""),
    "binary": lambda path, _: _in_place(path).write_bytes(bytes(range(256)) * 256 + CONTROL.encode() + b"\n"),
    "wrong types": _wrong_types,
    "texts": _one_wrong_type("-1" + CONTROL),
    "lists": _one_wrong_type([[], {}]),
    "large numbers": _one_wrong_type(10**300),
    "negative numbers": _one_wrong_type(-1),
    "nested": lambda path, _: _in_place(path).write_text("[" * 100_000),
    "a nested value": lambda path, _: _in_place(path).write_text('{"step": ' + "[" * 100_000 + "\n"),
    "aliases": lambda path, _: _in_place(path).write_text(bomb()),
}
"""What can be in place of a file. A hard link needs a kernel that admits it (fs.protected_hardlinks=0)."""
