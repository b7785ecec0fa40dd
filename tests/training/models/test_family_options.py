"""Options that change how layers compute are exact for a small model of each family, or refused from config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.model_options import has_experts
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm, evaluating, load_model
from hpc_rl.training.models.lora import adapted_layers, merged, without_adapters
from hpc_rl.training.models.mixers import PerSample
from tests.marks import long
from tests.training.models.test_families import KINDS, make, verdict

CONV1D = ("gpt2", "gpt-sw3")
ADAPTED = ("deepseek_v3", "gemma3", "gemma3n_text", "longcat_flash", "nemotron_h", "phimoe", "qwen3_next")
NOISY = ("dbrx", "gpt_bigcode", "minimax", "mixtral", "persimmon", "phimoe", "seed_oss", "starcoder2")
IDS = [np.random.default_rng(1).integers(3, 300, length) for length in (7, 20, 13)]
ROW = pack_samples(IDS, [np.arange(len(one)) > 0 for one in IDS])


def each(short: tuple[str, ...]) -> list[Any]:
    return [*short, *(long(kind) for kind in KINDS if kind not in short)]


def made(folder: Path, kind: str) -> dict[str, Any]:
    settings = make(folder, kind)
    if verdict(settings) is not None:
        pytest.skip("this family is refused")
    return settings


def hidden(model: CausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model.hidden(ROW)


@pytest.mark.parametrize("kind", each(ADAPTED))
def test_adapters_on_all_linear_layers_are_called_and_merged(tmp_path: Path, kind: str) -> None:
    """A layer whose weight is read without a call would not compute its adapter, but an export would contain it."""
    settings = made(tmp_path, kind)
    config = ModelConfig.model_validate({"path": str(tmp_path), "lora": {"rank": 2}})
    if kind in CONV1D:
        with pytest.raises(UserError, match="have no linear layers in their transformer blocks"):
            load_model(config)
        return
    model = causal_lm(config, dropout=False).load()
    names = {name: parameter.ndim for name, parameter in model.hf.named_parameters()}
    routed = [name for name, ndim in names.items() if ".experts." in name or ("input_linear" in name and ndim == 3)]
    assert has_experts(settings) == bool(routed)
    layers = adapted_layers(model.hf)
    for name, parameter in model.hf.named_parameters():
        if name.endswith("correct_output_scale"):  # of Gemma 3n, which starts at 0
            parameter.data.fill_(1)
    for layer in layers.values():
        torch.nn.init.uniform_(layer.lora_A.weight, -0.2, 0.2)
        torch.nn.init.normal_(layer.lora_B.weight, std=0.05)
    found = hidden(model)
    model.hidden(ROW).square().sum().backward()
    unused = [
        name for name, one in layers.items() if one.lora_A.weight.grad is None or not one.lora_A.weight.grad.any()
    ]
    assert not unused
    with without_adapters(model.hf):
        assert not torch.allclose(found, hidden(model), atol=1e-2)
        for layer in layers.values():
            layer.weight.data = merged(layer.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scale)
        torch.testing.assert_close(found, hidden(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", each(NOISY))
def test_without_noise_a_token_has_the_same_probability_each_time(tmp_path: Path, kind: str, recompute: bool) -> None:
    """In training mode, whatever its family calls its noise, and the same as in engines."""
    made(tmp_path, kind)
    settings = json.loads((tmp_path / "config.json").read_text())
    for table in (settings, settings.get("text_config", {}), settings.get("ffn_config", {})):
        names = [
            name for name, value in table.items() if re.search("drop|jitter", name) and not isinstance(value, bool)
        ]
        table.update(dict.fromkeys(names, 0.0 if kind == "diffllama" else 0.3))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    if recompute and kind == "jetmoe":
        return
    config = ModelConfig(path=str(tmp_path), enable_gradient_checkpointing=recompute)
    if kind in NOISY:
        noisy = load_model(config)
        assert not torch.equal(hidden(noisy), hidden(noisy))
    model = causal_lm(config, dropout=False).load()
    switched = [part for part in model.modules() if part.training]
    assert recompute or all(isinstance(part, PerSample) for part in switched)
    found = hidden(model)
    with evaluating(model):
        assert torch.equal(found, hidden(model)) and not any(part.training for part in model.modules())
    assert torch.equal(found, hidden(model)) and switched == [part for part in model.modules() if part.training]


@pytest.mark.parametrize("recompute", [True, "half"])
@pytest.mark.parametrize("kind", each(("gemma3", "gemma3n_text")))
def test_recomputed_layers_have_the_same_gradients(tmp_path: Path, kind: str, recompute: Any) -> None:
    made(tmp_path, kind)
    options: list[dict[str, Any]] = [{}, {"enable_gradient_checkpointing": recompute}]
    if recompute is True:
        options.append({"enable_gradient_checkpointing": True, "enable_activation_offload": True})
    found = []
    for more in options:
        if more and kind == "jetmoe":
            with pytest.raises(UserError, match="have no layers that transformers can recompute"):
                load_model(ModelConfig(path=str(tmp_path), **more))
            return
        model = causal_lm(ModelConfig(path=str(tmp_path), **more), dropout=False).load()
        model.hidden(ROW).square().sum().backward()
        found.append({name: p.grad for name, p in model.hf.named_parameters() if p.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(gradient, found[0][name]) for name, gradient in other.items())


def test_adapters_of_a_model_that_reads_images_are_in_its_language_model(tmp_path: Path) -> None:
    make(tmp_path, "gemma3")
    model = load_model(ModelConfig.model_validate({"path": str(tmp_path), "lora": {"rank": 2}}))
    assert model.adapters is not None and all(".language_model.layers." in name for name in model.adapters.layers)
    assert set(model.adapters.targets) == set(model.adapters.layers)  # the part for images has layers of these names
