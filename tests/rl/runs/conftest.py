from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import ray

from hpc_rl.data.arithmetic import generate
from hpc_rl.rl.actors.cluster import start_ray
from hpc_rl.rl.actors.process import quiet_libraries
from tests.helpers import make_tiny_model
from tests.rl.runs.jobs import Hosts, Runs


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """A Ray of 4 CPU slots, which every run of this package uses."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as folder:
        # As in the other tests of this process: Ray fails if a process uses both modes, one after the other.
        # tests/rl/runs/test_command.py has a token.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        start_ray(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            object_store_memory=200 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="package")
def hosts(cluster: None) -> Hosts:
    quiet_libraries()
    return Hosts()


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of 2 steps: 4 prompts x 4 = 16 responses = 2 mini-batches of 8, x 2 epochs."""
    folder = tmp_path_factory.mktemp("ppo")
    generate(folder, n_train=23, n_val=5)
    return [
        f"model.path={make_tiny_model(folder / 'model')}",
        *(f"data.train_files={folder}/train.jsonl", f"data.val_files={folder}/val.jsonl"),
        *("data.train_batch_size=4", "data.max_prompt_length=40", "data.max_response_length=6", "rollout.n=4"),
        *("actor.mini_batch_size=8", "actor.ppo_epochs=2", "actor.optim.lr=1e-3", "critic.optim.lr=1e-3"),
        *("reward.function=format", "reward.kwargs={pattern: '.*[a-i].*'}"),
        *("trainer.device=cpu", "trainer.micro_tokens=256", "trainer.total_training_steps=2"),
        *("trainer.export=false", "trainer.val_before_train=false", "trainer.logger=[]"),
    ]


@pytest.fixture(scope="package")
def run(base: list[str], hosts: Hosts) -> Runs:
    return Runs(base, hosts)
