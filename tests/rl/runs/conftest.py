from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpc_rl.rl.actors.process import quiet_libraries
from tests.helpers import make_tiny_model
from tests.rl.runs.jobs import Hosts, Runs, options_of_runs, ray_of_runs


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """A Ray of 4 CPU slots, which every run of this package uses."""
    with ray_of_runs():
        yield


@pytest.fixture(scope="package")
def hosts(cluster: None) -> Hosts:
    quiet_libraries()
    return Hosts()


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ppo")
    return [f"model.path={make_tiny_model(folder / 'model')}", *options_of_runs(folder)]


@pytest.fixture(scope="package")
def run(base: list[str], hosts: Hosts) -> Runs:
    return Runs(base, hosts)
