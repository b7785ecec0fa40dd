import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.liveness import stacks
from hpc_rl.node.hangs import stack_files
from hpc_rl.node.hangs.stack_files import collect, name_of, slug, waits_for_others

THREAD = 'Thread 0x01 (most recent call first):\n  File "/x/hpc_rl/a.py", line 1 in run\n\n'
COLLECTIVE = '  File "/x/torch/distributed/distributed_c10d.py", line 5 in all_gather\n  File "/x/a.py", line 1 in f\n'
BACKWARD = '  File "/x/torch/autograd/graph.py", line 8 in _engine_run_backward\n'
CHECKPOINT = COLLECTIVE.replace("distributed_c10d", "checkpoint/filesystem")
TO_AN_ENGINE = COLLECTIVE.replace("torch", "vllm")
# The host of a rank whose GPU waits in a collective of NCCL: in the first read of a value of the GPU.
ON_A_GPU = '  File "/x/hpc_rl/training/optim.py", line 78 in clip_gradients\n  File "/x/a.py", line 1 in f\n'
LOADER = '  File "/x/data.py", line 3 in read\n'
ANSWERS = """
import sys, time
from pathlib import Path
from hpc_rl.liveness import stacks
stacks.answer_requests(Path(sys.argv[1]))
def the_data_loader():
    print("ready", flush=True)
    time.sleep(1000)
the_data_loader()
"""


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        (THREAD + "Current thread 0x02 (most recent call first):\n" + COLLECTIVE, True),
        (THREAD + "Current thread 0x02 (most recent call first):\n" + LOADER, False),
        ("Thread 0x01 (most recent call first):\n" + COLLECTIVE + "Thread 0x02:\n" + LOADER, False),
        ("Thread 0x01 (most recent call first):\n" + COLLECTIVE + "Thread 0x02:\n" + BACKWARD, True),
        ("Thread 0x02 (most recent call first):\n" + BACKWARD, False),
        (THREAD + "Current thread 0x02 (most recent call first):\n" + CHECKPOINT, False),
        (THREAD + "Current thread 0x02 (most recent call first):\n" + COLLECTIVE + CHECKPOINT, True),
        (THREAD + "Current thread 0x02 (most recent call first):\n" + TO_AN_ENGINE, True),
        (THREAD + "Current thread 0x02 (most recent call first):\n" + ON_A_GPU, False),
        ("", False),
    ],
)
def test_stacks_show_who_waits_for_other_ranks(text: str, waits: bool) -> None:
    assert waits_for_others(text) is waits


def test_each_process_gets_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_files, "py_spy", lambda _pid: "")
    answers, attempt = tmp_path / "beats", tmp_path / "attempt-1"
    answers.mkdir()
    attempt.mkdir()
    path = answers / "process.stacks"
    with (
        subprocess.Popen([sys.executable, "-c", ANSWERS, str(path)], stdout=subprocess.PIPE, text=True) as child,
        subprocess.Popen(["/bin/sleep", "1000"]) as stopped,
    ):
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            path.rename(answers / f"{child.pid}{stacks.SUFFIX}")
            stopped.send_signal(signal.SIGSTOP)
            names, states = {child.pid: "rank 3"}, {child.pid: "S", stopped.pid: "T", os.getpid(): "R"}
            assert collect(answers, attempt, 1, names, states) == {child.pid: False}
        finally:
            child.kill()
            stopped.kill()
    folder = attempt / "stacks"
    assert {file.name for file in folder.iterdir()} == {
        f"node1-rank-3-{child.pid}.txt",
        f"node1-sleep-{stopped.pid}.txt",
    }
    assert folder.stat().st_mode & 0o077 == 0
    own = (folder / f"node1-rank-3-{child.pid}.txt").read_text()
    assert own.startswith(f"rank 3, process {child.pid}, state S, kernel function ") and "in the_data_loader" in own
    other = (folder / f"node1-sleep-{stopped.pid}.txt").read_text()
    assert "/bin/sleep 1000" in other and "no stacks: the process is stopped" in other


def test_py_spy_reads_the_stacks_of_a_stopped_process() -> None:
    program = "def the_loop():\n    print('ready', flush=True)\n    while True: pass\nthe_loop()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGSTOP)
            found = stack_files.py_spy(child.pid)
        finally:
            child.kill()
    if not found:
        pytest.skip("py-spy is not installed")
    assert found.startswith("py-spy:\n")
    assert "the_loop" in found or "Permission denied" in found


def test_names() -> None:
    assert slug("rank 1 of pool train/x") == "rank-1-of-pool-train-x"
    run = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", "print('ready', flush=True); input()"]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert name_of(child.pid) == "timeit"
        child.kill()
    assert name_of(child.pid) == f"process {child.pid}"
