"""Sharded loading gives the weights that transformers loads, whichever files a model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.training.models.loading import load_sharded, stored_weights, weights_of
from hpc_rl.training.parallel.distributed import World
from tests.finetune.jobs import spawn
from tests.helpers import make_tiny_model
from tests.marks import IS_TRANSFORMERS_4
from tests.training.models import loaded

UNEVEN = 323
"""A vocabulary that two ranks cannot share evenly."""


def qwen(folder: Path, **settings: Any) -> Path:
    return make_tiny_model(folder, vocab=UNEVEN, **settings)


def change_weights(folder: Path, changed: dict[str, torch.Tensor | None]) -> Path:
    """Replace weights of a model in one file; None removes one."""
    file = folder / "model.safetensors"
    weights = {**load_file(file), **changed}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, file, {"format": "pt"})
    return folder


def in_several_files(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(qwen(folder / "whole"))
    model.to(torch.bfloat16).save_pretrained(folder / "parts", max_shard_size="30KB")
    assert len(list((folder / "parts").glob("*.safetensors"))) > 2
    return folder / "parts"


def pickled(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(qwen(folder))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def without_prefix(folder: Path) -> Path:
    """Saved from the backbone, so that names have no `model.` and the LM head is tied."""
    AutoModel.from_pretrained(qwen(folder / "whole", tie=True)).save_pretrained(folder / "backbone")
    return folder / "backbone"


def classifier(folder: Path) -> Path:
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(qwen(folder / "policy"), num_labels=1)
    model.save_pretrained(folder / "classifier")
    return folder / "classifier"


def both_tied_names(folder: Path) -> Path:
    """Files with two names for the tied weight, as some tools write them."""
    from safetensors.torch import load_file, save_file

    file = qwen(folder, tie=True) / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def make_models(folder: Path) -> dict[str, Path]:
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    return {
        "qwen": qwen(folder / "qwen"),
        "tied": qwen(folder / "tied", tie=True),
        "scaled rotary": qwen(folder / "scaled", kind="llama", rope_parameters=scaled, rope_scaling=scaled),
        "buffers": qwen(folder / "gemma", kind="gemma3_text", layer_types=["sliding_attention", "full_attention"]),
        "experts": qwen(
            folder / "experts", kind="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "parts": in_several_files(folder / "parts"),
        "pickled": pickled(folder / "pickled"),
        "no prefix": without_prefix(folder / "prefix"),
        "two names": both_tied_names(folder / "names"),
        "classifier": classifier(folder / "classifier"),
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


DIRECT = [("policy", name) for name in ("qwen", "tied", "scaled rotary", "buffers", "parts", "no prefix")]
DIRECT += [("reference", "qwen"), ("critic", "qwen"), ("critic", "tied"), ("critic", "classifier")]
DIRECT += [("reward", "classifier")]
THROUGH_RANK_0 = [("policy", name) for name in ("pickled", "two names")]
THROUGH_RANK_0 += [] if IS_TRANSFORMERS_4 else [("policy", "experts")]


@pytest.mark.parametrize("role, name", DIRECT)
def test_ranks_read_their_own_part(models: dict[str, Path], role: str, name: str) -> None:
    pretrained = loaded.pretrained(role, str(models[name]), "float32")
    hf = pretrained.empty()
    stored = stored_weights(pretrained, hf)
    assert stored is not None
    assert {parameter.device.type for parameter in hf.parameters()} == {"meta"}
    new = {"score.weight"} if role == "critic" and name != "classifier" else set()
    assert weights_of(hf).keys() - stored.keys() == new


@pytest.mark.parametrize("role, name", THROUGH_RANK_0)
def test_what_transformers_has_to_load(models: dict[str, Path], role: str, name: str) -> None:
    pretrained = loaded.pretrained(role, str(models[name]), "float32")
    assert stored_weights(pretrained, pretrained.empty()) is None


def test_two_ranks_have_the_weights_that_one_has(models: dict[str, Path]) -> None:
    cases = [{"role": role, "path": str(models[name]), "random_state": "same"} for role, name in DIRECT]
    cases += [{"role": role, "path": str(models[name])} for role, name in THROUGH_RANK_0]
    cases += [{"role": "policy", "path": str(models[name]), "dtype": "bfloat16"} for name in ("parts", "tied")]
    cases += [{"role": "policy", "path": str(models["tied"]), "sharding": mode} for mode in ("none", "gradients")]
    results = spawn(["-m", loaded.__name__, json.dumps(cases)], ranks=2, timeout=600)
    for code, out, errors in results:
        assert code == 0, errors
        found = json.loads(out.rpartition("found ")[2])
        assert dict(zip(map(str, cases), found, strict=True)) == {str(case): "same" for case in cases}
    assert "has no score.weight: values start at 0" in results[0][1]


def test_every_rank_reports_what_is_wrong(models: dict[str, Path], tmp_path: Path) -> None:
    cut = qwen(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    lost = in_several_files(tmp_path / "lost")
    sorted(lost.glob("*.safetensors"))[1].unlink()
    paths = {"cut": tmp_path / "cut", "lost": lost, "nothing": tmp_path, "headless": models["qwen"]}
    cases = [{"role": "reward" if name == "headless" else "policy", "path": str(path)} for name, path in paths.items()]
    messages = []
    for code, out, errors in spawn(["-m", loaded.__name__, json.dumps(cases)], ranks=2):
        assert code == 0, errors
        messages.append(json.loads(out.rpartition("found ")[2]))
    assert messages[0] == messages[1]
    assert "bytes, and its header states at least" in messages[0][0]
    assert "model.safetensors.index.json names model-00002-of" in messages[0][1]
    assert "model.path: no model could be loaded from" in messages[0][2]
    assert "has no trained head 'score'" in messages[0][3]


OF_A_LAYER = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{OF_A_LAYER}_scale": torch.ones(1)}, f"has weights that the model does not use: {OF_A_LAYER}_scale"),
        ({OF_A_LAYER: None}, f"has no {OF_A_LAYER}"),
        ({"lm_head.weight": None}, r"has no lm_head\.weight"),
        ({OF_A_LAYER: torch.ones(3, 3)}, f"has weights of another shape than its config.json: {OF_A_LAYER}"),
        ({OF_A_LAYER: torch.ones(32, 32).to(torch.float8_e4m3fn)}, "has quantised weights.* F8_E4M3"),
    ],
)
@pytest.mark.parametrize("load", ["load", "load_sharded"])
def test_weights_that_do_not_belong_to_the_model_are_refused(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], message: str, load: str
) -> None:
    """transformers would train new random weights, or leave out the scales of quantised ones."""
    path = change_weights(qwen(tmp_path), changed)
    pretrained = loaded.pretrained("policy", str(path), "float32")
    with pytest.raises(UserError, match=rf"model\.path .* {message}"):
        if load == "load":
            pretrained.load()
        else:
            load_sharded(pretrained, World(0, 1, torch.device("cpu")), TrainingConfig())


@pytest.mark.parametrize(
    "name, part",
    [
        ("mtp.layers.0.mlp.gate_proj.weight", "mtp"),
        ("model.layers.2.eh_proj.weight", "model.layers.2"),
        ("model.visual.blocks.0.attn.qkv.weight", "model.visual"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", ""),
    ],
)
def test_weights_that_a_language_model_does_not_need_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, part: str
) -> None:
    path = change_weights(qwen(tmp_path), {name: torch.ones(2, 2)})
    pretrained = loaded.pretrained("policy", str(path), "float32")
    assert stored_weights(pretrained, pretrained.empty()) is not None
    load_sharded(pretrained, World(0, 1, torch.device("cpu")), TrainingConfig())
    note = f"{path} also has {part} (1 weight), which are not loaded and not trained\n" if part else ""
    assert capsys.readouterr().out == note


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    pretrained = loaded.pretrained("policy", str(qwen(tmp_path)), "float32")
    (tmp_path / "model.safetensors").write_bytes(b"<html>404</html>" * 10)
    with pytest.raises(UserError, match=r"model\.path: the weights in .* cannot be read: .* is not a safetensors file"):
        stored_weights(pretrained, pretrained.empty())
