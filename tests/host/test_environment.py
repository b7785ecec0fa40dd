from pathlib import Path

import pytest

from hpc_rl.host.environment import process_defaults, ray_process_defaults, threads_per_process, write_token


@pytest.mark.parametrize(("cpus", "processes", "threads"), [(8, 4, 2), (9, 4, 2), (3, 4, 1), (1, 1, 1)])
def test_a_nodes_cpus_are_shared_among_its_processes(cpus: int, processes: int, threads: int) -> None:
    assert threads_per_process(cpus, processes) == threads


def test_every_process_has_the_same_defaults() -> None:
    common = {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN", "TOKENIZERS_PARALLELISM": "true"}
    assert process_defaults() == common
    assert process_defaults(threads=3) == common | {"OMP_NUM_THREADS": "3"}
    assert process_defaults(interface="ib0") == common | {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert process_defaults(interface="lo") == common | {"GLOO_SOCKET_IFNAME": "lo"}
    ray = ray_process_defaults(interface="lo", threads=1)
    assert ray == process_defaults(interface="lo", threads=1) | {"VLLM_LOGGING_LEVEL": "WARN"}


def test_a_token_is_new_each_time_and_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o644)
    first, second = write_token(path), write_token(path)
    assert first != second == path.read_bytes()
    assert len(second) == 64 and bytes.fromhex(second.decode())
    assert path.stat().st_mode & 0o777 == 0o600
