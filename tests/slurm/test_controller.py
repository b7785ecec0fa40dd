"""What Slurm 22.05.8 said of sandboxes, in parts: `scontrol show config`, `scontrol show partition -o`, `sacctmgr`."""

from hpc_rl.slurm.controller import Partition, chosen, read_associations, read_config, read_partitions, read_ping

CONFIG = """Configuration data as of 2026-11-21T10:07:15
AccountingStorageEnforce = none
AccountingStorageParameters = (null)
AccountingStorageType   = accounting_storage/slurmdbd
KillWait                = 5 sec
MinJobAge               = 300 sec
PreemptType             = preempt/none
SchedulerParameters     = batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SLURM_VERSION           = 22.05.8

Cgroup Support Configuration:
MinRAMSpace             = 30 MB

Slurmctld(primary) at ctl is UP
"""
PARTITIONS = (
    "PartitionName=debug AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=node[1-2] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO "
    "ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=4 TotalNodes=2 "
    "SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED TRES=cpu=4,mem=12000M,node=2,billing=4\n"
    "PartitionName=short AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=00:01:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime=00:10:00 MinNodes=0 LLN=NO Nodes=node[1-2] PreemptMode=OFF State=UP TotalCPUs=4 TotalNodes=2\n"
)
DEBUG = Partition("debug", True, "UP", "UNLIMITED", "NONE", "OFF", 0, 2)
SHORT = Partition("short", False, "UP", "00:10:00", "00:01:00", "OFF", 0, 2)


def test_the_configuration() -> None:
    config = read_config(CONFIG)
    assert (config["SLURM_VERSION"], config["KillWait"], config["MinRAMSpace"]) == ("22.05.8", "5 sec", "30 MB")
    assert config["SchedulerParameters"].endswith(",bf_interval=1") and config["AccountingStorageParameters"] == ""


def test_whether_controllers_answer() -> None:
    assert read_ping(CONFIG) == {"ctl": True}
    # As scontrol prints it with a second controller that is down.
    assert read_ping("Slurmctld(primary) at a is UP\nSlurmctld(backup) at b is DOWN\n") == {"a": True, "b": False}


def test_partitions_and_which_one_a_job_goes_to() -> None:
    assert read_partitions(PARTITIONS) == [DEBUG, SHORT]
    assert [chosen([DEBUG, SHORT], name) for name in (None, "short", "gpu,short", "gpu")] == [DEBUG, SHORT, SHORT, None]


def test_accounts() -> None:
    assert read_associations("mygroup\nroot\nmygroup\n") == ["mygroup", "root"]
    assert read_associations("") == []
