"""What the sandbox is (`Spec`) and the configuration files that follow from it, as pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.sandbox.network import CONTROLLER

PARTITIONS = {"debug": "Default=YES MaxTime=INFINITE", "short": "MaxTime=00:10:00 DefaultTime=00:01:00"}

SLURMCTLD_PORT = 6817  # Slurm's default; each sandbox has an address of its own


@dataclass(frozen=True)
class Spec:
    """A cluster, in Slurm's terms."""

    name: str
    nodes: int = 3
    cpus: int = 2
    memory_mb: int = 6000
    gpus: int = 0
    accounting: bool = False
    partitions: Mapping[str, str] = field(default_factory=lambda: dict(PARTITIONS))
    """Partition name -> options after `PartitionName=... Nodes=ALL`."""
    kill_wait_s: int = 5
    """Between SIGTERM and SIGKILL to a job that is cancelled or over its time limit."""
    requeue_hold_s: int = 5
    """How long Slurm holds a requeued job back (120 on most clusters). A job started before that is requeued again."""
    slurmd_timeout_s: int = 20
    """Silence after which the controller takes a node for down."""
    own_tmp: bool = True
    """Whether each node has a /tmp of its own."""

    @property
    def group(self) -> str:
        return f"hpc-rl-sandbox-{self.name}"

    @property
    def base(self) -> Path:
        return Path("/var/tmp") / self.group

    @property
    def node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]


def hosts_file(spec: Spec, subnet: str) -> str:
    nodes = [f"{subnet}.{number} {node}" for number, node in enumerate(spec.node_names, 1)]
    return "\n".join(["127.0.0.1 localhost", f"{subnet}.{CONTROLLER} ctl", *nodes, ""])


def slurm_conf(spec: Spec, subnet: str, confined: bool, cores: bool) -> str:
    """`confined`: with cgroups. `cores`: bind jobs to cores, which a node must have, not just pose as having."""
    task_plugins = ["task/affinity"] * cores + ["task/cgroup"] * confined
    base, controller = spec.base, f"{subnet}.{CONTROLLER}"
    lines = [
        f"ClusterName={spec.name}",
        f"SlurmctldHost=ctl({controller})",
        f"SlurmctldPort={SLURMCTLD_PORT}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        # A requeued job is held until credentials of its last run have expired.
        f"AuthInfo=socket={base}/run/munge.socket,cred_expire={spec.requeue_hold_s}",
        "MpiDefault=none",
        "MailProg=/bin/true",
        f"StateSaveLocation={base}/state",
        f"SlurmctldPidFile={base}/run/slurmctld.pid",
        f"SlurmctldLogFile={base}/log/slurmctld.log",
        f"SlurmdSpoolDir={base}/spool/%n",
        f"SlurmdPidFile={base}/run/slurmd.%n.pid",
        f"SlurmdLogFile={base}/log/slurmd.%n.log",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"TaskPlugin={','.join(task_plugins) or 'task/none'}",
        "ProctrackType=" + ("proctrack/cgroup" if confined else "proctrack/linuxproc"),
        # Let a small machine pose as larger nodes, and take a node back however it was lost.
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        f"SlurmdTimeout={spec.slurmd_timeout_s}",
        "JobRequeue=1",
        f"KillWait={spec.kill_wait_s}",
        "MinJobAge=300",
        # Schedule at once, rather than in the batches that suit a large cluster.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
        f"DefMemPerCPU={spec.memory_mb // spec.cpus}",
    ]
    if spec.accounting:
        lines += ["AccountingStorageType=accounting_storage/slurmdbd", f"AccountingStorageHost={controller}"]
        lines += [f"AccountingStoragePass={base}/run/munge.socket"]
        lines += ["JobAcctGatherType=jobacct_gather/linux", "JobAcctGatherFrequency=5"]
        lines += ["AccountingStorageTRES=gres/gpu"] if spec.gpus else []
    gres = f" Gres=gpu:{spec.gpus}" if spec.gpus else ""
    lines += ["GresTypes=gpu"] if spec.gpus else []
    lines += [
        f"NodeName=node[1-{spec.nodes}] NodeAddr={subnet}.[1-{spec.nodes}]"
        f" Sockets=1 CoresPerSocket={spec.cpus} ThreadsPerCore=1 RealMemory={spec.memory_mb}{gres} State=UNKNOWN",
        *(f"PartitionName={name} Nodes=ALL State=UP {options}".rstrip() for name, options in spec.partitions.items()),
    ]
    return "\n".join([*lines, ""])


def cgroup_conf(confined: bool, cores: bool, devices: bool) -> str:
    """Names the plugin for v1 even where nothing uses it: the one for v2 may demand systemd or stop slurmd."""
    constrain = {"RAMSpace": confined, "Cores": confined and cores, "Devices": confined and devices}
    settings = [f"Constrain{what}={'yes' if wanted else 'no'}" for what, wanted in constrain.items()]
    return "\n".join(["CgroupPlugin=cgroup/v1", "CgroupMountpoint=/sys/fs/cgroup", *settings, ""])


def gres_conf(spec: Spec) -> str:
    return f"Name=gpu File={spec.base}/gpus/gpu[0-{spec.gpus - 1}]\n" if spec.gpus else ""


def munged_command(spec: Spec) -> str:
    """Authentication of its own: the host's munged, if any, has another key."""
    base = spec.base
    return (
        f"munged --force --key-file={base}/munge/key --socket={base}/run/munge.socket"
        f" --pid-file={base}/munge/pid --log-file={base}/munge/log --seed-file={base}/munge/seed"
    )


def slurmctld_command(spec: Spec) -> str:
    return f"slurmctld -f {spec.base}/etc/slurm.conf"


def slurmd_command(spec: Spec, node: str) -> str:
    return f"slurmd -N {node} -f {spec.base}/etc/slurm.conf"
