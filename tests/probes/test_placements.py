"""The checks of weight transfers with real processes: Ray, trainer ranks and engines on CPUs."""

from pathlib import Path

import pytest

from hpc_rl.probes.acceptance import generation
from hpc_rl.probes.acceptance.bench import Bench, Layout
from hpc_rl.probes.acceptance.models import main as make_model

pytestmark = pytest.mark.slow
PACKAGES = frozenset({"ray", "tensordict", "vllm"})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    make_model(tmp_path / "scratch", "small", 16)
    (tmp_path / "runs").mkdir()
    return Bench(Layout("cpu", 1, 4, PACKAGES), tmp_path / "runs", tmp_path / "scratch")


@pytest.mark.long
def test_three_ranks_send_their_weights_to_an_engine_on_another_device(bench: Bench) -> None:
    name = "hf, other devices, host, 3 + 1"
    assert "nats after an update that changed" in generation.weight_transfer(bench, name)
    assert bench.memory[name]["after"] < 1e-4 and bench.memory[name]["moved"] > 0.1
    logs = {path.name for path in (bench.folder / "hf-other-devices-host-3-1").glob("*.log")}
    assert {f"node0-trainer-rank{rank}.log" for rank in range(3)} <= logs and "node0-engines-engine0.log" in logs
