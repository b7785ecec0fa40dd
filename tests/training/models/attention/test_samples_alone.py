"""In a packed row, every sample has the logits, the loss and the gradient that it has alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.training.models import causal_lm
from hpc_rl.training.models.attention.packed_attention import is_packed
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import load_model
from tests.marks import since_5, unless_4
from tests.small_models.families import LONGROPE, make_model

LENGTHS = ([7, 90, 13, 3, 21], [16, 17, 64, 30, 17], [5, 9, 11, 2, 1])
"""Rows of which the second follows one with a longer sample than some of its own, and the last has short samples."""
POSITIONS = {"original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, **POSITIONS}
SCALED_LONGROPE = {**LONGROPE, "factor": 4.0}
UNCAPPED = {"final_logit_softcapping": None}
WINDOWS = {"sliding_attention": {"rope_type": "default"}}
FAMILIES: dict[str, dict[str, Any]] = {  # and those of tests/models_table
    "llama": {},
    "llama, dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    "llama, longrope": {"rope_parameters": SCALED_LONGROPE},
    "llama, yarn": {"rope_parameters": YARN},
    "qwen3, dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    "gemma3_text": {"rope_parameters": {**WINDOWS, "full_attention": YARN}},
    "gemma3_text, dynamic": {
        **{"rope_parameters": {**WINDOWS, "full_attention": DYNAMIC}, "max_position_embeddings": 16},
    },
    "gemma3_text, longrope": {"rope_parameters": {**WINDOWS, "full_attention": SCALED_LONGROPE}},
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    **dict.fromkeys(("gemma4_unified_text", "vaultgemma"), UNCAPPED),
    **{kind: {} for kind in ("phi3", "phimoe", "ministral", "glm4_moe", "phi", "qwen3_next", "smollm3", "deepseek_v3")},
}
OF_LENGTH = [name for name in FAMILIES if "dynamic" in name or "longrope" in name or name in ("phi3", "phimoe")]


def model_of(folder: Path, name: str) -> tuple[causal_lm.CausalLM, Any]:
    """The model in packed training, and in transformers."""
    from transformers import AutoModelForCausalLM

    make_model(folder, name.partition(",")[0], **FAMILIES[name])
    model = load_model(ModelConfig(path=str(folder)))
    model.hf.eval()  # the routers of phimoe draw experts in training mode
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if hasattr(plain, "set_experts_implementation"):
        plain.set_experts_implementation("eager")
    return model, plain


def samples_of(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = np.random.default_rng(0)
    return [torch.from_numpy(generator.integers(3, 300, length)) for length in lengths]


Result = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""The logits, the loss and the gradients of a sample; these by the name that a weight has outside of a wrapper."""


def result_of(logits_TV: torch.Tensor, ids_T: torch.Tensor, hf: torch.nn.Module) -> Result:
    loss = cross_entropy(logits_TV[:-1], ids_T[1:], reduction="sum")
    weights = {name.replace("language_model.", ""): weight for name, weight in hf.named_parameters()}
    gradients = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, materialize_grads=True)
    return logits_TV, loss, dict(zip(weights, gradients, strict=True))


def packed_logits(model: causal_lm.CausalLM, samples: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The logits of each sample, [T, V], as the chunks of the loss compute them."""
    ids = [sample.numpy() for sample in samples]
    row = pack_samples(ids, [np.arange(len(one)) > 0 for one in ids])
    hidden_TX, weight_VX = causal_lm.head_inputs(model.hf, model.hidden(row))
    logits = hidden_TX @ weight_VX.T
    if model.softcap is not None:
        logits = model.softcap * torch.tanh(logits / model.softcap)
    return logits.split(row.lengths)


def packed_results(model: causal_lm.CausalLM, samples: Sequence[torch.Tensor]) -> Iterator[Result]:
    for logits_TV, ids_T in zip(packed_logits(model, samples), samples, strict=True):
        yield result_of(logits_TV, ids_T, model.hf)


def largest_difference(ours: Result, theirs: Result) -> float:
    """Relative to the largest logit, to the loss, and to the norm of the gradient. Parts for images have none."""
    norm = torch.stack([each.norm() for each in theirs[2].values()]).norm() + 1e-3
    return max(
        float((ours[0] - theirs[0]).detach().abs().max() / theirs[0].detach().abs().max()),
        float((ours[1] - theirs[1]).detach().abs() / (1 + theirs[1].detach())),
        *(float((gradient - theirs[2][name]).norm() / norm) for name, gradient in ours[2].items()),
    )


def differences(model: causal_lm.CausalLM, plain: Any, lengths: Sequence[int]) -> list[float]:
    found = []
    samples = samples_of(lengths)
    for ids_T, ours in zip(samples, packed_results(model, samples), strict=True):
        alone = copy.deepcopy(plain)  # which has seen no other sample
        theirs = result_of(alone(input_ids=ids_T[None], use_cache=False).logits[0], ids_T, alone)
        found.append(largest_difference(ours, theirs))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_is_what_it_is_alone(tmp_path: Path, name: str) -> None:
    model, plain = model_of(tmp_path, name)
    for lengths in LENGTHS:
        assert max(differences(model, plain, lengths)) < 2e-5


@pytest.mark.parametrize("name", OF_LENGTH)
def test_this_finds_frequencies_of_another_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(causal_lm, "follow_samples", lambda *_: None)
    found = differences(*model_of(tmp_path, name), LENGTHS[0])
    assert max(found[0], found[2], found[3]) > 1e-2


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("llama4_text", {}, "layers of type chunked_attention"),
        ("llama4_text", {"layer_types": ["full_attention"] * 3}, "scale queries by their position in the row"),
        unless_4("phimoe", {"sliding_window": 6}, r"attention \(sliding_window=6\), but do not pass the window"),
        unless_4("qwen2_moe", {"sliding_window": 6, "use_sliding_window": True}, "sliding-window attention"),
        ("doge", {}, "doge need a mask of their own in attention"),
        ("deepseek_v32", {}, "attend to selected or compressed keys"),
    ],
)
def test_models_whose_samples_would_be_others_are_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    folder = make_model(tmp_path, kind, **settings)
    with pytest.raises(UserError, match=reason):
        list(packed_results(load_model(ModelConfig(path=str(folder))), samples_of([3])))


@since_5
def test_frequencies_in_each_layer_need_one_sample_per_row(tmp_path: Path) -> None:
    for hf in model_of(tmp_path, "phi3"):
        hf = getattr(hf, "hf", hf)
        hf.model.layers[0].rotary_emb = hf.model.rotary_emb
        with nullcontext() if not is_packed(hf) else pytest.raises(UserError, match=r"use trainer\.packing=false"):
            causal_lm.follow_samples(hf)


@since_5
def test_one_length_for_all_samples(tmp_path: Path) -> None:
    """As an engine has it: the short factors are the long ones."""
    model, plain = model_of(tmp_path, "phi3")
    causal_lm.follow_samples(model.hf, longest=65)
    plain.config.rope_parameters["short_factor"] = LONGROPE["long_factor"]
    plain.model.rotary_emb.__init__(plain.config)
    assert max(differences(model, plain, LENGTHS[0])) < 2e-5
