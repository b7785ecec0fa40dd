"""The configuration files of a sandbox, as pure functions of its `Spec`."""

import re

from tests.sandbox.network import CONTROLLER
from tests.sandbox.spec import Gpus, Shape, Spec

SLURMCTLD_PORT = 6817  # Slurm's default; each sandbox has an address of its own


def hosts_file(spec: Spec, subnet: str) -> str:
    nodes = [f"{subnet}.{number} {node}" for number, node in enumerate(spec.node_names, 1)]
    return "\n".join(["127.0.0.1 localhost", f"{subnet}.{CONTROLLER} ctl", *nodes, ""])


def slurm_conf(spec: Spec, subnet: str, confined: bool, cores: bool) -> str:
    """Return slurm.conf.

    Args:
        confined: confine jobs with cgroups.
        cores: bind jobs to cores, which the machine must really have.
    """
    task_plugins = ["task/affinity"] * cores + ["task/cgroup"] * confined
    base, controller = spec.base, f"{subnet}.{CONTROLLER}"
    lines = [
        f"ClusterName={spec.name}",
        f"SlurmctldHost=ctl({controller})",
        f"SlurmctldPort={SLURMCTLD_PORT}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        # A requeued job is held until the credentials of its previous start have expired.
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
        "SelectTypeParameters=" + ("CR_Core_Memory" if spec.memory_allocated else "CR_Core"),
        f"TaskPlugin={','.join(task_plugins) or 'task/none'}",
        "ProctrackType=" + ("proctrack/cgroup" if confined else "proctrack/linuxproc"),
        # Let nodes claim more CPUs than the machine has, and accept a node again after any loss.
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        f"SlurmdTimeout={spec.slurmd_timeout_s}",
        "JobRequeue=1",
        f"KillWait={spec.kill_wait_s}",
        "MinJobAge=300",
        # Schedule at once, not in batches as on a large cluster.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
    ]
    if spec.memory_allocated and "DefMemPerCPU" not in spec.settings:
        lines += [f"DefMemPerCPU={min(shape.memory_mb // shape.cpus for shape in spec.all_shapes)}"]
    if spec.accounting:
        lines += ["AccountingStorageType=accounting_storage/slurmdbd", f"AccountingStorageHost={controller}"]
        lines += [f"AccountingStoragePass={base}/run/munge.socket"]
        lines += ["JobAcctGatherType=jobacct_gather/linux", "JobAcctGatherFrequency=5"]
        lines += ["AccountingStorageTRES=gres/gpu"] if _has_gpus(spec) else []
        lines += ["AccountingStorageEnforce=associations,limits,qos"] if spec.accounts else []
    lines += ["GresTypes=gpu"] if _has_gpus(spec) else []
    lines += [f"{name}={value}" for name, value in spec.settings.items()]
    lines += [f"TaskProlog={base}/etc/task_prolog.sh"] if "task_prolog.sh" in spec.files else []
    lines += _node_lines(spec, subnet)
    for name, options in spec.partitions.items():
        nodes = "" if re.search(r"\bNodes=", options) else " Nodes=ALL"
        lines.append(f"PartitionName={name}{nodes} {options}".rstrip())
    return "\n".join([*lines, ""])


def _has_gpus(spec: Spec) -> bool:
    return any(shape.gpus for shape in spec.all_shapes)


def _node_lines(spec: Spec, subnet: str) -> list[str]:
    lines = []
    for shape, names in spec.named_shapes():
        first = spec.node_names.index(names[0]) + 1 if shape.runs else 0
        # A node without a machine gets an address at which nothing listens.
        address = f"{subnet}.{_range(first, shape.count)}" if shape.runs else "127.0.0.1"
        options = {
            "NodeAddr": address,
            "Sockets": shape.sockets,
            "CoresPerSocket": shape.cpus // shape.sockets,
            "ThreadsPerCore": 1,
            "RealMemory": shape.memory_mb,
            "Gres": shape.gres,
            "Features": shape.features,
            "State": "UNKNOWN",
        }
        words = [f"{key}={value}" for key, value in options.items() if value]
        lines.append(" ".join([f"NodeName={_hostlist(shape, names)}", *words]))
    return lines


def _hostlist(shape: Shape, names: list[str]) -> str:
    """Return the nodes of a shape as in slurm.conf, which accepts a range only at the end of a name."""
    if shape.suffix:
        return ",".join(names)
    return f"{shape.prefix}{_range(int(names[0].removeprefix(shape.prefix)), shape.count)}"


def _range(first: int, count: int) -> str:
    return f"[{first}-{first + count - 1}]"


def cgroup_conf(confined: bool, cores: bool, devices: bool) -> str:
    """Return cgroup.conf. It always names the plugin for v1: the plugin for v2 may need systemd or stop slurmd."""
    constrain = {"RAMSpace": confined, "Cores": confined and cores, "Devices": confined and devices}
    settings = [f"Constrain{what}={'yes' if wanted else 'no'}" for what, wanted in constrain.items()]
    return "\n".join(["CgroupPlugin=cgroup/v1", "CgroupMountpoint=/sys/fs/cgroup", *settings, ""])


def gres_conf(spec: Spec) -> str:
    lines = []
    for shape, names in spec.named_shapes():
        device = 0
        for gpus in shape.gpus:
            for files, cores in _device_files(gpus, device):
                options = [f"Type={gpus.type}"] * bool(gpus.type) + [f"Cores={cores}"] * bool(cores)
                line = [f"NodeName={_hostlist(shape, names)} Name=gpu", *options, f"File={spec.base}/gpus/gpu{files}"]
                lines.append(" ".join(line))
            device += gpus.count
    return "\n".join([*lines, ""])


def _device_files(gpus: Gpus, first: int) -> list[tuple[str, str]]:
    """Return ranges of device files with their local cores: cores "0-7,8-15" are divided in equal parts."""
    parts = gpus.cores.split(",")
    each = gpus.count // len(parts)
    return [(_range(first + each * number, each), cores) for number, cores in enumerate(parts)]


def munged_command(spec: Spec) -> str:
    """Return the command of the sandbox's own munged: the host's munged, if any, has another key."""
    base = spec.base
    return (
        f"munged --force --key-file={base}/munge/key --socket={base}/run/munge.socket"
        f" --pid-file={base}/munge/pid --log-file={base}/munge/log --seed-file={base}/munge/seed"
    )


def slurmctld_command(spec: Spec) -> str:
    return f"slurmctld -f {spec.base}/etc/slurm.conf"


def slurmd_command(spec: Spec, node: str) -> str:
    return f"slurmd -N {node} -f {spec.base}/etc/slurm.conf"
