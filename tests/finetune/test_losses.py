"""The same losses and gradients, however the work is split."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.training.sft import SftConfig
from tests.finetune.jobs import run_here, run_several, series
from tests.finetune.reference import Reference, reference_run

TWO_RANKS = {
    "full": [],
    "gradients, unpacked": ["trainer.sharding=gradients", "trainer.packing=false"],
    "none, many micro-batches": ["trainer.sharding=none", "data.max_length=128", "trainer.micro_tokens=128"],
    "full, many micro-batches": ["data.max_length=128", "trainer.micro_tokens=128"],
    "moments in host memory": ["trainer.offload=optimizer"],
    "every second layer recomputed": ["model.enable_gradient_checkpointing=half"],
    "inputs in host memory": ["model.enable_gradient_checkpointing=true", "model.enable_activation_offload=true"],
    "sequence parallel": ["trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2"],
    "sequence parallel, recomputed": [
        *("trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2"),
        *("trainer.sharding=gradients", "model.enable_gradient_checkpointing=true"),
    ],
    "sequence parallel, samples over micro_tokens": [
        *("trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2", "trainer.sharding=none"),
        *("data.max_length=128", "trainer.micro_tokens=64"),
    ],
    "more ranks than samples": ["data.train_batch_size=1", "trainer.total_training_steps=2", "trainer.test_freq=0"],
}

TWO_NODES = {
    "hybrid": ["trainer.sharding=hybrid"],
    "hybrid, sequence parallel": [
        *("trainer.sharding=hybrid", "trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2"),
        *("data.max_length=128", "trainer.micro_tokens=64"),
    ],
    "hybrid, many micro-batches": ["trainer.sharding=hybrid", "data.max_length=128", "trainer.micro_tokens=128"],
}


@pytest.fixture(scope="module")
def reference(sft_config: list[str]) -> Reference:
    config = compose("sft", sft_config)
    assert isinstance(config, SftConfig)
    found = reference_run(config)
    assert len(found.losses) == 8 and found.losses[-1] < found.losses[0] - 0.5
    return found


@pytest.fixture(scope="module")
def two_ranks(sft_config: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("two")
    runs = {name: folder / str(number) for number, name in enumerate(TWO_RANKS)}
    results = run_several([(sft_config, runs[name], overrides) for name, overrides in TWO_RANKS.items()], ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    return runs


@pytest.fixture(scope="module")
def two_nodes(sft_config: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of four ranks, of which two say that they are on another node."""
    folder = tmp_path_factory.mktemp("nodes")
    runs = {name: folder / str(number) for number, name in enumerate(TWO_NODES)}
    settings = [(sft_config, runs[name], overrides) for name, overrides in TWO_NODES.items()]
    results = run_several(settings, ranks=4, ranks_per_node=2)
    assert [code for code, _, _ in results] == [0] * 4, results
    return runs


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.packing=false", "model.enable_gradient_checkpointing=true"],
        ["data.max_length=128", "trainer.micro_tokens=128"],
    ],
    ids=["packed", "unpacked", "many micro-batches"],
)
def test_one_rank(sft_config: list[str], tmp_path: Path, reference: Reference, overrides: list[str]) -> None:
    assert run_here(sft_config, tmp_path, *overrides) == 0
    same_losses(tmp_path, reference)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_one_rank_compiled(sft_config: list[str], tmp_path: Path, reference: Reference) -> None:
    assert run_here(sft_config, tmp_path, "model.use_torch_compile=true") == 0
    same_losses(tmp_path, reference)


@pytest.mark.parametrize("name", [name for name in TWO_RANKS if name != "more ranks than samples"])
def test_two_ranks(name: str, two_ranks: dict[str, Path], reference: Reference) -> None:
    same_losses(two_ranks[name], reference)


@pytest.mark.parametrize("name", list(TWO_NODES))
def test_two_nodes(name: str, two_nodes: dict[str, Path], reference: Reference) -> None:
    same_losses(two_nodes[name], reference)


def test_a_rank_without_samples(sft_config: list[str], tmp_path: Path, two_ranks: dict[str, Path]) -> None:
    assert run_here(sft_config, tmp_path, *TWO_RANKS["more ranks than samples"]) == 0
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        ours = series(two_ranks["more ranks than samples"], name)
        assert ours == pytest.approx(series(tmp_path, name), abs=1e-4)


def same_losses(run_dir: Path, reference: Reference) -> None:
    assert series(run_dir, "train/loss") == pytest.approx(reference.losses, abs=1e-4)
    assert series(run_dir, "train/grad_norm") == pytest.approx(reference.norms, rel=1e-4, abs=1e-4)
    assert series(run_dir, "val/loss")[-1] == pytest.approx(reference.val_loss, abs=1e-4)
    assert len(series(run_dir, "val/loss")) == 3
