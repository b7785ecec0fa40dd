"""Profiles proposed for recorded clusters, and that they fit them."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.run_dir import RunDir
from hpc_rl.sites.profile import Profile, load_profile
from hpc_rl.sites.proposal import Facts, choose_accounts, choose_partitions, first_choice, propose
from hpc_rl.slurm.cluster import Partition, read_associations, read_config, read_interfaces, read_partitions, read_sinfo
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.render import render
from tests.helpers import recorded

RECORDED = Path(__file__).parents[1] / "slurm" / "recorded"
GOLDEN = Path(__file__).parents[1] / "golden" / "site"
CLUSTERS = sorted(file.parent.name for file in RECORDED.glob("*/show-config.txt"))


def facts(cluster: str) -> Facts:
    config = read_config(recorded(cluster, "show-config"))
    return Facts(
        config=config,
        groups=read_sinfo(recorded(cluster, "sinfo")),
        partitions=read_partitions(recorded(cluster, "show-partition")),
        associations=read_associations(recorded(cluster, "assoc"), config["ClusterName"]),
        unix_groups=frozenset({"users"}),
        interfaces={**read_interfaces(recorded(cluster, "ip-ctl"))},
        has_modules=True,
        modules=("cuda/12.1", "cuda/12.4"),
        runtimes=("apptainer",),
        proxy="http://proxy:3128",
        hf_home="/scratch/hf",
    )


def proposed(found: Facts, tmp_path: Path, name: str | None = None, account: str | None = None) -> Profile:
    partitions = {one.name: one for one in choose_partitions(found)}
    partition = partitions[name] if name else next(iter(partitions.values()))
    choice = first_choice(found, partition, account)
    (tmp_path / "site.yaml").write_text(propose(found, partition, choice, "2026-01-01"))
    return load_profile(str(tmp_path / "site.yaml"), environ={})


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_proposal(cluster: str, tmp_path: Path) -> None:
    found = facts(cluster)
    profile = proposed(found, tmp_path)
    text = (tmp_path / "site.yaml").read_text()
    assert all(len(line) <= 120 for line in text.splitlines())
    # A cluster's addresses are the sandbox's of that moment, and its name and version the recording's.
    stable = found.config["ClusterName"], found.config["SLURM_VERSION"], *found.interfaces.values()
    for word in stable:
        text = text.replace(word, "X")
    golden = GOLDEN / f"{cluster.rpartition('-')[0]}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    script = render(
        Job("torchrun", compose("torchrun", site=profile.values), RunDir(Path("/run")), Path("/"), ("a.py",))
    )
    assert f"#SBATCH --partition={profile.values['slurm.partition']}\n" in script


@pytest.mark.parametrize("cluster", [name for name in CLUSTERS if name.startswith("typed-gres")])
def test_who_may_use_what(cluster: str, tmp_path: Path) -> None:
    found = facts(cluster)
    names = [one.name for one in choose_partitions(found)]
    assert names == ["gpu", "mixed", "devel", "cpu"]  # neither the inactive one nor that of other accounts
    assert choose_accounts(found, choose_partitions(found)[0]) == ["mlgroup", "root", "teaching"]
    assert proposed(found, tmp_path, account="mlgroup").values["slurm.account"] == "mlgroup"
    theirs = replace(found, associations=[replace(found.associations[0], account="other")])
    assert "theirs" in [one.name for one in choose_partitions(theirs)]
    nobody = replace(found, associations=[])
    assert "slurm.account" not in proposed(nobody, tmp_path).values
    assert "rejects jobs without one" in (tmp_path / "site.yaml").read_text()
    short = replace(found, associations=[replace(found.associations[0], max_time="04:00:00")])
    assert proposed(short, tmp_path).values["slurm.time"] == "04:00:00"


@pytest.mark.parametrize("cluster", [name for name in CLUSTERS if name.startswith("typed-gres")])
def test_partitions_that_are_not_simple(cluster: str, tmp_path: Path) -> None:
    found = facts(cluster)
    mixed = proposed(found, tmp_path, "mixed")
    assert (mixed.values["slurm.gpu_type"], mixed.values["slurm.node.gpus"]) == ("a100", 2)
    assert "there are also a100_1g.5gb (7), v100 (4)" in (tmp_path / "site.yaml").read_text()
    cpu = proposed(found, tmp_path, "cpu")
    assert cpu.values["trainer.device"] == "cpu" and "slurm.gpu_option" not in cpu.values
    sliced = replace(found, groups=[replace(found.groups[0], gpus={"a100_1g.5gb": 14})])
    assert proposed(sliced, tmp_path).values["slurm.gpu_type"] == "a100_1g.5gb"
    old = replace(found, config={**found.config, "SelectType": "select/cons_res"})
    assert proposed(old, tmp_path).values["slurm.gpu_option"] == "gres"
    gpu = found.partitions[0]
    ruled = replace(found, partitions=[replace(gpu, job_defaults={"DefMemPerGPU": "4000", "DefCpuPerGPU": "1"})])
    values = proposed(ruled, tmp_path).values
    assert (values["slurm.mem_option"], values["slurm.cpus_per_gpu"]) == ("none", 1)
    reserved = replace(found, partitions=[replace(gpu, cpus=gpu.cpus - gpu.nodes)])  # a core of each for the system
    assert proposed(reserved, tmp_path).values["slurm.node.cpus"] == 1


@pytest.mark.parametrize("cluster", [name for name in CLUSTERS if name.startswith("typed-gres")])
def test_hidden_and_preemptible_partitions(cluster: str) -> None:
    found = facts(cluster)
    named = {one.name: one for one in found.partitions}

    def order(mode: str, preempt_type: str, **changes: Partition) -> list[str]:
        partitions = [changes.get(name, one) for name, one in named.items()]
        config = {**found.config, "PreemptType": preempt_type, "PreemptMode": mode}
        return [one.name for one in choose_partitions(replace(found, config=config, partitions=partitions))]

    hidden_default = replace(named["gpu"], is_hidden=True)
    assert order("OFF", "preempt/none", gpu=hidden_default) == ["gpu", "mixed", "devel", "cpu"]
    assert order("OFF", "preempt/none", mixed=replace(named["mixed"], is_hidden=True)) == ["gpu", "devel", "cpu"]
    spot = replace(named["gpu"], preempt_mode="REQUEUE")  # devel has a higher PriorityTier
    assert order("REQUEUE", "preempt/partition_prio", gpu=spot) == ["mixed", "devel", "gpu", "cpu"]
    assert order("REQUEUE", "preempt/qos", gpu=spot)[0] == "gpu"
    assert order("REQUEUE", "preempt/partition_prio", gpu=replace(spot, priority_tier=10))[0] == "gpu"


@pytest.mark.parametrize("cluster", [name for name in CLUSTERS if name.startswith("shared-nodes")])
def test_memory_by_cpu_and_shared_cpus(cluster: str, tmp_path: Path) -> None:
    found = facts(cluster)
    shared = choose_partitions(found)[0]
    assert (shared.name, shared.max_mem_per_cpu_mb, shared.jobs_per_cpu) == ("shared", 4000, 1)
    assert proposed(found, tmp_path).values.get("slurm.mem_option") is None  # 4000 MB for each CPU are all memory
    tight = replace(found, partitions=[replace(shared, max_mem_per_cpu_mb=3000, jobs_per_cpu=2)])
    values = proposed(tight, tmp_path).values
    assert (values["slurm.mem_option"], values["slurm.node.mem_mb"]) == ("mem-per-cpu", 6000)
    assert "Up to 2 jobs run on the same CPUs" in (tmp_path / "site.yaml").read_text()
    clusters = replace(
        found, partitions=[replace(shared, max_mem_per_cpu_mb=None)], config={**found.config, "MaxMemPerCPU": "1000"}
    )
    values = proposed(clusters, tmp_path).values
    assert (values["slurm.mem_option"], values["slurm.node.mem_mb"]) == ("mem-per-cpu", 2000)


def test_what_sbatch_refuses_is_in_the_profile(tmp_path: Path) -> None:
    found = facts("typed-gres-22.05.8")
    partition = choose_partitions(found)[0]
    choice = replace(first_choice(found, partition, None), qos="normal", constraint="ib", leave_out=("requeue",))
    text = propose(found, partition, choice, "2026-01-01", "no such\nthing")
    assert "  # sbatch refuses a test job with these settings: no such thing\n" in text
    (tmp_path / "site.yaml").write_text(text)
    values = load_profile(str(tmp_path / "site.yaml"), environ={}).values
    assert (values["slurm.qos"], values["slurm.constraint"]) == ("normal", "ib")
    assert values["slurm.leave_out"] == ["requeue"]


@pytest.mark.parametrize(
    ("changed", "known"),
    [
        ({"denied_accounts": frozenset({"mlgroup", "root", "teaching"})}, {}),
        ({"denied_qos": frozenset({"normal"})}, {}),
        ({"submit_hosts": frozenset({"login1"})}, {"host": "login2"}),
        ({"only_root": True}, {}),
        ({"needs_reservation": True}, {}),
    ],
)
def test_partitions_that_do_not_let_the_user_in(changed: dict[str, Any], known: dict[str, Any]) -> None:
    found = replace(facts("typed-gres-26.05.5"), **known)
    others = [replace(one, **changed) if one.name == "gpu" else one for one in found.partitions]
    assert "gpu" in [one.name for one in choose_partitions(found)]
    assert "gpu" not in [one.name for one in choose_partitions(replace(found, partitions=others))]


def test_partitions_that_let_the_user_in_after_all() -> None:
    found = facts("typed-gres-26.05.5")
    gpu = next(one for one in found.partitions if one.name == "gpu")
    lenient = {
        "denied_accounts": frozenset({"root", "teaching"}), "denied_qos": frozenset({"spot"}), "only_root": True,
        "submit_hosts": frozenset({"login1"}),
    }  # fmt: skip
    one = replace(gpu, **lenient)
    as_root = replace(found, partitions=[one], host="login1", is_root=True)
    assert choose_partitions(as_root) == [one] and choose_accounts(as_root, one) == ["mlgroup"]


def test_the_cluster_of_a_variable_and_limits_of_nodes_are_in_the_profile(tmp_path: Path) -> None:
    found = replace(facts("typed-gres-26.05.5"), clusters="far")
    sized = replace(choose_partitions(found)[0], min_nodes=2, max_nodes=4)
    profile = proposed(replace(found, partitions=[sized]), tmp_path)
    assert profile.values["slurm.sbatch.clusters"] == "far"
    assert "# Its jobs have 2 to 4 nodes." in (tmp_path / "site.yaml").read_text()
