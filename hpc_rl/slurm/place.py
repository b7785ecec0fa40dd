"""Where a job lives, and the environment in which each of Slurm's programs is called. Pure, except for small reads.

Slurm's programs take their cluster, and much of what they print, from variables. A later command has to ask the cluster
that has the job, whatever the user's shell has set meanwhile. So what decides it is recorded with the job, and every
program is called with `Place.environment` and `Place.words`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
"""Variables that choose a cluster, the one that counts first."""
DEFAULT_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
"""Where Slurm looks without SLURM_CONF."""
_OF_ALLOCATION = re.compile(
    r"SLURM_(\w+_HET_GROUP_\d+|ARRAY_\w+|CLUSTER_NAME|CONTAINER|CPU_BIND\w*|CPU_FREQ_REQ|CPUS_\w+|DIST_PLANESIZE|"
    r"DISTRIBUTION|EXPORT_ENV|GET_USER_ENV|GPU_BIND|GPU_FREQ|GPUS(_\w+)?|GTIDS|HET_SIZE|JOB_\w+|JOBID|"
    r"LAUNCH_NODE_IPADDR|LOCALID|MEM_BIND\w*|MEM_PER_\w+|NNODES|NODE_ALIASES|NODEID|NODELIST|NPROCS|NTASKS(_\w+)?|"
    r"OOM_KILL_STEP|OVERCOMMIT|PRIO_PROCESS|PROCID|PROFILE|PTY_\w+|RESTART_COUNT|RLIMIT_\w+|SCRIPT_CONTEXT|"
    r"SEGMENT_SIZE|SHARDS_ON_NODE|SRUN_COMM_\w+|STEP_(?!GRES|KILLED)\w+|STEPID|SUBMIT_\w+|TASK_PID|TASKS_PER_NODE|"
    r"THREADS_PER_CORE|TOPOLOGY_\w+|TRES_\w+|UMASK|WORKING_CLUSTER)|SLURMD_NODENAME|SRUN_(DEBUG|CPUS_PER_TASK)"
)
"""Variables that sbatch, salloc and srun set in an allocation (their manual pages, OUTPUT ENVIRONMENT VARIABLES, from
22.05 to 25.11, and those that they set without a description). Those of srun's options that a user may set too are
among them. Job scripts set SRUN_CPUS_PER_TASK."""
_OF_OUTPUT = ("SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SCANCEL_", "SACCTMGR_")
"""Beginnings of variables that change what one program prints or does."""
_FIXED = {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}
"""Times as hpc-rl reads them, and never `12_[1,3,...]` (sacct's manual page)."""
_WITHOUT_CLUSTERS = ("sacctmgr",)


class NoAnswer(Exception):
    """Slurm cannot be reached: its programs are missing, or its controller does not answer.

    This implies nothing about the state of a job.
    """


@dataclass(frozen=True)
class Place:
    """A cluster, and how its controller is found."""

    cluster: str = ""
    """Name for --clusters; empty for the cluster that Slurm's configuration on this machine describes."""
    conf: str = ""
    """SLURM_CONF; empty for Slurm's default."""
    server: str = ""
    """SLURM_CONF_SERVER, for machines without a configuration file."""
    name: str = ""
    """ClusterName in the configuration file; empty if it is not readable."""
    is_recorded: bool = False
    """Whether it was recorded, maybe on another machine or in another shell."""

    def words(self, program: str) -> list[str]:
        """Return the option that names the cluster, for one of Slurm's programs."""
        return [f"--clusters={self.cluster}"] if self.cluster and program not in _WITHOUT_CLUSTERS else []

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for a program of Slurm.

        Raises:
            NoAnswer: this machine does not have the configuration that the job was submitted with.
        """
        kept = {
            key: value
            for key, value in environ.items()
            if key not in CLUSTERS and not key.startswith(_OF_OUTPUT) and not _OF_ALLOCATION.fullmatch(key)
        }
        if self.is_recorded:
            conf = self._conf_here(environ)
            kept.pop("SLURM_CONF", None)
            kept |= {"SLURM_CONF": conf} if conf else {}
            if self.server and not conf:
                kept["SLURM_CONF_SERVER"] = self.server
        return kept | _FIXED

    def may_be_in(self, clusters: str) -> bool:
        """Return whether a job with this value of --clusters may go here.

        Where nothing was recorded, the job of an earlier version may have been in any cluster that its script names.
        """
        names = clusters.lower().split(",")
        if clusters in ("", "all") or not (self.cluster or self.is_recorded):
            return True
        return (self.cluster.lower() or self.name) in names

    def record(self) -> dict[str, str]:
        """Return the fields of job.json."""
        return {"cluster": self.cluster, "slurm_conf": self.conf, "conf_server": self.server, "cluster_name": self.name}

    def _conf_here(self, environ: Mapping[str, str]) -> str:
        """Return the SLURM_CONF with which the recorded cluster is found from here; empty for none."""
        now = environ.get("SLURM_CONF", "")
        if self.conf == now or (self.conf and Path(self.conf).is_file()):
            return self.conf
        if not self.conf and any(Path(file).is_file() for file in DEFAULT_FILES):
            return ""
        # A node of a cluster has its own copy of the configuration, at another path.
        if self.name and self.name == cluster_name(environ):
            return now
        if not self.conf:
            return ""
        named = f" of cluster {self.name}" if self.name else ""
        raise NoAnswer(
            f"the job was submitted with SLURM_CONF={self.conf}, which is not on this machine: set SLURM_CONF to the "
            f"slurm.conf{named}, or use the machine from which the job was submitted"
        )


def here(environ: Mapping[str, str], clusters: str | None = None) -> Place:
    """Return the place of new jobs, and of questions that are not about a job.

    Args:
        clusters: value of --clusters; None for the cluster that the environment names.
    """
    if clusters is None:
        clusters = asked_clusters(environ)
    conf = environ.get("SLURM_CONF", "")
    conf = str(Path(conf).absolute()) if conf else ""
    return Place(clusters, conf, environ.get("SLURM_CONF_SERVER", ""), cluster_name(environ))


def recorded(job: Mapping[str, Any], environ: Mapping[str, str]) -> Place:
    """Return the place of a recorded job. A job of an earlier version has no record: its cluster is the local one."""
    found = job.get("place")
    if not isinstance(found, Mapping):
        return here(environ, "")
    cluster, conf, server, name = (
        str(found.get(key) or "") for key in ("cluster", "slurm_conf", "conf_server", "cluster_name")
    )
    return Place(cluster, conf, server, name, is_recorded=True)


def asked_clusters(environ: Mapping[str, str]) -> str:
    """Return the clusters that variables ask for, as a value of --clusters; empty for the local one."""
    return next((value for name in CLUSTERS if (value := environ.get(name))), "")


def is_single(clusters: str) -> bool:
    """Return whether a value of --clusters names at most one cluster, so that questions about it have one answer."""
    return "," not in clusters and clusters != "all"


def cluster_name(environ: Mapping[str, str]) -> str:
    """Return the ClusterName of the configuration file in use; empty if there is none that can be read."""
    conf = environ.get("SLURM_CONF")
    for file in (conf,) if conf else DEFAULT_FILES:
        try:
            text = Path(file).read_text(errors="replace")
        except OSError:
            continue
        if found := re.search(r"^[ \t]*ClusterName[ \t]*=[ \t]*(\S+)", text, re.M | re.I):
            return found[1].lower()
    return ""


def by_place(jobs: Iterable[tuple[str, Place]]) -> dict[Place, list[str]]:
    """Return the job ids of each place."""
    found: dict[Place, list[str]] = {}
    for job_id, place in jobs:
        found.setdefault(place, []).append(job_id)
    return found


def changed_words(environ: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the words for env(1) that turn one environment into another."""
    gone = [word for name in environ if name not in wanted for word in ("-u", name)]
    return [*gone, *(f"{name}={value}" for name, value in wanted.items() if environ.get(name) != value)]
