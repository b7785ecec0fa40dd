import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.slurm.allocation import Allocation, expand_hostlist, read_allocation

ENVIRON = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "gpu[01-02],big",
    "SLURM_NODEID": "1",
    "SLURM_CPUS_ON_NODE": "16",
    "SLURM_RESTART_COUNT": "2",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("node[1-3]", "node1 node2 node3"),
        ("node[1,3-4]", "node1 node3 node4"),
        ("gpu[08-11]", "gpu08 gpu09 gpu10 gpu11"),
        ("a[1-2],login,b[3]", "a1 a2 login b3"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("c[1-2]-ib", "c1-ib c2-ib"),
        ("n1.cluster.example,n[2-3].cluster.example", "n1.cluster.example n2.cluster.example n3.cluster.example"),
    ],
)
def test_hostlists(text: str, names: str) -> None:
    assert expand_hostlist(text) == tuple(names.split())


@pytest.mark.parametrize("text", ["", "node[1-2", "node1-2]", "node[a-b]", "n[[1]]"])
def test_malformed_hostlists_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="hostlist"):
        expand_hostlist(text)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20, unique=True), st.integers(1, 5))
def test_a_list_of_single_indices_expands_to_itself(indices: list[int], width: int) -> None:
    words = [f"{index:0{width}d}" for index in indices]
    assert expand_hostlist(f"n[{','.join(words)}]") == tuple("n" + word for word in words)


def test_an_allocation_is_read_from_the_environment() -> None:
    allocation = read_allocation(ENVIRON, affinity=64)
    assert allocation.nodes == ("gpu01", "gpu02", "big")
    assert (allocation.node, allocation.is_head, allocation.restart) == ("gpu02", False, 2)
    assert allocation.cpus == 16


def test_the_smaller_of_grant_and_affinity_counts() -> None:
    assert read_allocation(ENVIRON, affinity=3).cpus == 3
    assert read_allocation({**ENVIRON, "SLURM_CPUS_ON_NODE": ""}, affinity=3).cpus == 3


def test_a_step_on_some_of_the_nodes_counts_its_own() -> None:
    allocation = read_allocation({**ENVIRON, "SLURM_STEP_NODELIST": "gpu02", "SLURM_NODEID": "0"}, affinity=1)
    assert allocation.nodes == ("gpu02",)


@pytest.mark.parametrize(
    ("change", "said"), [({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"), ({"SLURM_NODEID": "3"}, "has 3 nodes")]
)
def test_what_is_missing_is_named(change: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_allocation({**ENVIRON, **change}, affinity=1)


@pytest.mark.parametrize(("cpus", "processes", "threads"), [(8, 4, 2), (9, 4, 2), (3, 4, 1), (1, 1, 1)])
def test_a_nodes_cpus_are_shared_among_its_processes(cpus: int, processes: int, threads: int) -> None:
    assert Allocation("7", 0, ("a",), 0, cpus).threads(processes) == threads
