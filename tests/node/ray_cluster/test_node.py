"""A Ray job on this machine, from the command to its end: real Ray, no Slurm."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.ray_drivers import COUNT, WAIT

START_S = 600
"""Deadline of a start in seconds. Ray takes 5 to 15 s on an idle machine."""


NPUS = """
import os, ray
from hpc_rl.rl.actors.pools import actor_resources
from tests.marks import long
ray.init(logging_level="error")
@ray.remote
class Worker:
    def device(self):
        return os.environ["ASCEND_RT_VISIBLE_DEVICES"]
workers = [Worker.options(**actor_resources("npu", 1.0)).remote() for _ in range(2)]
seen = ray.get([worker.device.remote() for worker in workers])
print("npus:", int(ray.cluster_resources()["NPU"]), sorted(seen))
"""


def hold(folder: Path, word: str) -> str:
    """Hold Python programs at their start if a word of their command ends like this; return the PYTHONPATH for it."""
    lines = ["import sys, time", f"if any(word.endswith({word!r}) for word in sys.orig_argv):", "    time.sleep(3600)"]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return str(folder)


class Jobs:
    """Runs `hpc-rl submit ray --local`, and ends the jobs that still run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "count_driver.py").write_text(COUNT)
        (folder / "wait_driver.py").write_text(WAIT)
        (folder / "tmp").mkdir()
        self.running: list[subprocess.Popen[str]] = []

    def start(self, name: str, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "hpc_rl.cli", "submit", "ray", "--local", "--job-name", name]
        process = subprocess.Popen(
            [*command, "trainer.device=cpu", "ray.object_store_gb=0.1", *arguments],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp")},
        )  # fmt: skip
        self.running.append(process)
        return process

    def run(self, name: str, *arguments: str) -> tuple[int, str]:
        process = self.start(name, *arguments)
        output, _ = process.communicate(timeout=START_S)
        return process.returncode, output

    def attempt(self, name: str) -> Path:
        return self.folder / "runs" / name / "attempt-1"

    def left(self) -> list[str]:
        """Return the processes of these jobs, identified by their common folder, and the files that they left."""
        marks = [str(self.folder).encode()]
        kept = f"hpc-rl-cache-{os.getuid()}"  # for the kernels of later jobs
        found = [str(path) for path in (self.folder / "tmp").iterdir() if path.name != kept]
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                text = environ.read_bytes()
                if b"HPC_RL_ATTEMPT_DIR=" + marks[0] in text:
                    found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.fixture
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    # Sockets want short paths, and pytest's are long.
    folder = Path(f"/tmp/hr{os.getpid()}")
    folder.mkdir()
    jobs = Jobs(folder)
    yield jobs
    for process in jobs.running:
        if process.poll() is None:
            process.terminate()
        process.wait(600)
        if process.stdout:
            process.stdout.close()
    subprocess.run(["rm", "-rf", folder], check=True, timeout=600)


def until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


PROXIED = """
import json, os, ray
names = ["https_proxy", "no_proxy", "ROCR_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"]
ray.init(logging_level="error")
@ray.remote
def seen():
    return [os.environ.get(name) for name in names]
print("actor:", json.dumps(ray.get(seen.remote())))
print("driver:", json.dumps([os.environ.get(name) for name in names]))
"""


@pytest.mark.long
def test_actors_of_a_program_get_the_proxy_and_what_works_here(jobs: Jobs) -> None:
    (jobs.folder / "proxied.py").write_text(PROXIED)
    variables = {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0", "GLOO_SOCKET_IFNAME": "^docker0"}
    settings = ["slurm.proxy=http://proxy:3128", *(f"slurm.env.{name}={value}" for name, value in variables.items())]
    code, output = jobs.run("proxied", "trainer.device=cuda", *settings, "--", "python", "proxied.py")
    assert code == 0, output
    found = {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in output.splitlines()
             if line.startswith(("actor: ", "driver: "))}  # fmt: skip
    assert found["actor"] == found["driver"]
    assert found["driver"][0] == "http://proxy:3128" and found["driver"][2:] == [None, "lo"]
    direct = found["driver"][1].split(",")
    assert {"localhost", "127.0.0.1", "127.0.0.2", socket.gethostname()} <= set(direct)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("dashboard", ["false", "true"])
def test_a_start_waits_for_no_agent(jobs: Jobs, dashboard: str) -> None:
    options = [f"ray.dashboard={dashboard}", f"slurm.env.PYTHONPATH={hold(jobs.folder, 'dashboard/agent.py')}"]
    code, said = jobs.run("slow", *options, "--", "python", "count_driver.py")
    assert (code, "nodes: 1 " in said) == (0, True), said


@pytest.mark.slow
def test_two_jobs_at_once_on_one_machine(jobs: Jobs) -> None:
    stop = ["--nodes", "2", "--", "bash", "-c", "python count_driver.py && ps axww > ps.txt && exit 75"]
    first = jobs.start("first", *stop)
    second, said = jobs.run("second", "--nodes", "1", "--", "python", "count_driver.py")
    output, _ = first.communicate(timeout=START_S)
    assert (second, "nodes: 1 " in said) == (0, True), said
    # Of two nodes here each has the CPUs that it would ask Slurm for.
    assert (first.returncode, "nodes: 2 2.0" in output) == (75, True), output
    assert "failed" not in output
    assert json.loads((jobs.folder / "runs/first/status.json").read_text())["state"] == "STOPPED"
    assert (jobs.attempt("first") / "ray/node1/raylet.out").exists()
    assert not jobs.left()


@pytest.mark.slow
@pytest.mark.long
def test_devices_of_other_vendors_are_a_resource_of_ray(jobs: Jobs) -> None:
    (jobs.folder / "npus.py").write_text(NPUS)
    code, output = jobs.run("npus", "trainer.device=npu", "trainer.n_gpus_per_node=2", "--", "python", "npus.py")
    assert (code, "npus: 2 ['0', '1']" in output) == (0, True), output


@pytest.mark.slow
def test_a_killed_entry_ends_the_job_and_leaves_nothing(jobs: Jobs) -> None:
    mark = jobs.folder / "mark"
    job = jobs.start("killed", "--nodes", "2", "--", "python", "wait_driver.py", str(mark))
    until(lambda: mark.exists() or job.poll() is not None, "a driver")
    entries = [
        int(environ.parent.name)
        for environ in Path("/proc").glob("[0-9]*/environ")
        if is_entry_of_node_1(environ, jobs.folder)
    ]
    assert len(entries) == 1
    os.kill(entries[0], signal.SIGKILL)
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 137, output
    until(lambda: not jobs.left(), str(jobs.left()), 10)


def is_entry_of_node_1(environ: Path, folder: Path) -> bool:
    try:
        ours = f"HPC_RL_ATTEMPT_DIR={folder}".encode() in environ.read_bytes()
        command = (environ.parent / "cmdline").read_bytes().split(b"\0")
        return ours and b"hpc_rl.node.ray_cluster.node" in command and b"SLURM_NODEID=1" in environ.read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        (["--first-port", "TAKEN"], {}, r"\(ray\.first_port\) are occupied on .*: something uses port"),
        (["--object-store-bytes", "5"], {}, "set ray.object_store_gb"),
        (["--interface", "ib7"], {}, "interface ib7 has no IPv4 address"),
        ([], {"PYTHONPATH": "HERE"}, r"has Ray 2\.51\.0, which anybody on the network could use"),
        (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": "0"}, r"grants 1 GPU, and trainer\.n_gpus_per_node is 2"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    tmp_path: Path, options: list[str], environ: dict[str, str], said: str
) -> None:
    (tmp_path / "ray-2.51.0.dist-info").mkdir()
    (tmp_path / "ray-2.51.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.51.0\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = [str(min(taken.getsockname()[1] - 5, 65000)) if word == "TAKEN" else word for word in options]
        environ = {name: str(tmp_path) if value == "HERE" else value for name, value in environ.items()}
        code, output = run_entry(tmp_path, ["localhost"], options, environ)
    assert code == 2 and re.search(said, output), output
    assert output.startswith("hpc-rl: ") and output.count("\n") == 1
    assert (tmp_path / ".node0.failed").read_text() == "2"


def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    slow = {"PYTHONPATH": hold(tmp_path, "hpc_rl.node.ray_cluster.start")}
    code, output = run_entry(tmp_path, ["localhost", "elsewhere"], ["--interface", "lo", "--start-timeout", "1"], slow)
    assert code == 1
    assert "hpc-rl: Ray is not up after 1 s (ray.start_timeout_s)\nhpc-rl: node localhost has not joined" in output
    assert "hpc-rl: node elsewhere has not started" in output


def run_entry(attempt: Path, nodes: list[str], options: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """Run the entry of the first node as Slurm would start it."""
    slurm = {"SLURM_JOB_ID": f"t{os.getpid()}", "SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_NODEID": "0"}
    command = [sys.executable, "-m", "hpc_rl.node.ray_cluster.node", "--processes", "2", "--device", "cpu", *options]
    done = subprocess.run(
        [*command, "--", "true"],
        env={**os.environ, **slurm, "HPC_RL_ATTEMPT_DIR": str(attempt), **environ},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr
