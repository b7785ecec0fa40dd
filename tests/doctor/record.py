"""Record the logs of real runs for the tests of `hpc-rl explain`.

    python -m tests.doctor.record [CASE ...]

Each case of CASES is run with `hpc-rl submit KIND --local` (two nodes' worth of processes on this machine, on CPUs),
and the faults are real: a full file system, a killed process, a program that raises. `recorded/CASE.txt` then holds the
state and the logs of the run, cut to their first and last lines and the lines between them that look like trouble.
Names and addresses of the machine are replaced. The cases with a full disk need the right to mount a file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_rl.data.arithmetic import generate
from hpc_rl.doctor.known_failures import KNOWN_FAILURES
from hpc_rl.run_dir import RunDir
from tests.doctor.recordings import RECORDED
from tests.helpers import make_tiny_model

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 600
OWN_LINES, RAY_LINES = (12, 40, 25), (3, 9, 12)
"""Lines of a file that are kept: the first, the last, and those between that look like trouble."""
WIDEST = 500
LOGS = (".log", ".out", ".err")
_KEYS = [max(pattern.split("*"), key=len).lower() for failure in KNOWN_FAILURES for pattern in failure.patterns]


@dataclass(frozen=True)
class Case:
    command: Sequence[str]
    """What follows `hpc-rl`; {w} is the workspace, {p} the folder of the programs."""
    fault: Callable[[Path, Path], None] | None = None
    """What is done to the run while it runs (workspace, run directory)."""
    prepare: Callable[[Path], None] | None = None
    """What is done to the workspace before the run."""
    environ: dict[str, str] = field(default_factory=dict)


def torchrun(program: str, *arguments: str, options: Sequence[str] = ()) -> Case:
    command = ("submit", "torchrun", "--local", "--nodes", "2", "--run-dir", "{w}/runs/first", "trainer.device=cpu")
    return Case((*command, *options, "--", f"{{p}}/{program}.py", *arguments))


def ray(program: str, *arguments: str, options: Sequence[str] = ()) -> Case:
    command = ("submit", "ray", "--local", "--nodes", "2", "--run-dir", "{w}/runs/first", "trainer.device=cpu")
    return Case((*command, *options, "--", "python", f"{{p}}/{program}.py", *arguments))


def sft(*options: str, **more: object) -> Case:
    command = ("submit", "sft", "--local", "--nodes", "2", "--run-dir", "{w}/runs/first", "trainer.device=cpu")
    data = ("model.path={w}/model", "data.train_files={w}/train.jsonl", "data.val_files={w}/val.jsonl")
    short = ("data.max_length=64", "data.train_batch_size=16", "trainer.total_training_steps=3")
    return Case((*command, *data, *short, *options), **more)  # type: ignore[arg-type]


def ppo(*options: str, **more: object) -> Case:
    command = ("submit", "ppo", "--local", "--nodes", "2", "--run-dir", "{w}/runs/first", "trainer.device=cpu")
    data = ("model.path={w}/model", "data.train_files={w}/train.jsonl", "data.val_files={w}/val.jsonl")
    short = ("data.max_prompt_length=48", "data.max_response_length=8", "reward.function=exact")
    sizes = ("data.train_batch_size=8", "rollout.n=2", "actor.mini_batch_size=16", "trainer.total_training_steps=3")
    return Case((*command, *data, *short, *sizes, *options), **more)  # type: ignore[arg-type]


LONG = ("trainer.total_training_steps=100000", "trainer.test_freq=0")


def kill(pattern: str) -> Callable[[Path, Path], None]:
    """Kill a process of the run, by its command line, once the first step is over."""

    def fault(_workspace: Path, run: Path) -> None:
        wait_for(lambda: (run / "metrics.jsonl").exists())
        victims = [pid for pid, line in processes_of(run) if re.search(pattern, line)]
        os.kill(max(victims), signal.SIGKILL)

    return fault


def occupy(port: int) -> Callable[[Path], None]:
    def prepare(_workspace: Path) -> None:
        taken.append(socket.create_server(("0.0.0.0", port)))

    return prepare


taken: list[socket.socket] = []


def full_disk(_workspace: Path, run: Path) -> None:
    """Put a file system that is too small below the checkpoints, and ask the run to save and stop."""
    wait_for(lambda: (run / "metrics.jsonl").exists())
    (run / "checkpoints").mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(run / "checkpoints")], check=True)
    (run / "stop").write_text("stop")


def bad_row(workspace: Path) -> None:
    """A row behind those that submission looks at."""
    rows = (workspace / "train.jsonl").read_text().splitlines(keepends=True)
    many = (rows * (1 + 10_100 // len(rows)))[:10_100]
    (workspace / "train.jsonl").write_text("".join(many) + '{"question": 7}\n')


def small_vocabulary(workspace: Path) -> None:
    """A model with fewer embeddings than its tokenizer has tokens."""
    make_tiny_model(workspace / "other", vocab=320)
    make_tiny_model(workspace / "model", vocab=259, tie=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(workspace / "other" / name, workspace / "model" / name)


def broken_weights(workspace: Path) -> None:
    """A config.json that describes a wider model than the weights."""
    config = workspace / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 256}))


CASES: dict[str, Case] = {
    "good-sft": sft(),
    "good-ppo": ppo(),
    "good-torchrun": torchrun("reduce"),
    "good-ray": ray("tasks"),
    "good-doctor": Case(("doctor", "--local", "--on-nodes", "2", "--run-dir", "{w}/runs/first", "trainer.device=cpu")),
    "sft-killed-rank": sft(*LONG, fault=kill(r"^\S+ -P -m hpc_rl\.(node\.rank|finetune\.train)")),
    "sft-full-disk": sft(*LONG, fault=full_disk),
    "sft-bad-row": sft(prepare=bad_row),
    "sft-not-finite": sft("optim.lr=1e20", "optim.clip_grad=0"),
    "sft-not-cached": sft("model.path=nobody/none", environ={"HF_HUB_OFFLINE": "1"}),
    "sft-small-vocabulary": sft(prepare=small_vocabulary),
    "sft-broken-weights": sft(prepare=broken_weights),
    "torchrun-missing-module": torchrun("faults", "module"),
    "torchrun-shapes": torchrun("faults", "shapes"),
    "torchrun-dtypes": torchrun("faults", "dtypes"),
    "torchrun-raises": torchrun("faults", "raises"),
    "torchrun-port": torchrun("faults", "port"),
    "torchrun-files": torchrun("faults", "files"),
    "torchrun-hangs": torchrun("faults", "hangs"),
    "torchrun-killed": torchrun("faults", "killed"),
    "torchrun-segfault": torchrun("faults", "segfault"),
    "torchrun-cuda": torchrun("faults", "cuda"),
    "torchrun-disk": torchrun("faults", "disk"),
    "torchrun-permission": torchrun("faults", "permission"),
    "ray-missing-module": ray("ray_faults", "module"),
    "ray-memory": ray("ray_faults", "memory", options=["slurm.env.RAY_memory_usage_threshold=0.01"]),
    "ray-killed-actor": ray("ray_faults", "killed"),
    "ray-placement-group": ray("ray_faults", "placement"),
    "ray-port": Case(ray("tasks", options=["ray.first_port=23456"]).command, prepare=occupy(23460)),
    "ray-start-timeout": ray("tasks", options=["ray.start_timeout_s=1"]),
    "ppo-killed-raylet": ppo(*LONG, fault=kill(r"raylet/raylet")),
    "ppo-killed-worker": ppo(*LONG, fault=kill(r"^ray::Worker")),
    "ppo-killed-gcs": ppo(*LONG, fault=kill(r"gcs_server")),
    "ppo-reward-raises": ppo("reward.function={p}/raising_reward.py:score"),
    "ppo-reward-imports": ppo("reward.function={p}/importing_reward.py:score"),
    "ppo-not-finite": ppo(
        "reward.function={p}/varied_reward.py:score", "actor.optim.lr=1e20", "actor.optim.clip_grad=0"
    ),
    "ppo-small-vocabulary": ppo(prepare=small_vocabulary),
}


def main(names: Sequence[str]) -> None:
    for name in names or CASES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="record") as folder:
            workspace = Path(folder)
            make_tiny_model(workspace / "model", tie=True)
            generate(workspace, 64, 8, seed=0)
            try:
                state, shown = run(CASES[name], workspace)
                text = recording(name, CASES[name], state, RunDir(workspace / "runs" / "first"), workspace)
            finally:
                checkpoints = workspace / "runs" / "first" / "checkpoints"
                if checkpoints.is_mount():
                    subprocess.run(["umount", "-l", str(checkpoints)], check=True)
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{name}.txt").write_text(text)
        print(f"{name}: {state}, {len(text):,} bytes, {time.monotonic() - began:.0f} s\n{shown}", flush=True)


def run(case: Case, workspace: Path) -> tuple[str, str]:
    """Run it to its end: (its state, the end of what the command printed)."""
    if case.prepare is not None:
        case.prepare(workspace)
    words = [word.replace("{w}", str(workspace)).replace("{p}", str(PROGRAMS)) for word in case.command]
    run_dir = workspace / "runs" / "first"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **case.environ}
    output = (workspace / "output.txt").open("w+b")
    program = ["-c", KEEPING] if words[0] == "doctor" else ["-m", "hpc_rl.cli"]
    process = subprocess.Popen(
        [sys.executable, *program, *words],
        cwd=workspace,
        env=environ,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        if case.fault is not None:
            case.fault(workspace, run_dir)
        code = process.wait(TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(600)
        while taken:
            taken.pop().close()
    output.seek(0)
    shown = "\n".join(output.read().decode(errors="replace").splitlines()[-6:])
    status = run_dir / "status.json"
    return (json.loads(status.read_text())["state"] if status.exists() else f"EXIT {code}"), shown


# The doctor removes the folder of a job that found nothing wrong.
KEEPING = """
import sys
from hpc_rl.cli import main
from hpc_rl.submission import queue
queue.remove = lambda path: None
sys.argv[0] = "hpc-rl"
main()
"""


def recording(name: str, case: Case, state: str, run: RunDir, workspace: Path) -> str:
    files = [*run.path.glob("job-*.log"), *([run.metrics] if run.metrics.exists() else [])]
    for attempt in run.attempts()[-1:]:
        files += sorted(path for path in attempt.rglob("*") if path.suffix in LOGS and path.is_file())
    lines = [f"# python -m tests.doctor.record {name}", f"# hpc-rl {' '.join(case.command)}", f"# state: {state}"]
    seen: set[str] = set()
    for file in files:
        text = anonymous(file.read_text(errors="replace"), workspace)
        text = cut(text, *(RAY_LINES if "/ray/" in str(file) else OWN_LINES))
        if not text or text in seen:
            continue
        seen.add(text)
        lines += [f"==> {anonymous(str(file.relative_to(run.path)), workspace)} <==", text]
    return "\n".join(lines) + "\n"


def anonymous(text: str, workspace: Path) -> str:
    """The text without names of this machine."""
    host = os.uname().nodename
    address = socket.gethostbyname(host)
    packages = re.compile(r"(/[\w./-]+)?/site-packages")
    for found, put in (
        (str(workspace), "/scratch/me"), (str(PROGRAMS), "/scratch/me/programs"),
        (str(Path(__file__).parents[2]), "/home/me/hpc-rl"), (host, "node1"), (address, "10.0.0.1"),
    ):  # fmt: skip
        text = text.replace(found, put)
    text = re.sub(r"local-\d+", "local-7", text)
    return packages.sub("/env/lib/python3.11/site-packages", text)


def cut(text: str, head: int, tail: int, between: int) -> str:
    """The first and the last lines, and what looks like trouble between them."""
    lines = [line[:WIDEST].rstrip() for line in text.rstrip().splitlines()]
    trouble = [line for line in lines[head:-tail] if _is_trouble(line)]
    return "\n".join([*lines[:head], *trouble[:between], *lines[max(head, len(lines) - tail) :]])


def _is_trouble(line: str) -> bool:
    low = line.lower()
    return any(key in low for key in _KEYS) or bool(re.search(r" [WEF] \d+ \d+\]|error|exception|hpc-rl:", line))


def processes_of(run: Path) -> list[tuple[int, str]]:
    """(process, command line) of everything that the run has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"HPC_RL_RUN_DIR={run}".encode() in (process / "environ").read_bytes().split(b"\0"):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(process.name), line))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not come so far")
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
