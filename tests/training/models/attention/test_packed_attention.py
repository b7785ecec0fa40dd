from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.training.models.attention.exact_attention import SCORE_BYTES
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.lm_head import token_logprobs
from tests.helpers import make_tiny_model

LENGTHS = [5, 1, 17, 9, 17]
EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe")


def samples() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 300, length).astype(np.int32) for length in LENGTHS]


def all_targets(ids: list[np.ndarray]) -> list[np.ndarray]:
    return [np.arange(len(sample)) > 0 for sample in ids]


def logits(model: CausalLM, ids: list[np.ndarray]) -> torch.Tensor:
    """Of all positions that have a next token, in one packed row."""
    return model(pack_samples(ids, all_targets(ids)), lambda hidden_NH, weight_VH: hidden_NH @ weight_VH.t())


def spread_sinks(hf: torch.nn.Module) -> None:
    """Give the sinks of each head another value, which matters for the result."""
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, len(parameter)))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {}),
        ("qwen3", {"num_attention_heads": 4}),
        ("llama", {}),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": 0.02, "sliding_window": 6}),
        ("gemma3_text", {"final_logit_softcapping": None, "sliding_window": 6}),
        ("granite", {"logits_scaling": 6.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}),
        ("hyperclovax", {"logits_scaling": 0.3, "attention_multiplier": 0.4}),
        ("cohere", {"logit_scale": 0.1}),
        ("cohere2", {"logit_scale": 3.0, "sliding_window": 6}),
        ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("mixtral", {"num_local_experts": 3}),
        ("gpt_oss", {"num_attention_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    ],
    ids=[
        "qwen2",
        "qwen3 grouped",
        "llama",
        "mistral windows",
        "qwen2 mixed windows",
        "soft-capping",
        "gemma3",
        "granite scaled logits",
        "hyperclovax multiplied logits",
        "cohere scaled logits",
        "cohere2 layers without positions",
        "qwen3 experts",
        "mixtral experts",
        "experts with biases, sinks",
    ],
)
def test_packed_equals_one_by_one_and_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, object]
) -> None:
    """transformers computes attention with whole matrices of scores, and experts one by one."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setitem(SCORE_BYTES, "cpu", 500)  # several blocks of queries
    folder = make_tiny_model(tmp_path, kind=kind, **settings)
    model = load_model(ModelConfig(path=str(folder)))
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    if kind in EXPERTS and hasattr(plain, "set_experts_implementation"):
        plain.set_experts_implementation("eager")
        assert model.hf.config._experts_implementation == "grouped_mm"
    for one in (model.hf, plain):
        spread_sinks(one)
    ids = samples()
    packed = logits(model, ids)
    alone = torch.cat([logits(model, [sample]) for sample in ids])
    by_transformers = torch.cat([plain(torch.from_numpy(x)[None].long()).logits[0, :-1] for x in ids])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed, by_transformers, atol=1e-5, rtol=0)

    mix = torch.linspace(-1, 1, packed.numel()).view_as(packed)
    (packed * mix).sum().backward()
    (by_transformers * mix).sum().backward()
    for (name, ours), theirs in zip(model.hf.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=3e-4, msg=name)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_log_probabilities_of_capped_logits_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, kind=kind, final_logit_softcapping=0.05)
    model = load_model(ModelConfig(path=str(folder)))
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    batch = pack_samples(samples(), all_targets(samples()))
    options = (1.0, False, model.softcap)
    found, _ = model(
        batch, lambda hidden_NH, weight_VH: token_logprobs(hidden_NH, weight_VH, batch.targets_N, *options)
    )
    logits_NV = torch.cat([plain(torch.from_numpy(x)[None].long()).logits[0, :-1] for x in samples()])
    expected = logits_NV.log_softmax(dim=1).gather(1, batch.targets_N[:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert logits_NV.abs().max() > 0.02


def test_no_token_sees_another_sample(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(make_tiny_model(tmp_path))))
    ids = samples()
    before = logits(model, ids)
    ids[2] = ids[2][::-1].copy()
    changed = (logits(model, ids) - before).abs().sum(dim=1) > 0
    first = sum(length - 1 for length in LENGTHS[:2])
    assert changed[first : first + 16].all()
    assert not changed[:first].any() and not changed[first + 16 :].any()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packing_and_checkpointing_leave_gradients_as_they_are(tmp_path: Path, checkpointing: bool) -> None:
    folder = str(make_tiny_model(tmp_path))
    reference = load_model(ModelConfig(path=folder))
    model = load_model(ModelConfig(path=folder, enable_gradient_checkpointing=checkpointing))
    ids = samples()
    logits(model, ids).square().mean().backward()
    alone = torch.cat([logits(reference, [sample]) for sample in ids])
    alone.square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("modernbert-decoder", {"bos_token_id": 1}, "modernbert-decoder have no plain LM head"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "qwen3 have final_logit_softcapping=30.0, which"),
    ],
)
def test_models_that_would_be_wrong_are_refused(
    tmp_path: Path, kind: str, settings: dict[str, object], reason: str
) -> None:
    folder = make_tiny_model(tmp_path, kind=kind, **settings)
    with pytest.raises(UserError, match=reason):
        logits(load_model(ModelConfig(path=str(folder))), samples())


@pytest.mark.parametrize("recompute", [False, True])
def test_passes_of_several_models_may_alternate(tmp_path: Path, recompute: bool) -> None:
    """Recomputation in the backward pass uses the samples of its own forward pass, not those of the latest one."""
    folder = str(make_tiny_model(tmp_path))
    model = load_model(ModelConfig(path=folder, enable_gradient_checkpointing=recompute))
    other = load_model(ModelConfig(path=folder))
    ids = samples()
    logits(model, ids).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = logits(model, ids).square().sum()
    later = logits(model, ids[:2]).sum() * 0 + logits(other, [np.concatenate(ids)]).sum() * 0
    (loss + later).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
