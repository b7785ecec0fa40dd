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
from hpc_rl.host.processes import descendants
from hpc_rl.host.usage import Gpu, NodeUsage, read_usage
from hpc_rl.node.gpus import parse_nvidia, read_gpus
from hpc_rl.node.usage_recorder import INTERVAL_S, interval, recording_usage, used
from hpc_rl.slurm.allocation import Allocation

HERE = Allocation(job_id="7", restart=0, nodes=("gpu01", "gpu02"), node_rank=1, cpus=2)
PART = "import sys; from tests.node.test_usage_recorder import *; sleep_as_an_entry(sys.argv[1])"


def until(true: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def fake_nvidia_smi(folder: Path, script: str) -> str:
    """PATH with an nvidia-smi that runs this; the programs are bash's own or Debian's."""
    (folder / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def sleep_as_an_entry(attempt_dir: str) -> None:
    def part() -> int:
        subprocess.run([sys.executable, "-c", "import time; held = b'1' * 200_000_000; time.sleep(100)"], check=False)
        return 0

    recording_usage(HERE, Path(attempt_dir), part)


def test_a_node_is_sampled_while_it_runs_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 'echo "97, 40960, 81920"'))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    entry = subprocess.Popen([sys.executable, "-c", PART, str(tmp_path)], start_new_session=True)

    def sample() -> NodeUsage | None:
        found = read_usage(tmp_path)
        return found[0] if found and found[0].samples else None

    until(lambda: sample() is not None)
    below = list(descendants(entry.pid))
    entry.send_signal(signal.SIGKILL)  # however the entry goes, the sampler goes with it
    entry.wait()
    until(lambda: not any(map(_is_sampler, below)))
    os.killpg(entry.pid, signal.SIGKILL)  # the part's own program
    found = sample()
    assert found is not None and found.exit_code is None
    assert (found.rank, found.node, found.job_id, found.cpus) == (1, "gpu02", "7", 2)
    assert 0.2 < found.samples[0].memory_gb < 1.0 < found.memory_gb
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
        assert 100 << 20 < used(program.pid).memory < 160 << 20
    finally:
        for pid in descendants(program.pid):
            os.kill(pid, signal.SIGKILL)
        program.kill()
        program.wait()


def test_gpus_of_nvidia() -> None:
    assert parse_nvidia("0, 11, 81559\n100, 81000, 81559\n") == (
        Gpu(0.0, 11 * 2**20 / 1e9, 81559 * 2**20 / 1e9),
        Gpu(1.0, 81000 * 2**20 / 1e9, 81559 * 2**20 / 1e9),
    )
    assert parse_nvidia("[N/A], 100, 4864\n")[0].busy is None
    assert parse_nvidia("No devices were found\n") == ()


def test_only_the_jobs_gpus_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_nvidia_smi(tmp_path, f'echo "$*" >> {tmp_path}/asked; echo "1, 1, 1"')
    monkeypatch.setenv("PATH", path)
    for visible, count in ((None, 1), ("2,3", 1), ("", 0), ("NoDevFiles", 0), ("-1", 0)):
        environ = {"PATH": path} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        assert len(read_gpus(environ)) == count
    assert "--id=2,3" in (tmp_path / "asked").read_text().splitlines()[1]


@pytest.mark.parametrize("script", ["exit 9", "echo 'Failed to initialize NVML'", "kill -9 $$"])
def test_a_driver_in_trouble_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, script))
    assert read_gpus(os.environ) == ()


def test_gpus_of_amd_by_their_kernel_module(tmp_path: Path) -> None:
    for card, busy in (("card0", None), ("card1", 55), ("card2", 3)):
        folder = tmp_path / card / "device"
        folder.mkdir(parents=True)
        if busy is not None:
            for name, value in (("gpu_busy_percent", busy), ("mem_info_vram_used", 8e9), ("mem_info_vram_total", 64e9)):
                (folder / name).write_text(f"{value:.0f}\n")
    assert read_gpus({"PATH": ""}, tmp_path) == (Gpu(0.55, 8.0, 64.0), Gpu(0.03, 8.0, 64.0))
    assert read_gpus({"PATH": "", "ROCR_VISIBLE_DEVICES": "1"}, tmp_path) == (Gpu(0.03, 8.0, 64.0),)


def _is_sampler(pid: int) -> bool:
    try:
        return b"hpc_rl.node.usage_recorder" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
