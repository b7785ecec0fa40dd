"""What config.json tells about a family is what training a small model of it shows, for all of transformers'."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.formats import model_families
from hpc_rl.formats.model_families import REFUSALS, refuse_family
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm, count_flops
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel.distributed import World
from tests.marks import long
from tests.small_models.families import config_json, make_model

pytest.importorskip("transformers.models.olmo_hybrid", reason="the verdicts are those of transformers 5")
WORLD = World(0, 1, torch.device("cpu"))
LENGTHS = (7, 21, 13)
YES, UNPACKED, REFUSED = "yes", "unpacked", "refused"
PRICE = "2 to 7 times slower"
UNBUILT = {
    "blt": "is large: its parts have configurations of their own",
    "cohere_compass_text": "needs sections of its rotary embedding",
    "emu3": "is saved as emu3_text_model, which AutoModelForCausalLM does not read",
    "gemma3n": "needs the package timm for its images",
    "gemma4_assistant": "has no class in AutoModel",
    "gemma4_unified_assistant": "has no class in AutoModel",
    "moshi": "can be computed since transformers 5.20 only, and is refused",
    "mllama": "is saved as mllama_text_model, which AutoModelForCausalLM does not read",
    "musicgen": "needs configurations of three models",
    "musicgen_melody": "needs configurations of three models",
}
"""model_type of families that are not tried -> why."""
SHORT = (
    *("bert", "deepseek_v32", "doge", "gemma3", "gpt2", "llama4", "mamba", "nanochat", "nemotron", "opt", "phi"),
    *("qwen3", "recurrent_gemma", "stablelm", "vaultgemma", "whisper"),
)
KINDS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in UNBUILT]


def make(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """Save a small model with random weights, and return the contents of its config.json."""
    return config_json(make_model(folder, kind, "AutoModelForCausalLM", **changes))


def refusal(settings: dict[str, Any], with_head: bool = True, packing: bool = True) -> str | None:
    try:
        refuse_family("model.path", "/m", settings, with_head, packing)
    except UserError as error:
        return str(error)
    return None


def verdict(settings: dict[str, Any]) -> str:
    if refusal(settings) is None:
        return YES
    return REFUSED if refusal(settings, packing=False) else UNPACKED


def load(folder: Path, packing: bool) -> CausalLM:
    pretrained = causal_lm(ModelConfig(path=str(folder), dtype="float32"))
    return load_sharded(pretrained, WORLD, TrainingConfig(packing=packing))


def assert_refused(folder: Path, packing: bool) -> None:
    with pytest.raises((UserError, IndexError, RuntimeError, TypeError, ValueError)):
        load(folder, packing)


def assert_trained(folder: Path, packing: bool) -> None:
    """A training step on a row of samples has the logits and gradients of unchanged transformers on each alone."""
    model = load(folder, packing).eval()  # without what is random in training
    parts = {id(part) for block in model.layers() for part in list(block.modules())[1:]}
    assert not any(id(block) in parts for block in model.layers())  # FSDP would divide their weights twice
    if not packing:
        assert count_flops(model).per_token > 0
    ids = np.split(np.random.default_rng(1).integers(3, 300, sum(LENGTHS)), np.cumsum(LENGTHS)[:-1])
    row = pack_samples(ids, [np.arange(length) > 0 for length in LENGTHS])
    logits_NV = model(row, lambda hidden_NH, weight_VH: hidden_NH @ weight_VH.T)
    if (cap := model.softcap) is not None:
        logits_NV = cap * torch.tanh(logits_NV / cap)
    cross_entropy(logits_NV, row.targets_N, reduction="sum").backward()
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    alone = [hf(input_ids=torch.from_numpy(one)[None], use_cache=False).logits[0, :-1] for one in ids]
    cross_entropy(torch.cat(alone), row.targets_N, reduction="sum").backward()
    torch.testing.assert_close(logits_NV, torch.cat(alone), atol=1e-4 * float(logits_NV.abs().max()), rtol=1e-3)
    expected = {name.replace("language_model.", ""): weight for name, weight in hf.named_parameters()}
    for name, ours in model.hf.named_parameters():  # without parts for images
        theirs = expected[name.replace("language_model.", "")]
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            scale = theirs.grad.abs().max().clamp_min(1e-4)
            torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, atol=1e-3, rtol=0, msg=name)


@pytest.mark.parametrize("kind", [kind if kind in SHORT else long(kind) for kind in KINDS])
def test_the_verdict_is_what_a_training_step_shows(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdict(make(tmp_path, kind))
    is_part = kind in REFUSALS["encoder-decoder"].families  # whose decoder could be trained without its encoder
    monkeypatch.setattr(model_families, "REFUSALS", {})  # loading has to find out by itself
    if found == YES:
        assert_trained(tmp_path, packing=True)
    elif not is_part:
        assert_refused(tmp_path, packing=True)
    if found == UNPACKED:
        assert_trained(tmp_path, packing=False)
    elif found == REFUSED and not is_part:
        assert_refused(tmp_path, packing=False)


def test_the_page_about_models_names_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    section = page.partition("\n## Families\n")[2].partition("\n## ")[0]
    tried = {kind for kind in KINDS if verdict(AutoConfig.for_model(kind).to_dict()) == YES}
    rows = {YES: tried}
    for each in REFUSALS.values():
        rows[f"{UNPACKED if each.of_rows else REFUSED}: {each.reason}"] = set(each.families)
    for start, families in rows.items():
        (row,) = (line for line in section.splitlines() if line.startswith(f"| {start}"))
        named = set(re.findall("`([^`]+)`", row.split("|")[2]))
        assert (named & set(KINDS) if start == YES else named) == families, start
    assert PRICE in page and PRICE in model_families.UNPACK


def test_families_that_are_not_tried_are_in_transformers() -> None:
    assert UNBUILT.keys() | set(SHORT) <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    named = [family for each in REFUSALS.values() for family in each.families]
    assert max(Counter(named).values()) <= 2  # in packed rows, and as a critic
    of_wrappers = {"images", "prefix", "scale", "scores"}  # tests/training/checkpoints/test_complete_export.py
    named = [family for key, each in REFUSALS.items() if key not in of_wrappers for family in each.families]
    unread = set(named) - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()  # which loading refuses for this reason
    assert all(family in REFUSALS["encoder"].families | REFUSALS["encoder-decoder"].families for family in unread)


def test_families_without_a_classifier() -> None:
    """Those that critics and reward models refuse before the queue are those that transformers cannot build."""
    classifiers = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys()
    named = REFUSALS["scores"].families
    assert not named & classifiers
    alone = {kind for kind in KINDS if AutoConfig.for_model(kind).get_text_config().model_type == kind}
    tried = {kind for kind in alone if verdict({"model_type": kind}) != REFUSED}
    assert tried - classifiers - {"phi4_multimodal"} <= named
    assert refusal({"model_type": "olmoe"}, with_head=False) and not refusal({"model_type": "olmoe"})


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("granitemoehybrid", {"layer_types": ["attention"] * 3}, YES),
        ("gemma4_unified_text", {"final_logit_softcapping": 0.5}, YES),
        ("modernbert-decoder", {"decoder_bias": False}, REFUSED),
        ("qwen2_moe", {"sliding_window": 6, "use_sliding_window": True}, UNPACKED),
        ("qwen2_moe", {"sliding_window": 6, "use_sliding_window": False}, YES),
        ("phimoe", {"sliding_window": 6}, UNPACKED),
        ("phimoe", {"sliding_window": 512}, YES),
        ("llama", {"final_logit_softcapping": 5.0}, REFUSED),
        ("llama4_text", {"attention_chunk_size": 8, "floor_scale": 4}, UNPACKED),
        ("deepseek_v32", {"index_topk": 4}, UNPACKED),
    ],
)
def test_settings_decide(tmp_path: Path, kind: str, settings: dict[str, Any], expected: str) -> None:
    assert verdict(make(tmp_path, kind, **settings)) == expected
    if expected == YES:
        assert_trained(tmp_path, packing=True)
        return
    assert_refused(tmp_path, packing=True)
    assert_trained(tmp_path, packing=False) if expected == UNPACKED else assert_refused(tmp_path, packing=False)


def test_the_message_names_the_option_and_its_price() -> None:
    found = refusal({"model_type": "mamba"})
    assert found is not None and found.startswith(
        "model.path /m cannot be trained in packed rows: models of type mamba"
    )
    assert model_families.UNPACK in found and "or use a family with such layers that is supported" in found
    assert refusal({"model_type": "bert"}, packing=False) == refusal({"model_type": "bert"})
