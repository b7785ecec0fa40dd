"""The sandbox behaves like a cluster of separate nodes, and removes everything that it created."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.marks import long
from tests.sandbox import cgroups, config, network, state
from tests.sandbox.__main__ import main
from tests.sandbox.cluster import Cluster, missing
from tests.sandbox.processes import DEADLINE_S, Process, SandboxError, wait_until
from tests.sandbox.record import FOLDER, commands_of
from tests.sandbox.spec import Spec, project_folders_in_tmp
from tests.sandbox.variants import LARGE, VARIANTS

REPOSITORY = Path(__file__).parents[2]
sandbox = pytest.mark.sandbox
NPROC = ["env", "--unset", "OMP_NUM_THREADS", "nproc"]
"""Prints the number of CPUs on which it may run, or OMP_NUM_THREADS if that is set."""


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins and ends with all nodes of the shared cluster up and idle."""
    cluster = request.getfixturevalue("slurm_cluster") if "slurm_cluster" in request.fixturenames else None
    if cluster is not None:
        cluster.wait_idle()
    yield
    if cluster is not None:
        cluster.wait_idle()


def submit(cluster: Cluster, body: str, *options: str) -> str:
    script = f"#!/bin/bash\n{body}\n"
    output = f"--output={cluster.shared}/%j.out"
    done = cluster.run(["sbatch", "--parsable", output, *options], input=script, check=True)
    return done.stdout.strip()


# Pure functions: no root, no Slurm


def test_slurm_conf_states_the_cluster() -> None:
    spec = Spec("x", nodes=4, cpus=8, memory_mb=16000, gpus=2)
    text = config.slurm_conf(spec, "10.77.5", confined=True, cores=True)
    assert "SlurmctldHost=ctl(10.77.5.254)" in text
    assert "NodeName=node[1-4] NodeAddr=10.77.5.[1-4] Sockets=1 CoresPerSocket=8" in text
    assert "RealMemory=16000 Gres=gpu:2" in text
    assert "PartitionName=debug Nodes=ALL Default=YES" in text
    assert "AccountingStorageType" not in text


def test_nodes_of_several_shapes() -> None:
    spec = Spec("x", **VARIANTS["typed-gres"])
    text = config.slurm_conf(spec, "10.77.5", confined=True, cores=True)
    assert "NodeName=node[1-2] NodeAddr=10.77.5.[1-2] Sockets=2 CoresPerSocket=1" in text
    assert "NodeName=node[4-4] NodeAddr=10.77.5.[4-4]" in text and "Gres=gpu:a100:1,gpu:a100_1g.5gb:7" in text
    assert "PartitionName=gpu Nodes=node[1-2] Default=YES" in text
    lines = config.gres_conf(spec).splitlines()
    assert f"NodeName=node[1-2] Name=gpu Type=a100 Cores=1 File={spec.base}/gpus/gpu[1-1]" in lines
    assert f"NodeName=node[4-4] Name=gpu Type=a100_1g.5gb File={spec.base}/gpus/gpu[1-7]" in lines


def test_nodes_that_are_only_listed_have_no_machine() -> None:
    spec = Spec("x", **LARGE)
    assert spec.node_names == ["node1"]
    assert "NodeName=gpu[2-801] NodeAddr=127.0.0.1" in config.slurm_conf(spec, "10.77.5", confined=True, cores=True)


def test_a_cluster_is_described_on_disk() -> None:
    spec = Spec("x", **VARIANTS["typed-gres"])
    assert Spec.from_json(json.loads(json.dumps(asdict(spec)))).shapes == spec.shapes


def test_recordings_are_of_every_variant_and_of_two_versions() -> None:
    for variant in VARIANTS:
        folders = list(FOLDER.glob(f"{variant}-*"))
        versions = {folder.name.rpartition("-")[2].split(".")[0] for folder in folders}
        assert len(versions) >= (1 if variant == "strict" else 2)  # the plugins are in one Debian only
        words = {
            "gpus": "shared" if variant == "shared-nodes" else "gpu",
            "node": Spec("x", **VARIANTS[variant]).node_names[0],
        }
        for name, command in commands_of(variant).items():
            for folder in folders:
                assert (folder / f"{name}.txt").read_text().startswith(f"# {command.format(**words)}\n")


def test_without_cgroup_v1_nothing_asks_for_confinement() -> None:
    assert "cgroup" not in config.slurm_conf(Spec("x"), "10.77.5", confined=False, cores=True)
    assert "=yes" not in config.cgroup_conf(confined=False, cores=True, devices=True)
    assert not cgroups.hierarchies("cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n")


def test_of_the_projects_folders_those_in_tmp_are_shared_once() -> None:
    top = Path(tempfile.mkdtemp(prefix="hpc-rl-shared-", dir="/tmp"))
    try:
        (top / "environment").mkdir()
        places = ["/", "/tmp", "/usr", top / "environment", top / "missing", top]
        assert project_folders_in_tmp(places) == (str(top),)
        assert project_folders_in_tmp([top / "environment"]) == (str(top / "environment"),)
    finally:
        shutil.rmtree(top)


def test_interface_names_fit_the_kernel() -> None:
    names = [network.host_link(f"{'long-name-' * 3}{number}") for number in range(50)]
    assert len(set(names)) == 50 and all(len(name) <= 15 for name in names)


def test_a_pid_with_another_start_time_is_another_process() -> None:
    mine = Process.of(os.getpid())
    assert mine.is_alive() and not mine._replace(start=mine.start - 1).is_alive()


@pytest.mark.parametrize("wrong", [{"name": "Not/A/Name"}, {"nodes": 0}, {"cpus": 0}])
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SandboxError, match="use"):
        Cluster(**wrong)  # type: ignore[arg-type]


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["up"]) == 2
    assert capsys.readouterr().err == "the Slurm sandbox needs root (network namespaces, cgroups)\n"


# A cluster


@sandbox
def test_srun_reaches_every_node(slurm_cluster: Cluster) -> None:
    done = slurm_cluster.run(["srun", f"--nodes={len(slurm_cluster.nodes)}", "hostname"], check=True)
    assert sorted(done.stdout.split()) == sorted(slurm_cluster.nodes)


@sandbox
def test_jobs_are_confined_to_their_cores_and_memory(own_name: str, slurm_tree: str) -> None:
    if not cgroups.hierarchies():
        pytest.skip("no cgroup v1 on this machine")
    with Cluster(1, name=own_name, tree=slurm_tree) as cluster:
        assert cluster.run(["srun", "--cpus-per-task=1", *NPROC], check=True).stdout == "1\n"
        greedy = ["srun", "--mem=100", sys.executable, "-c", "print(len(b'x' * (300 << 20)))"]
        killed = cluster.run(greedy)
        assert killed.returncode != 0 and "Out Of Memory" in killed.stderr


@sandbox
def test_jobs_that_are_not_bound_run_on_any_core(slurm_cluster: Cluster) -> None:
    found = slurm_cluster.run(["srun", "--cpus-per-task=1", *NPROC], check=True).stdout
    assert int(found) == len(os.sched_getaffinity(0))


@sandbox
def test_fake_gpus_are_allocated(slurm_cluster: Cluster) -> None:
    show = "echo $SLURM_GPUS_ON_NODE; for gpu in $BASE/gpus/*; do (: <$gpu) 2>&1 | sed 's/.*: //'; done"
    env = slurm_cluster.env | {"BASE": str(slurm_cluster.base)}
    done = slurm_cluster.run(["srun", "--gres=gpu:1", "bash", "-c", show], env=env, check=True)
    assert done.stdout.splitlines()[0] == "1"
    if "ConstrainDevices=yes" in (slurm_cluster.base / "etc/cgroup.conf").read_text():
        assert done.stdout.splitlines()[1:] == ["No such device or address", "Operation not permitted"]
    assert slurm_cluster.run(["srun", "--gres=gpu:3", "true"]).returncode != 0


@sandbox
def test_nodes_are_separate_machines(slurm_cluster: Cluster) -> None:
    mark = "for place in /tmp /dev/shm; do echo $(hostname) >$place/mark-$SLURM_JOB_ID; done"
    job = submit(slurm_cluster, f"srun bash -c '{mark}; ip -4 -br a show eth0; ps -e | wc -l; ls /tmp'", "--nodes=2")
    assert slurm_cluster.wait_job(job) == "COMPLETED"
    for node in ("node1", "node2"):
        for place in ("/tmp", "/dev/shm"):
            assert slurm_cluster.exec_on(node, ["cat", f"{place}/mark-{job}"]).stdout == f"{node}\n"
            slurm_cluster.exec_on(node, ["rm", f"{place}/mark-{job}"], check=True)
    assert not list(Path("/tmp").glob(f"mark-{job}")) and not list(Path("/dev/shm").glob(f"mark-{job}"))
    assert (slurm_cluster.shared / f"{job}.out").read_text().count("UP") == 2
    assert slurm_cluster.exec_on("node3", ["hostname"]).stdout == "node3\n"


@sandbox
def test_nodes_share_the_folders_of_tmp_that_they_are_given(slurm_tree: str) -> None:
    if lacking := missing():
        pytest.skip(lacking)
    shared = Path(tempfile.mkdtemp(prefix="hpc-rl-shared-", dir="/tmp"))
    try:
        (shared / "file").write_text("seen")
        with Cluster(2, name=f"tmp-{os.getpid()}", shared_tmp=(str(shared),), tree=slurm_tree) as cluster:
            for node in ("node1", "node2"):
                assert cluster.exec_on(node, ["cat", str(shared / "file")], check=True).stdout == "seen"
                assert cluster.exec_on(node, ["ls", "/tmp"], check=True).stdout.split() == [shared.name]
            cluster.exec_on("node1", ["touch", str(shared / "new"), "/tmp/own"], check=True)
            assert (shared / "new").exists() and not Path("/tmp/own").exists()
            assert cluster.exec_on("node2", ["ls", "/tmp"], check=True).stdout.split() == [shared.name]
    finally:
        shutil.rmtree(shared)


@sandbox
def test_nodes_talk_by_tcp(slurm_cluster: Cluster) -> None:
    talk = """
import os, socket
number = int(os.environ["SLURM_NODEID"])
if number == 0:
    server = socket.create_server(("", 5000))
    server.settimeout(600)
    print(server.accept()[0].recv(99).decode(), flush=True)
else:
    for attempt in range(200):
        try:
            socket.create_connection(("node1", 5000), timeout=600).sendall(os.uname().nodename.encode())
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.05)
"""
    done = slurm_cluster.run(["srun", "--nodelist=node[1-2]", sys.executable, "-c", talk], check=True)
    assert done.stdout == "node2\n"


@sandbox
def test_a_requeued_job_starts_again_soon(slurm_cluster: Cluster) -> None:
    job = submit(slurm_cluster, '((SLURM_RESTART_COUNT)) || { scontrol requeue "$SLURM_JOB_ID"; sleep 60; }')
    assert slurm_cluster.wait_job(job) == "COMPLETED"
    assert "Restarts=1" in slurm_cluster.run(["scontrol", "show", "job", job], check=True).stdout


@sandbox
def test_what_runs_past_its_timeout_is_ended_on_the_node_too(slurm_cluster: Cluster) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        slurm_cluster.exec_on("node1", ["sleep", "4321"], timeout=0.5)

    def found() -> str:
        return slurm_cluster.exec_on("node1", ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).stdout

    wait_until(lambda: "sleep 4321" not in found(), "sleep to end", DEADLINE_S, found)


@sandbox
def test_other_users_can_submit(slurm_cluster: Cluster) -> None:
    who = slurm_cluster.run(["srun", "--chdir=/", "id", "--user"], user=65534, check=True)
    assert who.stdout == "65534\n"


@sandbox
def test_no_accounting_unless_asked_for(slurm_cluster: Cluster) -> None:
    assert slurm_cluster.run(["sacct"]).returncode != 0


@sandbox
@pytest.mark.slow
def test_accounting(accounting_cluster: Cluster) -> None:
    accounting_cluster.run(["srun", "--job-name=kept", "--gres=gpu:1", "true"], check=True)
    sacct = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobName,State,AllocTRES"]

    def found() -> str:
        return accounting_cluster.run(sacct, check=True).stdout

    wait_until(
        lambda: re.search(r"kept\|COMPLETED\|.*gres/gpu=1", found()) is not None, "sacct to know", DEADLINE_S, found
    )


@sandbox
@pytest.mark.slow
@pytest.mark.long
def test_a_node_can_fail_and_come_back(own_name: str, slurm_tree: str) -> None:
    """On a cluster of its own: after the failure, Slurm 22.05 may count a CPU of an ended job as used."""
    with Cluster(nodes=2, cpus=1, memory_mb=2000, name=own_name, tree=slurm_tree) as cluster:
        reach = ["timeout", "5", "bash", "-c", ": </dev/tcp/node2/6818"]  # slurmd's port
        cluster.exec_on("node1", reach, check=True)
        job = submit(cluster, "srun sleep 60", "--nodelist=node2")
        cluster.wait_job(job, states={"RUNNING"})
        cluster.kill_node("node2")
        assert cluster.exec_on("node1", reach).returncode != 0
        assert cluster.node_states()["node2"].startswith("down")
        assert cluster.wait_job(job, states={"PENDING"}) == "PENDING"
        # When the node is back, Slurm may repeat its order to end the job there, and so end its next start.
        cluster.run(["scancel", job], check=True)
        cluster.restore_node("node2")
        cluster.exec_on("node1", reach, check=True)
        assert cluster.run(["srun", "--nodelist=node2", "hostname"], check=True).stdout == "node2\n"


# Nothing is left


def traces(name: str) -> dict[str, str]:
    """Return the lists of things on this machine that mention a sandbox."""
    listing = {
        "processes": "\n".join(path.read_text().replace("\0", " ") for path in command_lines()),
        "links": subprocess.run(["ip", "link"], capture_output=True, text=True, check=True, timeout=600).stdout,
        "namespaces": "\n".join(map(str, Path("/run/netns").iterdir())) if Path("/run/netns").exists() else "",
        "mounts": Path("/proc/self/mounts").read_text(),
        "cgroups": "\n".join(str(path) for point in cgroups.hierarchies() for path in point.iterdir()),
        "directories": "\n".join(str(path) for top in ("/var/tmp", "/tmp", "/dev/shm") for path in Path(top).iterdir()),
    }
    mark = rf"hpc-rl-sandbox-{name}(?![\w-])|{network.host_link(name)}"
    return {what: text for what, text in listing.items() if re.search(mark, text)}


def command_lines() -> Iterator[Path]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield path


@pytest.fixture
def own_name() -> Iterator[str]:
    """Name of a sandbox that a test starts with the command line. It is removed even if the test fails."""
    if lacking := missing():
        pytest.skip(lacking)
    name = f"own-{os.getpid()}"
    yield name
    with state.lock():
        state.remove(name)


def cli(*argv: str) -> list[str]:
    return [sys.executable, "-m", "tests.sandbox", *argv]


@sandbox
@pytest.mark.slow
def test_up_and_down_leave_nothing(own_name: str) -> None:
    def call(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(cli(*argv), capture_output=True, text=True, timeout=DEADLINE_S, cwd=REPOSITORY)

    assert not traces(own_name)
    up = call("up", "--nodes=2", "--gpus=1", "--name", own_name)
    assert up.returncode == 0, up.stderr
    assert f"export SLURM_CONF={Spec(own_name).base}/etc/slurm.conf" in up.stdout
    assert {"processes", "links", "directories"} <= traces(own_name).keys()
    cluster = Cluster.attach(own_name)
    job = submit(cluster, "setsid nohup sleep 300 & disown; srun sleep 300", "--nodes=2")
    cluster.wait_job(job, states={"RUNNING"})
    again = call("up", "--name", own_name)
    assert again.returncode == 1 and "is up already" in again.stderr
    assert f"{own_name}: node1 mixed, node2 mixed" in call("status").stdout
    assert call("exec", "--name", own_name, "node2", "hostname").stdout == "node2\n"
    assert call("down", "--name", own_name).returncode == 0
    assert not traces(own_name)


@sandbox
@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [long("sandbox.json"), long("machines/ctl"), long("machines/node2"), "log/slurmd.node2.log"]
)
def test_a_killed_launcher_takes_its_cluster_along(own_name: str, moment: str) -> None:
    make = (
        f"import signal; from tests.sandbox.cluster import Cluster; Cluster(2, name='{own_name}').up(); signal.pause()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", make], cwd=REPOSITORY)
    try:
        wait_until((Spec(own_name).base / moment).exists, f"{moment} to be written", DEADLINE_S)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(DEADLINE_S)
    # The kernel ends the processes and the network. Files and cgroups remain until the next `up`.
    left = {"processes", "links"}
    wait_until(lambda: not left & traces(own_name).keys(), "its end", DEADLINE_S, lambda: str(list(traces(own_name))))
    assert "directories" in traces(own_name) and not state.in_use(own_name)
    with Cluster(1, name=f"{own_name}-next"):
        assert not traces(own_name)
    assert not traces(f"{own_name}-next")


@sandbox
@pytest.mark.slow
@pytest.mark.long
def test_two_clusters_at_once_and_one_poses_as_large(slurm_cluster: Cluster) -> None:
    with Cluster(1, name=f"second-{os.getpid()}", cpus=64, memory_mb=999000) as second:
        assert second.run(["srun", "hostname"], check=True).stdout == "node1\n"
        assert second.run(["srun", "--cpus-per-task=64", "sh", "-c", "echo $SLURM_CPUS_ON_NODE"]).stdout == "64\n"
        sleeps = submit(second, "sleep 60")
        assert second.wait_job(sleeps, states={"RUNNING"}) == "RUNNING"
        assert slurm_cluster.run(["srun", "--nodes=3", "true"]).returncode == 0
        assert second.node_states() == {"node1": "mixed"}
    assert not traces(second.name)
    assert slurm_cluster.run(["srun", "--nodelist=node1", "hostname"], check=True).stdout == "node1\n"
