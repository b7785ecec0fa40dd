"""Creates the files of a sandbox and starts its machines: first `ctl` with the controller, then the nodes."""

import os
import secrets
import select
import subprocess
from pathlib import Path

from tests.sandbox import accounting, cgroups, config, network, state
from tests.sandbox.processes import DEADLINE_S, SandboxError
from tests.sandbox.spec import Spec

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"  # where daemons are
SCRIPT = Path(__file__).with_name("machine.sh")
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork")
DEVICE_MAJOR = 60  # reserved for local use, so no driver uses these devices


def write_files(spec: Spec, subnet: str) -> None:
    base, hierarchies = spec.base, cgroups.hierarchies()
    if not hierarchies:
        print("sandbox: no cgroup v1 here, so Slurm will not confine jobs to their cores and memory")
    for name in ("etc", "log", "run", "state", "spool", "tmp"):
        (base / name).mkdir(mode=0o755)
    (base / "munge").mkdir(mode=0o700)
    (base / "munge/key").touch(mode=0o400)
    (base / "munge/key").write_bytes(secrets.token_bytes(128))
    (base / "shared").mkdir()
    (base / "shared").chmod(0o1777)
    devices = _make_gpus(spec) and (cgroups.ROOT / "devices").exists()
    # A job cannot be bound to a core that the machine does not have.
    cores = spec.binds_cores and spec.all_shapes[0].cpus <= (os.cpu_count() or 1)
    files = {
        "hosts": config.hosts_file(spec, subnet),
        "slurm.conf": config.slurm_conf(spec, subnet, bool(hierarchies), cores),
        "cgroup.conf": config.cgroup_conf(bool(hierarchies), cores, devices),
        "gres.conf": config.gres_conf(spec),
    }
    for name, text in files.items():
        (base / "etc" / name).write_text(text)
    for name, text in spec.files.items():
        (base / "etc" / name).write_text(text)
        (base / "etc" / name).chmod(0o755)
    if spec.accounting:
        (base / "etc/slurmdbd.conf").touch(mode=0o600)
        (base / "etc/slurmdbd.conf").write_text(accounting.slurmdbd_conf(spec, subnet))


def _make_gpus(spec: Spec) -> bool:
    """Create fake GPUs: device files without a driver, or (then it returns False) plain files."""
    (spec.base / "gpus").mkdir()
    made_devices = True
    most = max(sum(gpus.count for gpus in shape.gpus) for shape in spec.all_shapes)
    for number in range(most):
        path = spec.base / "gpus" / f"gpu{number}"
        try:
            os.mknod(path, 0o666 | 0o020000, os.makedev(DEVICE_MAJOR, number))
        except PermissionError:
            path.touch()
            made_devices = False
        path.chmod(0o666)
    return made_devices


def start(record: state.Record, machine: str) -> subprocess.Popen[str]:
    """Start one machine and return its launcher, the machine's parent process. Its daemons may still be starting."""
    spec, subnet, _ = record
    groups = cgroups.create(spec.group, machine)
    namespaces = [*NAMESPACES, *(["--cgroup"] if groups else [])]
    # The launcher joins the machine's cgroups itself, before the cgroup namespace takes them as its root.
    join = "".join(f"echo 0 >'{group}/cgroup.procs'; " for group in groups)
    shared_tmp = "\n".join(spec.shared_tmp)
    arguments = [machine, str(spec.base), spec.group, shared_tmp, spec.tree, _daemons(spec, subnet, machine)]
    with (spec.base / "log" / f"{machine}.log").open("a") as log:
        launcher = subprocess.Popen(
            ["sh", "-ec", f'{join}exec "$@"', "sh", "unshare", *namespaces, SCRIPT, *arguments, *cgroups.hierarchies()],
            env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "SLURM_CONF": f"{spec.base}/etc/slurm.conf"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd="/",
            start_new_session=True,  # shields the machine from the terminal's Ctrl-C: the owner of the launcher ends it
        )
    pid = _first_pid(launcher, spec, machine)
    state.note_machine(spec.name, machine, pid)
    if machine == "ctl":
        network.make_switch(pid, spec.name, subnet, spec.second_network)
    else:
        controller = state.machines(spec.name)["ctl"].pid
        network.plug_in(controller, pid, subnet, spec.node_names.index(machine) + 1, spec.second_network)
    _tell(launcher, "go")
    return launcher


def _daemons(spec: Spec, subnet: str, machine: str) -> str:
    if machine != "ctl":
        return config.slurmd_command(spec, machine)
    before = accounting.daemon_commands(spec, subnet) if spec.accounting else []
    return "\n".join([config.munged_command(spec), *before, config.slurmctld_command(spec)])


def _first_pid(launcher: subprocess.Popen[str], spec: Spec, machine: str) -> int:
    """Return the pid that the machine's first process prints. Without an answer from here, that process ends."""
    assert launcher.stdout
    ready, _, _ = select.select([launcher.stdout], [], [], DEADLINE_S)
    answer = launcher.stdout.readline() if ready else ""
    launcher.stdout.close()
    if not answer:
        launcher.kill()
        reap(launcher)
        log = (spec.base / "log" / f"{machine}.log").read_text()
        raise SandboxError(f"{machine} of sandbox {spec.name} did not start within {DEADLINE_S:g} s: {log.strip()}")
    return int(answer)


def _tell(launcher: subprocess.Popen[str], word: str) -> None:
    assert launcher.stdin
    launcher.stdin.write(f"{word}\n")
    launcher.stdin.flush()


def detach(launcher: subprocess.Popen[str]) -> None:
    """Let the machine outlive this process."""
    _tell(launcher, "detach")


def reap(launcher: subprocess.Popen[str]) -> None:
    """Wait for the launcher of an ended machine."""
    assert launcher.stdin
    launcher.stdin.close()
    launcher.wait(DEADLINE_S)
