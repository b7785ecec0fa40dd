"""Slurm clusters for tests: real ones, made on this machine by tests/sandbox, or a skip with the reason."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sandbox.cluster import Cluster, missing


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sandbox: needs a real Slurm on this machine, hence root and Slurm's packages")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def sandbox_cluster(name: str, **spec: Any) -> Iterator[Cluster]:
    """A cluster that ends with the fixture, or with this process however that ends. Its name is this run's own."""
    if lacking := missing(bool(spec.get("accounting"))):
        pytest.skip(lacking)
    with Cluster(name=f"{name}-{os.getpid()}", **spec) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    """Three nodes with 2 CPUs, 6000 MB and 2 fake GPUs each, without accounting. Leave it as you found it."""
    yield from sandbox_cluster("pytest", nodes=3, cpus=2, memory_mb=6000, gpus=2)


@pytest.fixture(scope="session")
def accounting_cluster() -> Iterator[Cluster]:
    """Two such nodes with slurmdbd, so that sacct works."""
    yield from sandbox_cluster("pytest-acct", nodes=2, cpus=2, memory_mb=6000, gpus=2, accounting=True)
