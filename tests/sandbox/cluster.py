"""A real multi-node Slurm cluster on this machine, as a context manager."""

import atexit
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.sandbox import cgroups, config, machines, network, state
from tests.sandbox.processes import DEADLINE_S, Process, SandboxError, wait_until
from tests.sandbox.spec import PARTITIONS, Spec

FINAL_STATES = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE")
)
COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter", "unshare", "setpriv")
ACCOUNTING_COMMANDS = ("slurmdbd", "mariadbd")


def missing(accounting: bool = False) -> str | None:
    """Return one line on what the sandbox needs and this machine lacks, or None."""
    if os.geteuid() != 0:
        return "the Slurm sandbox needs root (network namespaces, cgroups)"
    wanted = COMMANDS + (ACCOUNTING_COMMANDS if accounting else ())
    lacking = [command for command in wanted if not shutil.which(command, path=machines.PATH)]
    if lacking:
        return f"the Slurm sandbox lacks {', '.join(lacking)}: run .ci/install-slurm"
    # In a container, root may not be allowed to create namespaces.
    probe = ["unshare", *machines.NAMESPACES, "sh", "-ec", "ip link add type veth; ip link add type bridge"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=300, env={"PATH": machines.PATH})
    if tried.returncode != 0:
        return f"the Slurm sandbox cannot make network namespaces: {' '.join(tried.stderr.split())}"
    return None


class Cluster:
    """`with Cluster(nodes=3) as cluster: cluster.run(["sbatch", ...])`. Parameters: the fields of `Spec`.

    It ends when this process ends for any reason, unless `detach` is called.
    """

    def __init__(
        self, nodes: int = 3, *, name: str = "default", partitions: Mapping[str, str] | None = None, **spec: Any
    ):
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", name):
            raise SandboxError(f"sandbox name {name!r}: use 1 to 32 of a-z, 0-9 and '-'")
        self.spec = Spec(name, nodes, partitions=partitions or dict(PARTITIONS), **spec)
        limits = {"nodes": (1, 200), "cpus": (1, 1024), "memory_mb": (64, 10**8), "gpus": (0, 64)}
        for what, (least, most) in limits.items():
            if not least <= getattr(self.spec, what) <= most:
                raise SandboxError(f"sandbox with {what}={getattr(self.spec, what)}: use {least} to {most}")
        self.name = name
        self.base = self.spec.base
        self.shared: Path = self.base / "shared"
        """A directory that all nodes see under the same path. Each node has its own /tmp."""
        self.nodes = self.spec.node_names
        # torch sets TORCHINDUCTOR_CACHE_DIR in the process of the tests, and a login node does not have it.
        foreign = ("SLURM", "SBATCH", "TORCHINDUCTOR")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self.env |= {"SLURM_CONF": str(self.base / "etc/slurm.conf"), "PATH": machines.PATH}
        self._launchers: dict[str, subprocess.Popen[str]] = {}

    @classmethod
    def attach(cls, name: str = "default") -> Self:
        """Return a sandbox that another process has started."""
        return cls(**vars(state.read(name).spec))

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self, timeout: float = DEADLINE_S) -> None:
        """Start it and wait until all nodes are idle."""
        if lacking := missing(self.spec.accounting):
            raise SandboxError(lacking)
        subnet = state.claim(self.spec)
        atexit.register(self._down_at_exit, os.getpid())
        try:
            machines.write_files(self.spec, subnet)
            self._start_machine("ctl")
            for node in self.nodes:
                self._start_machine(node)
            self.wait_idle(timeout)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove everything, including the shared directory, unless another process now owns the name."""
        with state.lock():
            if not state.in_use(self.name) or state.read(self.name).owner in (None, Process.of(os.getpid())):
                state.remove(self.name)
        for launcher in self._launchers.values():
            machines.reap(launcher)
        self._launchers.clear()
        atexit.unregister(self._down_at_exit)

    def _down_at_exit(self, owner: int) -> None:
        if os.getpid() == owner:  # not in a forked child
            self.down()

    def detach(self) -> None:
        """Leave the cluster running when this process ends."""
        for launcher in self._launchers.values():
            machines.detach(launcher)
        self._launchers.clear()
        state.write(state.read(self.name)._replace(owner=None))
        atexit.unregister(self._down_at_exit)

    # For tests

    def login(self, folder: Path | str = "/") -> list[str]:
        """Return the prefix of a command that runs it as on a login node, in `folder`.

        The login node is this machine, or the controller if Slurm is in another tree or there is a second network.
        """
        inside = self.spec.tree or self.spec.second_network
        return [*self._enter("ctl"), "env", f"--chdir={folder}"] if inside else []

    def run(
        self, argv: Sequence[str | Path], timeout: float | None = DEADLINE_S, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as on a login node. Options are those of `subprocess.run`."""
        return self._run([*self.login(options.get("cwd", "/")), *argv], timeout, **options)

    def _run(
        self, argv: Sequence[str | Path], timeout: float | None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        settings: dict[str, Any] = {"env": self.env, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        if options.keys() & {"stdout", "stderr"}:
            del settings["capture_output"]
        if "input" in options:
            del settings["stdin"]
        try:
            return subprocess.run([str(word) for word in argv], timeout=timeout, **settings | options)
        except subprocess.CalledProcessError as error:  # with check=True; its own text leaves out what was printed
            error.add_note(f"{error.stdout or ''}{error.stderr or ''}".strip())
            raise

    def exec_on(
        self, node: str, argv: Sequence[str | Path], timeout: float | None = DEADLINE_S, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node (or `ctl`) without Slurm, in the node's namespaces and in directory /."""
        return self._run([*self._enter(node), *argv], timeout, **options)

    def _enter(self, node: str) -> list[str]:
        process = state.machines(self.name).get(node)
        if not process or not process.is_alive():
            raise SandboxError(f"sandbox {self.name}: {node} is not up")
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", *(["--cgroup"] if cgroups.hierarchies() else [])]
        # The command is nsenter's child on the node, and ends with nsenter if the timeout expires.
        return ["nsenter", f"--target={process.pid}", *spaces, "--", "setpriv", "--pdeathsig=KILL", "--"]

    def node_states(self) -> dict[str, str]:
        """Return node -> state in lower case with Slurm's flags, such as `down*`. Empty if Slurm does not answer."""
        try:
            answer = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"], timeout=300)
        except (subprocess.TimeoutExpired, SandboxError):
            return {}
        found = dict(line.split() for line in answer.stdout.splitlines())
        return {node: found[node] for node in self.nodes if node in found}

    def wait_idle(self, timeout: float = DEADLINE_S) -> None:
        """Wait until every node is up and idle."""
        idle = dict.fromkeys(self.nodes, "idle")
        subnet = state.read(self.name).subnet

        def check() -> bool:
            self._expect_machines()
            return network.answers(subnet, config.SLURMCTLD_PORT) and self.node_states() == idle

        wait_until(check, f"all nodes of sandbox {self.name} to be idle", timeout, self.diagnosis)

    def job_state(self, job_id: int | str) -> str:
        """Return Slurm's JobState, such as PENDING. Slurm keeps it until MinJobAge (300 s) after the job's end."""
        for _ in range(3):  # on a busy machine, scontrol may end without an answer
            answer = self.run(["scontrol", "show", "job", "--oneliner", str(job_id)], timeout=300)
            if answer.stdout or answer.stderr:
                break
        found = re.search(r"\bJobState=(\S+)", answer.stdout)
        if not found:
            said = answer.stderr.strip() or answer.stdout.strip() or f"no answer, exit code {answer.returncode}"
            raise SandboxError(f"job {job_id}: {said}")
        return found[1]

    def wait_job(self, job_id: int | str, timeout: float = DEADLINE_S, states: Collection[str] = FINAL_STATES) -> str:
        """Wait until the job is in one of `states`, and return that state."""
        seen: list[str] = []

        def check() -> bool:
            seen.append(self.job_state(job_id))
            return seen[-1] in states

        wanted = "end" if states == FINAL_STATES else f"become {' or '.join(sorted(states))}"
        show = ["scontrol", "show", "job", str(job_id)]
        wait_until(check, f"job {job_id} to {wanted}", timeout, lambda: self.run(show, timeout=300).stdout)
        return seen[-1]

    def drain(self, drained: bool) -> None:
        """Keep jobs that are queued from starting on any node, or let them start again. Running jobs continue."""
        settings = ["State=DRAIN", "Reason=held by a test"] if drained else ["State=RESUME"]
        self._update_node(",".join(self.nodes), *settings)

    def kill_node(self, node: str, notice: bool = True) -> None:
        """End a node as a power failure does: all its processes and its network, without notifying its peers.

        With `notice` the controller is told at once; otherwise it notices after SlurmdTimeout.
        """
        controller = state.machines(self.name)["ctl"].pid
        network.unplug(controller, self.nodes.index(node) + 1, self.spec.second_network)
        state.end_machine(self.name, node)
        if launcher := self._launchers.pop(node, None):
            machines.reap(launcher)
        if notice:
            self._update_node(node, "State=DOWN", "Reason=power failure")

    def cut_off(self, node: str, is_off: bool = True) -> None:
        """Take a node off the network, without notice to its peers, or connect it again. Its processes go on."""
        machines_of, number = state.machines(self.name), self.nodes.index(node) + 1
        if is_off:
            network.unplug(machines_of["ctl"].pid, number, self.spec.second_network)
            return
        subnet = state.read(self.name).subnet
        network.plug_in(machines_of["ctl"].pid, machines_of[node].pid, subnet, number, self.spec.second_network)

    def restore_node(self, node: str, timeout: float = DEADLINE_S) -> None:
        """Restart a killed node, empty, and wait until jobs can run there."""
        self._start_machine(node)
        owner = state.read(self.name).owner
        if not owner or owner.pid != os.getpid():  # then the node must outlive this process
            machines.detach(self._launchers.pop(node))
        up = {"idle", "mixed", "allocated"}
        wait_until(lambda: self.node_states().get(node) in up, f"{node} to come back", timeout, self.diagnosis)

    # Diagnostics

    def slurmctld_log(self) -> str:
        return self._log("slurmctld.log")

    def slurmd_log(self, node: str) -> str:
        return self._log(f"slurmd.{node}.log")

    def diagnosis(self) -> str:
        """Return node states and the ends of all logs, for error messages."""
        parts = [f"node states: {self.node_states()}"]
        for path in sorted((self.base / "log").glob("*.log")):
            parts.append(f"--- {path.name}\n" + "\n".join(self._log(path.name).splitlines()[-12:]))
        return "\n".join(parts)

    def _log(self, name: str) -> str:
        path = self.base / "log" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def _expect_machines(self) -> None:
        ended = [machine for machine, process in state.machines(self.name).items() if not process.is_alive()]
        if ended:
            raise SandboxError(f"sandbox {self.name}: {', '.join(ended)} ended\n{self.diagnosis()}")

    # Implementation

    def _start_machine(self, machine: str) -> None:
        self._launchers[machine] = machines.start(state.read(self.name), machine)

    def _update_node(self, node: str, *settings: str) -> None:
        self.run(["scontrol", "update", f"NodeName={node}", *settings], timeout=300, check=True)
