"""`python -m tests.sandbox.record [--tree TREE]`: records the output of a real Slurm, for the tests of its parsers.

Each file of tests/slurm/recorded/VARIANT-VERSION/ contains the command, then its exit code if that is not 0, then the
output.
"""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.slurm.cluster import SINFO_FORMAT
from tests.sandbox.cluster import Cluster
from tests.sandbox.variants import VARIANTS

FOLDER = Path(__file__).parents[1] / "slurm" / "recorded"

SINFO = "sinfo -h -e"
QUEUED = '-O "JobArrayID:40|,State:30|,NodeList:400|,Reason:100|,StartTime:30|"'
RECORDED = "-o JobID,State,ExitCode,NodeList,Reason"
FIELDS = [
    *("Partition:60|", "Available:10|", "Time:20|", "DefaultTime:20|", "Nodes:10|", "NodeList:60|", "CPUs:10|"),
    *("Memory:20|", "Gres:200|", "Features:100|", "OverSubscribe:20|", "Root:10|", "Groups:60|", "StateLong:20|"),
]
CLUSTER = {
    "version": "sinfo --version",
    "sinfo": f'{SINFO} -o "{SINFO_FORMAT}"',
    "sinfo-minimum": 'sinfo -h -o "%P|%a|%l|%D|%c|%m|%G|%f|%T"',
    "sinfo-fields": f'{SINFO} -O "{",".join(FIELDS)}"',
    "sinfo-summary": "sinfo -s",
    "show-config": "scontrol show config",
    "show-partition": "scontrol show partition -o",
    "show-node": "scontrol show node -o {node}",
    "assoc": "sacctmgr -nP show assoc user=root format=Cluster,Account,User,Partition,QOS,DefaultQOS,MaxWall,MaxTRES",
    "assoc-nobody": "sacctmgr -nP show assoc user=nobody format=Cluster,Account,User,Partition,QOS,DefaultQOS",
    "assoc-unknown": "sacctmgr -nP show assoc user=bin format=Cluster,Account,User,Partition,QOS,DefaultQOS",
    "user": "sacctmgr -nP show user root format=User,DefaultAccount",
    "user-assoc": "sacctmgr -nP show user root withassoc format=User,DefaultAccount,Account,Partition,QOS,DefaultQOS",
    "refused-gpus": "sbatch --test-only -p {gpus} --gpus-per-node=64 --wrap true",
    "refused-memory": "sbatch --test-only -p {gpus} --mem=900G --wrap true",
    "refused-account": "sbatch --test-only -p {gpus} -A nobodys --wrap true",
}
TRIAL = "sbatch --test-only --wrap true"
STRICT = CLUSTER | {
    "sinfo": CLUSTER["sinfo"].replace("sinfo", "sinfo -a", 1),
    "show-partition": f"{CLUSTER['show-partition']} -a",
    "refused-by-cli-filter-account": TRIAL,
    "refused-by-cli-filter-gpus": f"{TRIAL} -A mlgroup --gpus-per-node=1",
    "refused-by-cli-filter-type": f"{TRIAL} -A mlgroup --gres=gpu:1",
    "refused-by-cli-filter-mem": f"{TRIAL} -A mlgroup --mem=100",
    "refused-by-job-submit-qos": f"{TRIAL} -A mlgroup --mem-per-cpu=100",
    "refused-qos": f"{TRIAL} -A mlgroup --qos=nobodys",
    "accepted": f"{TRIAL} -A mlgroup --gres=gpu:a100:1 --mem-per-cpu=100 --qos=standard",
}
"""With hidden partitions, and what strict plugins answer. They refuse all jobs below."""
JOB = {
    "sacct": f"sacct -X -n -P --duplicates {RECORDED} -j {{job}}",
    "squeue": f"squeue -h -t all -r {QUEUED} -j {{job}}",
    "squeue-id": 'squeue -h -o "%i" -j {job}',
    "show-job": "scontrol show job -o {job}",
}
ALL_JOBS = {
    "sacct-all": "sacct -X -n -P --duplicates -o JobID,State,ExitCode,NodeList,Reason,ElapsedRaw,AllocNodes",
    "squeue-all": f"squeue -h -t all -r {QUEUED}",
}
ON_NODE = {"ip": "ip -o -4 addr", "ip-route": "ip -4 route"}


def record(variant: str, tree: str = "") -> Path:
    """Record everything from one cluster and return the folder."""
    with Cluster(name=f"record-{variant}", tree=tree, **VARIANTS[variant]) as cluster:
        version = cluster.run(["sinfo", "--version"], check=True).stdout.split()[-1]
        folder = FOLDER / f"{variant}-{version}"
        folder.mkdir(parents=True, exist_ok=True)
        gpus = "shared" if "shared" in cluster.spec.partitions else "gpu"
        for name, command in commands_of(variant).items():
            write(cluster, folder / f"{name}.txt", command.format(gpus=gpus, node=cluster.nodes[0]))
        for name, command in ON_NODE.items():
            for short, machine in (("ctl", "ctl"), ("node1", cluster.nodes[0])):
                write(cluster, folder / f"{name}-{short}.txt", command, machine)
        if variant == "strict":
            return folder
        for state, job in jobs(cluster, gpus).items():
            for name, command in JOB.items():
                write(cluster, folder / f"{name}-{state}.txt", command.format(job=job))
        for name, command in ALL_JOBS.items():
            write(cluster, folder / f"{name}.txt", command)
    return folder


def commands_of(variant: str) -> Mapping[str, str]:
    """Return the commands that are recorded on an idle cluster: name -> command."""
    return STRICT if variant == "strict" else CLUSTER


def jobs(cluster: Cluster, partition: str) -> Mapping[str, str]:
    """Submit a job for each state and return state -> job id. The command line of each is in its `show-job`."""
    options = ["--parsable", "--output=/dev/null", "--partition", partition]
    submitted = {
        "completed": ["--wrap", "true"],
        "failed": ["--wrap", "exit 3"],
        "running": ["--nodes=2", "--gpus-per-node=1", "--wrap", "sleep 60"],
        "pending": ["--hold", "--wrap", "true"],
        "array": ["--hold", "--array=0-2%2", "--wrap", "true"],
    }
    found = {}
    for state, arguments in submitted.items():
        found[state] = cluster.run(["sbatch", *options, *arguments], check=True, cwd=cluster.shared).stdout.strip()
        if state not in ("pending", "array"):
            cluster.wait_job(found[state], states={state.upper()})
    return found


def write(cluster: Cluster, path: Path, command: str, machine: str = "") -> None:
    argv = shlex.split(command)
    done = cluster.exec_on(machine, argv) if machine else cluster.run(argv, cwd=cluster.shared)
    code = f"# exit code {done.returncode}\n" if done.returncode else ""
    path.write_text(f"# {command}\n{code}{done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sandbox.record", description=__doc__)
    parser.add_argument("--tree", default="", help="root directory of another Debian whose Slurm is used")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="record only this one; repeatable")
    options = parser.parse_args()
    for variant in options.variant or VARIANTS:
        print(record(variant, options.tree))


if __name__ == "__main__":
    main()
