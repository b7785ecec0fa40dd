"""Clusters of different sites, which differ in what a job has to request. Parameters of `Cluster`.

Jobs run on the nodes with 2 CPUs. Larger nodes exist only to be listed.
"""

from typing import Any

from tests.sandbox.spec import Gpus, Shape

TYPED_GRES: dict[str, Any] = {
    "shapes": (
        Shape(2, cpus=2, sockets=2, memory_mb=8000, gpus=(Gpus(2, "a100", "0,1"),), features="ib,gen4"),
        Shape(1, cpus=16, sockets=2, memory_mb=128000, gpus=(Gpus(8, "a100", "0-7,8-15"),), features="ib,gen4"),
        Shape(1, cpus=16, sockets=2, memory_mb=64000, gpus=(Gpus(1, "a100"), Gpus(7, "a100_1g.5gb")), features="mig"),
        Shape(1, cpus=8, sockets=1, memory_mb=32000, gpus=(Gpus(4, "v100", "0-7"),), features="gen3"),
        Shape(1, cpus=32, sockets=2, memory_mb=64000),
    ),
    "partitions": {
        "gpu": "Nodes=node[1-2] Default=YES MaxTime=2-00:00:00 DefaultTime=01:00:00",
        "mixed": "Nodes=node[1-5] MaxTime=1-00:00:00",
        "cpu": "Nodes=node6 MaxTime=7-00:00:00",
        "devel": "Nodes=node[1-2] MaxTime=00:30:00 MaxNodes=1 PriorityTier=10",
        "theirs": "Nodes=node3 MaxTime=1-00:00:00 AllowAccounts=other",
        "old": "Nodes=node5 State=INACTIVE",
    },
    "accounting": True,
    "accounts": {"root": ("mlgroup", "teaching"), "nobody": ("mlgroup",), "daemon": ("other",)},
}
"""Typed GPUs, requested by --gres=gpu:TYPE:N, some split by MIG; nodes of several shapes; accounts in slurmdbd."""

WHOLE_NODES: dict[str, Any] = {
    "shapes": (
        Shape(2, cpus=2, memory_mb=0, gpus=(Gpus(2),)),
        Shape(1, cpus=2, memory_mb=0),
    ),
    "partitions": {
        "batch": "Nodes=node3 Default=YES MaxTime=1-00:00:00",
        "gpu": "Nodes=node[1-2] MaxTime=12:00:00 OverSubscribe=EXCLUSIVE",
    },
    "memory_allocated": False,
}
"""GPUs without types on whole nodes. Slurm has no information on their memory and rejects --mem. No accounting. The
default partition has no GPUs."""

SHARED_NODES: dict[str, Any] = {
    "shapes": (Shape(2, cpus=2, memory_mb=8000, gpus=(Gpus(2, "rtx6000"),)),),
    "binds_cores": True,
    "partitions": {
        "shared": "Default=YES MaxTime=1-00:00:00 DefaultTime=00:30:00 MaxMemPerCPU=4000 MaxCPUsPerNode=2",
        "preempt": "MaxTime=7-00:00:00 GraceTime=60",
    },
    "second_network": "ib0",
}
"""Jobs share nodes and are confined to their cores and memory. There is a second network besides eth0."""

_STRICT_CLI_FILTER = """
function slurm_cli_pre_submit(options, offset)
  local function refuse(text)
    slurm.log_error(text)
    return slurm.ERROR
  end
  if options["type"] ~= "sbatch" then return slurm.SUCCESS end
  if options["account"] == nil then return refuse("state your project with --account") end
  if options["gpus-per-node"] ~= nil then return refuse("request GPUs with --gres=gpu:TYPE:NUMBER") end
  local gres = options["gres"]
  if gres ~= nil and string.match(gres, "gpu:%d") then return refuse("name the type of GPU in --gres") end
  if options["mem"] ~= nil then return refuse("request memory with --mem-per-cpu") end
  return slurm.SUCCESS
end
function slurm_cli_setup_defaults(options, early_pass) return slurm.SUCCESS end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
"""
_STRICT_JOB_SUBMIT = """
function slurm_job_submit(job_desc, part_list, submit_uid)
  if job_desc.qos == nil then
    slurm.log_user("choose a quality of service: standard or long")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
"""
_LONG_TMPDIR = """#!/bin/sh
folder=/tmp/scratch.of.the.cluster/of.each.job/$SLURM_JOB_ID
mkdir -p "$folder"
echo "export TMPDIR=$folder"
"""

STRICT: dict[str, Any] = {
    "shapes": (
        Shape(2, cpus=2, memory_mb=8000, gpus=(Gpus(2, "a100"),), suffix=".cluster.example"),
        Shape(1, cpus=16, memory_mb=64000, gpus=(Gpus(4, "a100"),), suffix=".cluster.example"),
    ),
    "partitions": {
        "spot": "PreemptMode=REQUEUE PriorityTier=1 MaxTime=7-00:00:00",
        "gpu": "Default=YES Hidden=YES PriorityTier=10 PreemptMode=OFF MaxTime=1-00:00:00 MaxMemPerCPU=3000 "
        "DefMemPerCPU=1000 OverSubscribe=FORCE:2",
    },
    "accounting": True,
    "accounts": {"root": ("mlgroup", "teaching")},
    "qos": ("standard", "long"),
    "settings": {
        "CliFilterPlugins": "cli_filter/lua",
        "JobSubmitPlugins": "lua",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    },
    "files": {
        "cli_filter.lua": _STRICT_CLI_FILTER,
        "job_submit.lua": _STRICT_JOB_SUBMIT,
        "task_prolog.sh": _LONG_TMPDIR,
    },
}
"""Plugins refuse jobs without an account, a quality of service, the type of GPU in --gres, and --mem-per-cpu, one after
the other. The default partition is hidden, and its nodes have several sizes and fully qualified names. Another one is
preemptible. A TaskProlog sets a long TMPDIR."""

_PREEMPTION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
PREEMPTING: dict[str, Any] = {
    "shapes": (Shape(2, cpus=2, memory_mb=6000),),
    "partitions": {
        "graceful": "Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=300",
        "cancelling": "PriorityTier=1 PreemptMode=CANCEL GraceTime=300",
        "abrupt": "PriorityTier=1 PreemptMode=REQUEUE",
        "dropping": "PriorityTier=1 PreemptMode=CANCEL",
        "urgent": "PriorityTier=10 PreemptMode=OFF",
    },
    "settings": _PREEMPTION,
}
"""Jobs in `urgent` preempt all others, each partition in its own way."""

SIGNALLING: dict[str, Any] = {
    **PREEMPTING,
    "settings": {**_PREEMPTION, "SlurmctldParameters": "preempt_send_user_signal"},
}
"""The same, but a preempted job gets the signal of its own --signal instead of SIGTERM."""

SUSPENDING: dict[str, Any] = {
    **PREEMPTING,
    "partitions": {
        "suspended": "Default=YES PriorityTier=1 PreemptMode=SUSPEND",
        "urgent": "PriorityTier=10 PreemptMode=OFF",
    },
    "settings": {**_PREEMPTION, "PreemptMode": "SUSPEND,GANG"},
}
"""Preempted jobs are stopped, and continue later on the same nodes. With GANG, Slurm ignores GraceTime."""

VARIANTS = {"typed-gres": TYPED_GRES, "whole-nodes": WHOLE_NODES, "shared-nodes": SHARED_NODES, "strict": STRICT}

LARGE: dict[str, Any] = {
    "shapes": (
        Shape(1, cpus=2, memory_mb=6000),
        Shape(800, cpus=64, sockets=2, memory_mb=512000, gpus=(Gpus(8, "a100"),), prefix="gpu", runs=False),
        Shape(200, cpus=128, sockets=2, memory_mb=256000, features="milan", prefix="cpu", runs=False),
    ),
    "partitions": {
        "gpu": "Nodes=gpu[2-801] Default=YES MaxTime=2-00:00:00",
        "cpu": "Nodes=cpu[802-1001] MaxTime=4-00:00:00",
        "all": "MaxTime=04:00:00",
    },
    "slurmd_timeout_s": 0,  # nodes without slurmd are not marked as down
}
"""A thousand nodes that the controller lists, and one that runs, because a controller needs one."""
