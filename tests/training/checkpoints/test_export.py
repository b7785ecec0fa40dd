from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpc_rl.config.training.common import ModelConfig, OptimConfig, TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.system.scratch import marked_in_use
from hpc_rl.training.checkpoints import checkpoint, checksums, model_state
from hpc_rl.training.checkpoints import export as exporting
from hpc_rl.training.checkpoints.export import export
from hpc_rl.training.checkpoints.folders import Progress
from hpc_rl.training.checkpoints.model_state import UnreadableError
from hpc_rl.training.checkpoints.saver import OneModel, Saver
from hpc_rl.training.models.causal_lm import load_model, load_tokenizer
from hpc_rl.training.optim import build_optimizer
from hpc_rl.training.parallel.distributed import World
from tests.helpers import make_tiny_model
from tests.marks import unless_4

WORLD = World(rank=0, size=1, device=torch.device("cpu"))

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def saved_run(
    tmp_path: Path, dtype: str = "float32", tie: bool = False, **settings: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run directory with one checkpoint, and its weights. The model that it came from is gone."""
    source = make_tiny_model(tmp_path / "source", tie=tie, **settings)
    config = ModelConfig(path=str(source), dtype=dtype)  # type: ignore[arg-type]
    model, tokenizer = load_model(config), load_tokenizer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    folder = tmp_path / "run" / "checkpoints"
    progress = Progress(samples=1, dtype=dtype, step=7)
    parts = OneModel(model, build_optimizer(model, OptimConfig()), tokenizer, WORLD)
    with Saver(folder, parts, WORLD, keep=2) as saver:
        saver.save(progress)
    for file in source.iterdir():
        file.unlink()
    return tmp_path / "run", {name: p.detach().clone() for name, p in model.hf.state_dict().items()}


@pytest.mark.parametrize(("dtype", "tie"), [("float32", False), ("bfloat16", True)])
def test_an_exported_folder_loads_as_it_was_trained(tmp_path: Path, dtype: str, tie: bool) -> None:
    run_dir, weights = saved_run(tmp_path, dtype, tie)
    out = tmp_path / "deep" / "model"
    assert export(run_dir, out).name == "step-00000007"
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == getattr(torch, dtype)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=0, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
    assert "hpc_rl" not in (out / "config.json").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_another_dtype_and_a_single_checkpoint(tmp_path: Path) -> None:
    run_dir, _ = saved_run(tmp_path)
    export(run_dir / "checkpoints" / "step-00000007", tmp_path / "out", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("kind, settings", [("qwen2", {}), unless_4("qwen3_moe", EXPERTS)])
def test_several_processes_write_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, int]
) -> None:
    """Each writes files of its own; experts, which transformers stores under other names, are written by one."""
    monkeypatch.setattr(exporting, "_FILE_BYTES", 40_000)
    run_dir, weights = saved_run(tmp_path, kind=kind, **settings)
    out = tmp_path / "out"
    written = []
    with exporting.new_folder(run_dir, out) as (path, partial):
        for rank in range(3):
            before = set(partial.glob("*.safetensors"))
            exporting.write_weights(path, partial, "float32", rank, 3)
            written.append(len(set(partial.glob("*.safetensors")) - before))
    assert min(written) > 0 if kind == "qwen2" else written[1:] == [0, 0]
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=0, rtol=0)
    sizes = [file.stat().st_size for file in out.glob("*.safetensors")]
    assert sum(sizes) > json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"]


@pytest.mark.parametrize(
    "device, options, wanted",
    [("cuda", {}, "bfloat16"), ("cpu", {}, "float32"), ("cuda", {"export_dtype": "float32"}, "float32")],
)
def test_the_type_of_the_exported_model(device: str, options: dict[str, str], wanted: str) -> None:
    trainer = TrainingConfig(device=device, **options)  # type: ignore[arg-type]
    assert exporting.export_dtype(ModelConfig(path="x"), trainer) == wanted


def test_another_type_of_the_exported_model() -> None:
    with pytest.raises(ValidationError, match="export_dtype"):
        TrainingConfig(export_dtype="int8")  # type: ignore[arg-type]


def test_what_a_killed_export_left_is_removed_and_no_other_export(tmp_path: Path) -> None:
    run_dir, _ = saved_run(tmp_path)
    left, running = tmp_path / ".out.tmp1", tmp_path / ".out.tmp2"
    for folder in (left, running):
        folder.mkdir()
    with marked_in_use(running):
        with marked_in_use(left):
            mark = (left / ".hpc-rl").read_text()
        (left / ".hpc-rl").write_text(mark)  # as if its process had been killed
        export(run_dir, tmp_path / "out")
        assert running.is_dir() and not left.exists()
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run_dir, _ = saved_run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UserError, match="is not empty"):
        export(run_dir, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a checkpoint nor a run directory"):
        export(tmp_path, tmp_path / "out")


def test_everything_comes_back(tmp_path: Path) -> None:
    """Weights, moments, step counts and random state; the newest of three, the oldest removed."""
    config = ModelConfig(path=str(make_tiny_model(tmp_path / "source", tie=True)))
    model, tokenizer = load_model(config), load_tokenizer(config)
    optimizer = build_optimizer(model, OptimConfig())
    folder = tmp_path / "checkpoints"
    saver = Saver(folder, OneModel(model, optimizer, tokenizer, WORLD), WORLD, keep=2)
    for step in (1, 2, 3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        progress = Progress(samples=5, dtype="float32", step=step, epoch=1, index=2, wandb_id="abc")
        saver.save(progress)
    saver.wait()
    drawn = torch.rand(3)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]

    other = load_model(config)
    other_optimizer = build_optimizer(other, OptimConfig())
    found = checkpoint.load_latest(folder, OneModel(other, other_optimizer, tokenizer, WORLD), WORLD)
    assert found == dataclasses.replace(progress)
    assert torch.equal(torch.rand(3), drawn)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(other_optimizer.state[ours][key], value), key


@pytest.mark.parametrize(("umask", "mode"), [(0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_exported_files_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    run_dir, _ = saved_run(tmp_path)
    before = os.umask(umask)
    try:
        export(run_dir, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == mode
    assert set(modes.values()) == {mode}
    assert ".probe" not in modes


def test_checkpoints_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run_dir, _ = saved_run(tmp_path)
    finally:
        os.umask(before)
    files = [path for path in (run_dir / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) > 4 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    run_dir, _ = saved_run(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the model to .*file/out: Not a directory"):
        export(run_dir, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run", "source"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    run_dir, _ = saved_run(tmp_path, "float32", False)
    path = run_dir / "checkpoints" / "step-00000007"
    data = path / "model" / "__0_0.distcp"
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)
    for source in (run_dir, path):
        with pytest.raises(UserError, match=r"step-00000007 cannot be exported: model/__0_0.distcp does not match its"):
            export(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_without_the_models_configuration_is_not_exported(tmp_path: Path) -> None:
    run_dir, _ = saved_run(tmp_path, "float32", False)
    path = run_dir / "checkpoints" / "step-00000007"
    shutil.rmtree(path / "model" / "hf")
    with pytest.raises(UserError, match=r"step-00000007 cannot be used: model/hf/\S+ is missing"):
        export(path, tmp_path / "model")
    with pytest.raises(UserError, match=r"is neither a checkpoint nor a run directory with one"):
        export(run_dir, tmp_path / "model")


class Program:
    """Its pickle creates a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def describe_anew(checkpoint_path: Path, change: Callable[[Metadata], object], **files: bytes) -> None:
    """Replace the description of a checkpoint, write further files beside it, and correct all checksums."""
    part = checkpoint_path / "model"
    found = pickle.loads((part / ".metadata").read_bytes())
    (part / ".metadata").write_bytes(pickle.dumps(change(found) or found))
    for name, data in files.items():
        (part / name).write_bytes(data)
    for folder, names in ((part, (".metadata", *files)), (checkpoint_path, ("model/checksums.json",))):
        sums = checksums.read(folder) or {}
        checksums.write(folder, {**sums, **{name: checksums.of_file(folder / name) for name in names}})


def elsewhere(path: str) -> Callable[[Metadata], None]:
    def change(found: Metadata) -> None:
        for place in (found.storage_data or {}).values():
            place.relative_path = path

    return change


def as_bytes(found: Metadata) -> None:
    """All weights are values that torch unpickles."""
    for index, place in (found.storage_data or {}).items():
        place.relative_path = "__9_0.distcp"
        place.offset, place.length = 0, 10**9
        found.state_dict_metadata[index.fqn] = BytesStorageMetadata()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (Program, r"cannot be read: it contains an object of posix\.mkdir, which hpc-rl does not admit"),
        (as_bytes, "does not describe tensors in files beside it"),
        (elsewhere("../../secret"), "does not describe tensors in files beside it"),
        (elsewhere("/etc/passwd"), "does not describe tensors in files beside it"),
        (lambda _: {"a": 1}, "does not describe tensors in files beside it"),
    ],
    ids=["a program", "a program in a value", "another folder", "another file", "something else"],
)
def test_a_description_is_data_about_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, problem: str
) -> None:
    """A checkpoint that was copied or unpacked may be another user's work, with correct checksums."""
    monkeypatch.chdir(tmp_path)
    run_dir, _ = saved_run(tmp_path)
    path = run_dir / "checkpoints" / "step-00000007"
    value = io.BytesIO()
    torch.save(Program(tmp_path / "created"), value)
    planted = (lambda _: Program(tmp_path / "created")) if change is Program else change
    describe_anew(path, planted, **({"__9_0.distcp": value.getvalue()} if change is as_bytes else {}))
    for source in (run_dir, path):
        with pytest.raises(UserError, match=rf"\.metadata {problem}"):
            export(source, tmp_path / "out")
    model = load_model(ModelConfig(path=str(make_tiny_model(tmp_path / "model"))))
    with pytest.raises(UnreadableError, match=rf"\.metadata {problem}"):
        model_state.read(path / "model", model, build_optimizer(model, OptimConfig()), WORLD)
    assert not (tmp_path / "created").exists() and not (tmp_path / "out").exists()
