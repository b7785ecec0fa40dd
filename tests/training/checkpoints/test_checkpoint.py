"""Checkpoints of several models, on one rank; on more ranks they are tested with the trainers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hpc_rl.config.training.common import ModelConfig, OptimConfig
from hpc_rl.errors import AgreedError, UserError
from hpc_rl.training.checkpoints import checkpoint, folders, model_state
from hpc_rl.training.checkpoints.folders import ACTOR, CRITIC, Progress
from hpc_rl.training.checkpoints.model_state import UnreadableError
from hpc_rl.training.models.causal_lm import PackedModel, load_model
from hpc_rl.training.models.scalar_model import critic
from hpc_rl.training.optim import build_optimizer
from hpc_rl.training.parallel.distributed import World
from tests.helpers import make_tiny_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
Part = tuple[PackedModel, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(make_tiny_model(tmp_path_factory.mktemp("model"))))


def with_optimizer(model: PackedModel) -> Part:
    return model, build_optimizer(model, OptimConfig(lr=0.1))


def parts(config: ModelConfig) -> dict[str, Part]:
    return {ACTOR: with_optimizer(load_model(config)), CRITIC: with_optimizer(critic(config.path, config).load())}


def learn(part: Part) -> None:
    """An optimizer step with gradients drawn by torch's own generator."""
    model, optimizer = part
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def weights(part: Part) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in part[0].parameters()]


def save(folder: Path, models: dict[str, Part], step: int, keep: int = 2) -> Path:
    partial = folders.begin(folder, step)
    for name, (model, optimizer) in models.items():
        model_state.write(partial / name, model_state.snapshot(model, optimizer, None, ALONE, copy=False), ALONE)
    progress = Progress(samples=10, dtype="float32", parts=tuple(models), step=step, kl_coef=0.25)
    final = folders.name(folder, progress)
    folders.remove_old(folder, keep)
    return final


def test_each_part_is_restored_and_learns_the_same(config: ModelConfig, tmp_path: Path) -> None:
    before = parts(config)
    for part in before.values():
        learn(part)
    path = save(tmp_path, before, 3)
    for part in before.values():
        learn(part)
    ((found, progress),) = checkpoint.usable(tmp_path)
    assert found == path and progress.parts == (ACTOR, CRITIC) and progress.kl_coef == 0.25 and progress.step == 3

    after = parts(config)
    for name, (model, optimizer) in after.items():
        model_state.read(path / name, model, optimizer, ALONE)
    for name, part in after.items():
        learn(part)  # with the optimizer's moments and the random numbers that were saved
        for value, wanted in zip(weights(part), weights(before[name]), strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=0)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure it is complete, or it is not there."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    folder = tmp_path / "checkpoints"
    final = save(folder, parts(config), 1)
    *before, last = synced
    found = {path.relative_to(folders.partial_folder(folder, 1)) for path in before}
    files = {path.relative_to(final) for path in final.rglob("*") if path.is_file()}
    assert {name for name in files if name not in found and name.with_name(f"{name.name}.tmp") not in found} == set()
    assert {Path(), Path(ACTOR), Path(CRITIC)} <= found and last == folder


def test_weights_are_read_without_a_model(config: ModelConfig, tmp_path: Path) -> None:
    models = parts(config)
    path = save(tmp_path, models, 1)
    found = model_state.read_weights(path / CRITIC)
    assert found.keys() == dict(models[CRITIC][0].hf.named_parameters()).keys()
    torch.testing.assert_close(found["score.weight"], torch.zeros(1, 32))


def test_only_the_newest_are_kept_and_leftovers_go(config: ModelConfig, tmp_path: Path) -> None:
    models = parts(config)
    (tmp_path / "step-00000009.tmp").mkdir()
    for step in (1, 2, 3):
        save(tmp_path, models, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert [progress.step for _, progress in checkpoint.usable(tmp_path)] == [3, 2]


@pytest.mark.parametrize(
    "damage, problem",
    [
        (lambda path: (path / "trainer.json").unlink(), "FileNotFoundError"),
        (lambda path: (path / "trainer.json").write_text("{"), "ValueError: trainer.json is not a JSON object"),
        (lambda path: (path / "trainer.json").write_text(json.dumps({"step": 2})), "KeyError: 'parts'"),
        (lambda path: (path / CRITIC / ".metadata").write_bytes(b""), "critic/"),
        (lambda path: (path / CRITIC / "__0_0.distcp").unlink(), "critic/__0_0.distcp is missing"),
        (lambda path: (path / ACTOR / "__0_0.distcp").write_bytes(bytes(99)), "actor/__0_0.distcp has 99 of "),
    ],
)
def test_an_incomplete_one_is_skipped(
    config: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: object, problem: str
) -> None:
    models = parts(config)
    for step in (1, 2):
        path = save(tmp_path, models, step)
    damage(path)  # type: ignore[operator]
    assert [progress.step for _, progress in checkpoint.usable(tmp_path)] == [1]
    assert f"warning: checkpoint {path} is skipped: {problem}" in capsys.readouterr().err


def test_contents_that_cannot_be_read(config: ModelConfig, tmp_path: Path) -> None:
    models = parts(config)
    data = save(tmp_path, models, 1) / ACTOR / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(UnreadableError, match=r"^actor/__0_0.distcp does not match its checksum"):
        model_state.read(data.parent, *models[ACTOR], ALONE)


def test_nothing_is_started_over(config: ModelConfig, tmp_path: Path) -> None:
    checkpoint.refuse_none_usable(tmp_path)
    save(tmp_path, parts(config), 1)
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read; to start from the beginning, remove that"):
        checkpoint.refuse_none_usable(tmp_path)


def test_where_a_checkpoint_is_found(config: ModelConfig, tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", parts(config), 1)
    assert checkpoint.find(path, tmp_path / "elsewhere") == path
    assert checkpoint.find(tmp_path, tmp_path / "checkpoints") == path
    with pytest.raises(UserError, match="is neither a checkpoint nor a run directory with one in checkpoints/"):
        checkpoint.find(tmp_path, tmp_path / "elsewhere")


@pytest.mark.parametrize(("before", "now"), [("nf4", None), (None, "nf4")])
def test_another_quantisation_is_not_resumed(tmp_path: Path, before: str | None, now: str | None) -> None:
    progress = Progress(samples=1, dtype="float32", quantize=before)
    checkpoint.refuse_other_quantize(tmp_path, progress, before)
    theirs, ours = before or "null", now or "null"
    with pytest.raises(AgreedError, match=f"was trained with model.lora.quantize={theirs}, and the run has {ours}: "):
        checkpoint.refuse_other_quantize(tmp_path, progress, now)
