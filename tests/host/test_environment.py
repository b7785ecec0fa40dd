from __future__ import annotations

from hpc_rl.host.environment import nccl_defaults, openmp_defaults


def test_nccl_uses_exactly_the_interface_between_the_nodes() -> None:
    common = {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN"}
    assert nccl_defaults("ib0") == {**common, "NCCL_SOCKET_IFNAME": "=ib0"}
    assert nccl_defaults("lo") == nccl_defaults() == common


def test_a_process_has_at_least_one_thread() -> None:
    assert [openmp_defaults(threads)["OMP_NUM_THREADS"] for threads in (0, 1, 8)] == ["1", "1", "8"]
