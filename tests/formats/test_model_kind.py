from __future__ import annotations

import json
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import (
    refuse_other_frequencies,
    refuse_quantised,
    refuse_transformers_4,
    unscaled_positions,
)

LONGROPE = {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}}
DYNAMIC = {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}


@pytest.mark.parametrize(
    ("settings", "engine", "room", "message"),
    [
        (LONGROPE, "sglang", 5000, r"type longrope\) .* with up to 5,000 tokens of .*: set rollout.name"),
        (DYNAMIC, "sglang", 100, r"type dynamic\) .*: set rollout.name=vllm$"),
        (DYNAMIC, "vllm", 8193, r"type dynamic\) .*: lower data.max_prompt_length"),
        (LONGROPE, "sglang", 4096, None),
        (LONGROPE, "vllm", 5000, None),
        (LONGROPE, "hf", 5000, None),
        (DYNAMIC, "vllm", 8192, None),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "sglang", 100, None),
        ({"rope_scaling": None}, "sglang", 9000, None),
    ],
)
def test_engines_that_rotate_as_training_does(
    settings: dict[str, Any], engine: str, room: int, message: str | None
) -> None:
    settings = {"text_config": {"max_position_embeddings": 8192, **settings}}
    if message is None:
        refuse_other_frequencies("model.path", "/m", settings, engine, room)
        return
    with pytest.raises(UserError, match=rf"rollout.name={engine} does not compute .* of model.path /m \({message}"):
        refuse_other_frequencies("model.path", "/m", settings, engine, room)


def test_positions_that_are_not_scaled() -> None:
    nested = {"rope_parameters": {"full_attention": {"original_max_position_embeddings": 16}}}
    assert unscaled_positions({"max_position_embeddings": 64, **nested}) == 16
    assert unscaled_positions({"text_config": {"max_position_embeddings": 64}}) == 64
    assert unscaled_positions({}) == 0


def _refuse_quantised(folder: Path) -> None:
    files = {file.name: file for file in folder.iterdir()}
    refuse_quantised("model.path", "/m", files.get, lambda: folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "config.json",
            {"quantization_config": {"quant_method": "fp8"}},
            r"config\.json has quantization_config \(fp8\)",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            r"modelopt.*NVFP4",
        ),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, r"hf_quant_config\.json .*\(FP8\)"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, r"quantize_config\.json has bits"),
        ("quant_config.json", {"w_bit": 4}, r"quant_config\.json has w_bit"),
    ],
)
def test_quantised_weights_are_refused(tmp_path: Path, name: str, content: dict[str, Any], message: str) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"model\.path /m has quantised weights, .*{message}.*; name the model from"):
        _refuse_quantised(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "is_quantised"),
    [
        ("layers.0.q_proj.weight", "F8_E4M3", [2, 2], True),
        ("layers.0.q_proj.weight", "I8", [2, 2], True),
        ("layers.0.q_proj.qweight", "I32", [2, 2], True),
        ("layers.0.q_proj.weight", "U8", [8, 1], True),
        ("layers.0.q_proj.weight", "BF16", [2, 2], False),
        ("layers.0.q_proj.weight", "F32", [2, 2], False),
        ("layers.0.attn.bias", "U8", [1, 1, 4, 4], False),
        ("layers.0.steps.weight", "I64", [1], False),
    ],
)
def test_types_of_weights_show_quantisation(
    tmp_path: Path, name: str, dtype: str, shape: list[int], is_quantised: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    if not is_quantised:
        return _refuse_quantised(tmp_path)
    with pytest.raises(UserError, match=f"{name} has the type {dtype}"):
        _refuse_quantised(tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model_type": "jamba"}, "gives attention a mask of its own in models of type jamba"),
        ({"model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6}}, "does not read the rotary"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "does not load the language model"),
        ({"model_type": "olmoe"}, "has no attention .* models of type olmoe: .* or use trainer.packing=false"),
        ({"model_type": "qwen3", "rope_theta": 1e6}, None),
    ],
)
def test_transformers_4_reads_some_models_wrongly(settings: dict[str, Any], problem: str | None) -> None:
    for version in ("", "5.0.0"):
        refuse_transformers_4("model.path", "/m", settings, version)
    with pytest.raises(UserError, match=f"with transformers 4.57.0, which {problem}") if problem else nullcontext():
        refuse_transformers_4("model.path", "/m", settings, "4.57.0")
    if settings["model_type"] == "olmoe":
        refuse_transformers_4("model.path", "/m", settings, "4.57.0", packing=False)
