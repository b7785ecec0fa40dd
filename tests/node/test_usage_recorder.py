from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.formats.usage import Gpu, read_usage
from hpc_rl.node.usage_recorder import INTERVAL_S, interval, recording_usage, resource_usage
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.system.processes import descendants
from tests.node.test_gpus import fake_nvidia_smi

HERE = Allocation(job_id="7", restart=0, nodes=("gpu01", "gpu02"), node_rank=1, cpus=2)
PART = "import sys; from tests.node.test_usage_recorder import sleep_as_an_entry; sleep_as_an_entry(sys.argv[1])"


def until(true: Callable[[], bool], timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def sleep_as_an_entry(attempt_dir: str) -> None:
    def part() -> int:
        subprocess.run([sys.executable, "-c", "import time; held = b'1' * 200_000_000; time.sleep(100)"], check=False)
        return 0

    recording_usage(HERE, Path(attempt_dir), part)


def test_a_node_is_sampled_while_it_runs_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 'echo "97, 40960, 81920"'))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    entry = subprocess.Popen([sys.executable, "-c", PART, str(tmp_path)], start_new_session=True)

    def most_gb() -> float:
        return max((sample.memory_gb for node in read_usage(tmp_path) for sample in node.samples), default=0)

    until(lambda: most_gb() > 0.2)  # the first sample may be taken before the program has its memory
    below = list(descendants(entry.pid))
    entry.send_signal(signal.SIGKILL)  # the sampler ends with the entry, for any reason
    entry.wait()
    until(lambda: not any(map(_is_sampler, below)))
    os.killpg(entry.pid, signal.SIGKILL)  # the part's own program
    (found,) = read_usage(tmp_path)
    assert found.exit_code is None
    assert (found.rank, found.node, found.job_id, found.cpus) == (1, "gpu02", "7", 2)
    assert most_gb() < 1.0 < found.memory_gb
    assert 0 <= found.samples[0].cpus < 8
    assert found.samples[0].gpus == (Gpu(0.97, 42.95, 85.9),)


def test_the_end_of_the_part_is_written_down(tmp_path: Path) -> None:
    assert recording_usage(HERE, tmp_path, lambda: 75) == 75
    (found,) = read_usage(tmp_path)
    assert found.exit_code == 75 and not any(map(_is_sampler, descendants(os.getpid())))

    def refuse() -> int:
        raise UserError("no")

    with pytest.raises(UserError):
        recording_usage(HERE, tmp_path, refuse)
    assert read_usage(tmp_path)[0].exit_code == 2


def test_a_disk_that_is_full_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "node1-usage.jsonl").symlink_to("/dev/full")
    assert recording_usage(HERE, tmp_path, lambda: 0) == 0


def test_more_and_more_seldom() -> None:
    least, most = INTERVAL_S
    assert [interval(s) for s in (0, 120, 900, 3600, 10**6)] == [least, least, 15, most, most]
    elapsed, samples = 0.0, 0
    while elapsed < 7 * 86400:
        elapsed, samples = elapsed + interval(elapsed), samples + 1
    assert samples < 12_000


def test_memory_counts_what_is_shared_once() -> None:
    code = (
        "import mmap, os, time\n"
        "held = mmap.mmap(-1, 100 << 20); held.write(bytes(100 << 20))\n"
        "children = [os.fork() for _ in range(1)]\n"
        "held[0:100 << 20]\n"
        "print('there', flush=True); time.sleep(100)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert program.stdout is not None
        program.stdout.readline(), program.stdout.readline()
        assert 100 << 20 < resource_usage(program.pid).memory < 160 << 20
    finally:
        for pid in descendants(program.pid):
            os.kill(pid, signal.SIGKILL)
        program.kill()
        program.wait()


def _is_sampler(pid: int) -> bool:
    try:
        return b"hpc_rl.node.usage_recorder" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
