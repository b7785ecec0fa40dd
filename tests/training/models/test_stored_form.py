"""What engines receive of a mixture of experts is what its files contain."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.training.models.causal_lm import causal_lm, load_model
from hpc_rl.training.models.lora import is_adapter
from hpc_rl.training.models.stored_form import StoredForm
from tests.marks import IS_TRANSFORMERS_4, long, since_5
from tests.small_models.families import make_model
from tests.small_models.wrappers import is_of_language, make_wrapper, read_files

KINDS = [
    ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj.weight"),
    ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
    ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj"),
    ("qwen2", "model.layers.1.mlp.up_proj.weight"),
]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_source_has_the_tensors_of_the_files(tmp_path: Path, kind: str, name: str) -> None:
    """The names in files are those that vLLM's loaders expect."""
    folder = make_model(tmp_path, kind)
    expected = load_file(folder / "model.safetensors")
    hf = load_model(ModelConfig(path=str(folder))).hf
    source = WeightSource(hf, torch.float32, stored=StoredForm(hf))
    found = list(source)
    assert name in expected
    assert dict(found).keys() == expected.keys()
    assert all(torch.equal(weight, expected[key]) and weight.is_contiguous() for key, weight in found)
    listed = [(entry.name, entry.shape) for entry in source.metadata()]
    assert listed == [(key, tuple(weight.shape)) for key, weight in found]
    assert source.is_in_place() is (kind in ("gpt_oss", "qwen2") or IS_TRANSFORMERS_4)


def test_conversions_are_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each weight: a model with many layers has many modules, through which each search leads."""
    conversion_mapping = pytest.importorskip("transformers.conversion_mapping")
    search, calls = conversion_mapping.get_model_conversion_mapping, list[Any]()
    monkeypatch.setattr(
        conversion_mapping,
        "get_model_conversion_mapping",
        lambda hf, **options: calls.append(hf) or search(hf, **options),
    )
    kind, name = KINDS[0]
    hf = causal_lm(ModelConfig(path=str(make_model(tmp_path, kind)))).empty()
    stored = StoredForm(hf)
    calls.clear()
    names = [entry.name for _ in range(2) for entry in WeightSource(hf, torch.bfloat16, stored=stored).metadata()]
    assert names.count(name) == 2 and not calls


def test_names_of_a_module_without_memory(tmp_path: Path) -> None:
    """As a rank of several builds it."""
    kind, _ = KINDS[1]
    folder = make_model(tmp_path, kind)
    hf = causal_lm(ModelConfig(path=str(folder))).empty()
    source = WeightSource(hf, torch.bfloat16, stored=StoredForm(hf))
    assert {entry.name for entry in source.metadata()} == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize(
    "kind", ["gemma3", "qwen3_5", *(long(kind) for kind in ("mistral3", "qwen2_vl", "qwen3_5_moe"))]
)
def test_a_wrapper_has_the_names_of_its_files(tmp_path: Path, kind: str) -> None:
    """Loaded or without memory; also if the files have the names of transformers' modules."""
    pytest.importorskip("transformers.models.gemma4", reason="older versions have fewer of these models")
    folder = make_wrapper(tmp_path / "old", kind)
    for path in (folder, with_new_names(folder, tmp_path / "new")):
        expected = {name: weight for name, weight in read_files(path).items() if is_of_language(name)}
        config = ModelConfig(path=str(path), dtype="float32")
        loaded, empty = load_model(config).hf, causal_lm(config).empty()
        found = dict(WeightSource(loaded, torch.float32, stored=StoredForm(loaded)))
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
        source = WeightSource(empty, torch.float32, stored=StoredForm(empty))
        assert {entry.name for entry in source.metadata()} == expected.keys()


def with_new_names(folder: Path, out: Path) -> Path:
    """A copy in one file, whose weights have the names that they have in transformers' module."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("model*.safetensors*"))
    new = {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
    weights = {}
    for name, weight in read_files(folder).items():
        start = next((each for each in new if name.startswith(each)), "")
        weights[new.get(start, "") + name.removeprefix(start)] = weight
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


@since_5
def test_adapters_keep_their_names(tmp_path: Path) -> None:
    kind, name = KINDS[0]
    folder = str(make_model(tmp_path, kind))
    config = ModelConfig.model_validate({"path": folder, "lora": {"rank": 2}})
    hf = load_model(config).hf
    alone = WeightSource(hf, torch.float32, adapters_only=True, stored=StoredForm(hf))
    names = {key for key, _ in alone}
    assert names and all(is_adapter(key) and "self_attn" in key for key in names)
    merged = dict(WeightSource(hf, torch.float32, stored=StoredForm(hf)))
    assert name in merged and not any(is_adapter(key) for key in merged)
