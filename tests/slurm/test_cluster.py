"""Parsing of output that tests/sandbox recorded from real Slurm clusters."""

from pathlib import Path

import pytest

from hpc_rl.slurm.capacity import Need, describe, refusal, shapes
from hpc_rl.slurm.cluster import (
    Association,
    chosen,
    parse_gpus,
    preemption,
    read_associations,
    read_config,
    read_controllers,
    read_interfaces,
    read_partitions,
    read_sinfo,
)
from tests.helpers import recorded

CLUSTERS = sorted(file.parent.name for file in (Path(__file__).parent / "recorded").glob("*/show-config.txt"))
TYPED, WHOLE, SHARED, STRICT = (
    [name for name in CLUSTERS if name.startswith(variant)]
    for variant in ("typed-gres", "whole-nodes", "shared-nodes", "strict")
)


@pytest.mark.parametrize("cluster", TYPED)
def test_nodes_of_several_shapes_gpus_of_several_types(cluster: str) -> None:
    groups = read_sinfo(recorded(cluster, "sinfo"))
    mixed = [group for group in groups if group.partition == "mixed"]
    assert [(group.nodes, dict(group.gpus), group.cpus, group.memory_mb) for group in mixed] == [
        (2, {"a100": 2}, 2, 8000),
        (1, {"a100": 8}, 16, 128000),
        (1, {"a100": 1, "a100_1g.5gb": 7}, 16, 64000),
        (1, {"v100": 4}, 8, 32000),
    ]
    assert [group.partition for group in groups if group.is_default] == ["gpu"]
    assert mixed[0].features == ("ib", "gen4")
    (cpu,) = [group for group in groups if group.partition == "cpu"]
    assert (dict(cpu.gpus), cpu.features, cpu.time_limit) == ({}, (), "7-00:00:00")
    assert describe(mixed[2]) == "1 node with 1 a100 and 7 a100_1g.5gb (16 CPUs, 64000 MB)"


@pytest.mark.parametrize("cluster", WHOLE)
def test_gpus_without_types_and_memory_that_nobody_said(cluster: str) -> None:
    (group,) = [group for group in read_sinfo(recorded(cluster, "sinfo")) if group.partition == "gpu"]
    assert (dict(group.gpus), group.memory_mb, describe(group)) == ({"": 2}, 1, "2 nodes with 2 GPUs (2 CPUs)")
    (partition,) = [one for one in read_partitions(recorded(cluster, "show-partition")) if one.name == "gpu"]
    assert partition.exclusive and partition.max_time == "12:00:00"


@pytest.mark.parametrize("cluster", SHARED)
def test_limits_of_a_partition(cluster: str) -> None:
    first, second = read_partitions(recorded(cluster, "show-partition"))
    assert (first.name, first.is_default, first.max_cpus_per_node, first.max_mem_per_cpu_mb) == (
        "shared",
        True,
        2,
        4000,
    )
    assert (second.name, second.is_default, second.max_cpus_per_node, second.cpus) == ("preempt", False, None, 4)


@pytest.mark.parametrize("cluster", TYPED)
def test_who_may_use_a_partition(cluster: str) -> None:
    by_name = {one.name: one for one in read_partitions(recorded(cluster, "show-partition"))}
    assert by_name["theirs"].accounts == {"other"} and by_name["gpu"].accounts is None
    assert (by_name["gpu"].state, by_name["old"].state) == ("UP", "INACTIVE")
    assert (by_name["gpu"].default_time, by_name["gpu"].preempt_mode, by_name["gpu"].grace_s) == ("01:00:00", "OFF", 0)


@pytest.mark.parametrize("cluster", TYPED)
def test_which_partition_a_job_goes_to(cluster: str) -> None:
    partitions = read_partitions(recorded(cluster, "show-partition"))
    found = [chosen(partitions, name) for name in (None, "cpu", "nowhere,cpu", "nowhere")]
    assert [one and one.name for one in found] == ["gpu", "cpu", "cpu", None]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_settings_and_whether_controllers_answer(cluster: str) -> None:
    text = recorded(cluster, "show-config")
    config = read_config(text)
    assert config["KillWait"].endswith(" sec") and config["SlurmctldPort"].isdigit()
    assert "(null)" in text and "(null)" not in config.values()
    assert read_controllers(text) == {"ctl": True}
    # As scontrol prints it with a second controller that is down.
    assert read_controllers("Slurmctld(primary) at a is UP\nSlurmctld(backup) at b is DOWN\n") == {
        "a": True,
        "b": False,
    }


@pytest.mark.parametrize("cluster", SHARED)
def test_the_warning_before_a_preemption(cluster: str) -> None:
    _, preempt = read_partitions(recorded(cluster, "show-partition"))
    assert (preempt.preempt_mode, preempt.grace_s) == ("OFF", 60)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_accounts_where_there_is_accounting(cluster: str) -> None:
    config = read_config(recorded(cluster, "show-config"))
    assert config["SLURM_VERSION"] == cluster.rpartition("-")[2]
    found = read_associations(recorded(cluster, "assoc"), config["ClusterName"])
    if config.get("AccountingStorageType", "").endswith("slurmdbd"):
        assert {one.account for one in found} >= {"mlgroup", "teaching"}
        qos = ("long", "normal", "standard") if cluster in STRICT else ("normal",)
        assert found[0] == Association(found[0].account, "", qos, "")
    else:
        assert found == []
    assert read_associations(recorded(cluster, "assoc"), "another-cluster") == []


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_interfaces(cluster: str) -> None:
    found = read_interfaces(recorded(cluster, "ip-node1"))
    assert list(found) == (["eth0", "ib0"] if cluster in SHARED else ["eth0"])
    assert all(address.startswith("10.") for address in found.values())


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:4090:8", {"4090": 8}),
        ("gpu:no_consume:2", {"": 2}),
        ("gpu:a100:no_consume:2", {"a100": 2}),
        ("gpu", {"": 1}),
    ],
)
def test_gpus_as_the_manual_page_has_them(gres: str, gpus: dict[str, int]) -> None:
    assert parse_gpus(gres) == gpus


def test_gpus_near_to_several_sockets() -> None:
    text = recorded("odd-gres-22.05.8", "sinfo")
    assert "(S:0,2)" in text
    assert [dict(group.gpus) for group in read_sinfo(text)] == [{"a100": 1, "t4": 1, "v100": 2}]


@pytest.mark.parametrize("cluster", TYPED)
@pytest.mark.parametrize(
    ("partition", "need", "said"),
    [
        (None, Need(2, 2, "a100", 2, 8000), None),
        ("mixed", Need(3, 1, "a100", 1, 0), None),
        ("cpu", Need(1, 0, None, 32, 0), None),
        ("devel,mixed", Need(1, 8, None, 16, 0), None),
        (
            None,
            Need(1, 8, "a100", 16, 0),
            "(2 CPUs, 8000 MB); partition mixed or theirs has",
        ),
        ("gpu", Need(3, 2, None, 2, 0), "partition gpu cannot provide 3 nodes with 2 GPUs and 2 CPUs each"),
        ("mixed", Need(1, 4, "v100", 8, 64000), "4 v100, 8 CPUs and 64000 MB: it has 2 nodes with 2 a100"),
        ("mixed", Need(1, 1, "h100", 1, 0), "request less"),
        ("gpuu", Need(1, 1, None, 1, 0), "does not exist; Slurm has cpu, devel, gpu, mixed, old, theirs"),
        ("old", Need(1, 4, None, 8, 0), "partition old is inactive, and starts no job"),
        ("devel", Need(1, 2, "A100", 2, 0), "but of the type a100: Slurm distinguishes capital letters"),
        ("cpu", Need(1, 1, "A100", 2, 0), "request less"),
    ],
)
def test_what_a_partition_can_give(cluster: str, partition: str | None, need: Need, said: str | None) -> None:
    found = refusal(read_sinfo(recorded(cluster, "sinfo")), partition, need)
    assert found is None if said is None else found is not None and said in found and "\n" not in found


@pytest.mark.parametrize("cluster", TYPED)
def test_equal_nodes_of_several_partitions_are_one_shape(cluster: str) -> None:
    groups = [group for group in read_sinfo(recorded(cluster, "sinfo")) if group.partition in ("gpu", "devel")]
    assert [group.nodes for group in shapes(groups)] == [4]


def test_nothing_known_refuses_nothing() -> None:
    assert refusal([], "gpu", Need(1, 8, None, 8, 0)) is None


@pytest.mark.parametrize("cluster", STRICT)
def test_a_hidden_default_partition_with_shared_cpus_and_a_preemptible_one(cluster: str) -> None:
    gpu, spot = sorted(read_partitions(recorded(cluster, "show-partition")), key=lambda one: one.name)
    assert (gpu.name, gpu.is_default, gpu.is_hidden, gpu.jobs_per_cpu) == ("gpu", True, True, 2)
    assert (gpu.priority_tier, gpu.preempt_mode, gpu.max_mem_per_cpu_mb, gpu.qos) == (10, "OFF", 3000, None)
    assert (spot.name, spot.is_hidden, spot.jobs_per_cpu) == ("spot", False, 1)
    assert (spot.priority_tier, spot.preempt_mode, spot.max_mem_per_cpu_mb) == (1, "REQUEUE", None)
    groups = [one for one in read_sinfo(recorded(cluster, "sinfo")) if one.partition == "gpu"]
    assert sorted((one.nodes, one.all_gpus, one.is_default) for one in groups) == [(1, 4, True), (2, 2, True)]


def test_who_may_have_which_quality_of_service() -> None:
    line = recorded(TYPED[0], "show-partition").splitlines()[0].replace("AllowQos=ALL", "AllowQos=long,short")
    (partition,) = read_partitions(line.replace("OverSubscribe=NO", "OverSubscribe=FORCE:4"))
    assert (partition.qos, partition.jobs_per_cpu) == ({"long", "short"}, 4)


@pytest.mark.parametrize(
    ("mode", "grace_s", "config", "expected"),
    [
        ("REQUEUE", 60, {}, "REQUEUE, announced 60 s before"),
        ("CANCEL", 0, {}, "CANCEL, announced 30 s before"),
        ("CANCEL", 0, {"KillWait": "45 sec"}, "CANCEL, announced 45 s before"),
        ("REQUEUE", 60, {"PreemptMode": "GANG,SUSPEND", "KillWait": "20 sec"}, "REQUEUE, announced 20 s before"),
        ("SUSPEND", 60, {"PreemptMode": "GANG,SUSPEND"}, "SUSPEND, continued later"),
        ("GANG,SUSPEND", 60, {"PreemptMode": "GANG,SUSPEND"}, "SUSPEND, continued later"),
        ("REQUEUE,WITHIN", 60, {}, "REQUEUE, announced 60 s before"),
        ("GANG", 0, {}, "OFF, announced 30 s before"),
    ],
)
def test_how_jobs_are_preempted(mode: str, grace_s: int, config: dict[str, str], expected: str) -> None:
    (one, *_) = read_partitions(f"PartitionName=p PreemptMode={mode} GraceTime={grace_s}")
    assert preemption(one, config) == expected


def test_who_is_denied_a_partition_and_which_jobs_it_takes() -> None:
    line = recorded("typed-gres-26.05.5", "show-partition").splitlines()[0]
    (open_to_all,) = read_partitions(line)
    assert (open_to_all.denied_accounts, open_to_all.denied_qos, open_to_all.submit_hosts) == (set(), set(), None)
    assert (open_to_all.only_root, open_to_all.needs_reservation) == (False, False)
    assert (open_to_all.min_nodes, open_to_all.max_nodes) == (0, None)
    changed = {
        "AllowAccounts=ALL": "DenyAccounts=a,b", "AllowQos=ALL": "DenyQos=spot",
        "AllocNodes=ALL": "AllocNodes=login[1-2]",
        "RootOnly=NO": "RootOnly=YES", "ReqResv=NO": "ReqResv=YES", "MinNodes=0": "MinNodes=2",
        "MaxNodes=UNLIMITED": "MaxNodes=4",
    }  # fmt: skip
    for old, new in changed.items():
        assert old in line
        line = line.replace(old, new)
    (one,) = read_partitions(line)
    assert (one.accounts, one.denied_accounts, one.qos, one.denied_qos) == (None, {"a", "b"}, None, {"spot"})
    assert (one.submit_hosts, one.only_root, one.needs_reservation) == ({"login1", "login2"}, True, True)
    assert (one.min_nodes, one.max_nodes) == (2, 4)


@pytest.mark.parametrize(
    ("fields", "exclusive"),
    [
        ("OverSubscribe=EXCLUSIVE", True),
        ("Exclusive=NODE OverSubscribe=NO", True),
        ("Exclusive=USER OverSubscribe=NO", False),
        ("Exclusive=NO OverSubscribe=FORCE:2", False),
        ("ExclusiveUser=YES OverSubscribe=NO", False),
    ],
)
def test_whole_nodes_before_and_since_slurm_26(fields: str, exclusive: bool) -> None:
    (one,) = read_partitions(f"PartitionName=p {fields}")
    assert one.exclusive is exclusive


def test_sizes_of_jobs_that_sinfo_shows() -> None:
    line = "p*|up|1:00:00|n/a|4|2|8000|gpu:a100:2|(null)|NO|idle|"
    found = [read_sinfo(f"{line}{size}\n")[0] for size in ("1-infinite", "2-4", "3")]
    assert [(one.min_nodes, one.max_nodes) for one in found] == [(1, None), (2, 4), (3, 3)]
    two_to_four = [found[1]]
    assert refusal(two_to_four, "p", Need(1, 0, None, 1, 0), has_own_limits=True) is None
    for nodes, said in ((1, "at least 2 nodes, and --nodes is 1"), (2, None), (4, None)):
        answer = refusal(two_to_four, "p", Need(nodes, 0, None, 1, 0))
        assert answer is None if said is None else answer is not None and said in answer
    answer = refusal(read_sinfo(f"{line.replace('|4|', '|9|')}2-4\n"), None, Need(5, 0, None, 1, 0))
    assert answer is not None and "partition p starts jobs of at most 4 nodes, and --nodes is 5" in answer


def test_a_type_that_is_one_of_several_spellings() -> None:
    groups = read_sinfo("p|up|1:00:00|n/a|4|2|8000|gpu:A100:2|(null)|NO|idle|1-infinite\n")
    assert refusal(groups, "p", Need(1, 1, "A100", 1, 0)) is None
    answer = refusal(groups, "p", Need(1, 1, "a100", 1, 0))
    assert answer is not None and answer.endswith("write slurm.gpu_type=A100") and "request less" not in answer
    too_many = refusal(groups, "p", Need(1, 8, "A100", 1, 0))
    assert too_many is not None and "request less" in too_many
