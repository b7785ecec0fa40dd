"""Models with layers that have a state compute each sample of a packed row as transformers computes it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import MIXERS, has_mixers
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.training.models import causal_lm as models
from hpc_rl.training.models import mixers as models_mixers
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm, count_flops
from hpc_rl.training.models.compute_weights import ComputeWeights
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.lora import is_adapter
from hpc_rl.training.models.mixers import PerSample
from hpc_rl.training.models.stored_form import StoredForm
from hpc_rl.training.parallel.distributed import World
from tests.marks import IS_TRANSFORMERS_4, since_5
from tests.small_models.families import FAMILIES, OTHERS, make_model

WORLD = World(0, 1, torch.device("cpu"))
Results = tuple[torch.Tensor, dict[str, torch.Tensor]]
LENGTHS = (7, 40, 13, 3, 21)
REFUSED = {"bamba", "falcon_h1", "granitemoehybrid", "jamba"} if IS_TRANSFORMERS_4 else set[str]()
KINDS = [kind for kind in MIXERS if kind in CONFIG_MAPPING and kind not in REFUSED]
"""Those that this version of transformers has."""


def load(path: str, **options: Any) -> CausalLM:
    config = ModelConfig.model_validate({"path": path, "dtype": "float32", **options})
    return load_sharded(causal_lm(config), WORLD, TrainingConfig())


def samples() -> list[np.ndarray]:
    ids = np.random.default_rng(1).integers(3, 300, sum(LENGTHS))
    return np.split(ids, np.cumsum(LENGTHS)[:-1])


def step(model: CausalLM) -> Results:
    """The logits of all positions with a target, and the gradients of the mean loss."""
    batch = pack_samples(samples(), [np.arange(length) > 0 for length in LENGTHS])
    logits_NV = model(batch, lambda hidden_NH, weight_VH: hidden_NH @ weight_VH.T)
    cross_entropy(logits_NV, batch.targets_N).backward()
    return logits_NV.detach(), {name: p.grad for name, p in model.hf.named_parameters() if p.grad is not None}


def step_alone(path: str) -> Results:
    """The same, of each sample alone in unchanged transformers."""
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    found = []
    for ids in map(torch.from_numpy, samples()):
        logits_TV = hf(input_ids=ids[None], use_cache=False).logits[0, :-1]
        (cross_entropy(logits_TV, ids[1:], reduction="sum") / (sum(LENGTHS) - len(LENGTHS))).backward()
        found.append(logits_TV.detach())
    return torch.cat(found), {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}


def assert_equal(found: Results, expected: Results, tolerance: float = 1e-4) -> None:
    assert torch.allclose(found[0], expected[0], atol=tolerance / 10, rtol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        scale = expected[1][name].abs().max().clamp_min(1e-4)
        assert torch.allclose(gradient / scale, expected[1][name] / scale, atol=tolerance), name


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_packed_rows_are_the_samples(tmp_path: Path, kind: str) -> None:
    """The table of models compares rows that are not recomputed."""
    path = str(make_model(tmp_path, kind))
    assert_equal(step(load(path, enable_gradient_checkpointing=True)), step_alone(path))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_bfloat16_beside_buffers_in_float32(tmp_path: Path, kind: str) -> None:
    """As on a GPU, which computes with copies of float32 weights."""
    path = str(make_model(tmp_path, kind))
    model = load(path, enable_gradient_checkpointing=True)
    copies = ComputeWeights(model, model.float32_modules())
    found, expected = step(model), step_alone(path)
    copies.leave()
    difference_N = (found[0] - expected[0]).norm(dim=1) / expected[0].norm(dim=1)
    assert difference_N.median() < 0.05  # rounding leads a few tokens to other experts
    assert all(weight.grad is not None for name, weight in model.hf.named_parameters() if name in expected[1])


def test_each_kind_has_a_row() -> None:
    assert MIXERS.keys() <= FAMILIES.keys() | OTHERS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_split_the_model_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "split_mixers", lambda _hf: None)
    with pytest.raises(UserError, match="cannot be trained in packed rows: the hidden states of a sample are not"):
        load(str(make_model(tmp_path, kind)))


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
def test_a_weak_state_that_is_not_split_is_refused_too(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "split_mixers", lambda _hf: None)
    with pytest.raises(UserError, match="cannot be trained in packed rows"):
        load(str(make_model(tmp_path, kind, spread=False)))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_adapters_and_names_of_weights(tmp_path: Path, kind: str) -> None:
    """Adapters are on the projections of mixers, and engines receive what the files contain."""
    path = str(make_model(tmp_path, kind))
    model = load(path, dtype="bfloat16", lora={"rank": 2})
    mixers = {name for name, part in model.hf.named_modules() if isinstance(part, PerSample)}
    assert mixers and has_mixers(model.hf.config.to_dict())
    assert model.adapters is not None
    assert mixers == {name.rpartition(".")[0] for name in model.adapters.layers} & mixers
    _, gradients = step(model)
    assert {name for name in gradients if is_adapter(name)} == {
        f"{name}.lora_{part}.weight" for name in model.adapters.layers for part in "AB"
    }
    if kind == "lara_mini":
        with pytest.raises(UserError, match="cannot be written weight by weight"):
            StoredForm(model.hf)
        return
    expected = load_file(Path(path, "model.safetensors"))
    found = dict(WeightSource(model.hf, torch.float32, stored=StoredForm(model.hf)))
    assert {name: weight.shape for name, weight in found.items()} == {
        name: weight.shape for name, weight in expected.items()
    }


@since_5
def test_kernels_receive_one_sample_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a layer is recomputed after another row; and no boundaries, which a kernel could read in another way."""
    model = load(str(make_model(tmp_path, "qwen3_next")), enable_gradient_checkpointing=True)
    source = sys.modules[type(model.hf).__module__]
    own, calls = source.torch_chunk_gated_delta_rule, list[int]()

    def counted(query: torch.Tensor, *others: Any, cu_seqlens: None, **named: Any) -> Any:
        assert cu_seqlens is None and "packed_bounds" not in named
        calls.append(query.shape[1])
        return own(query, *others, **named)

    monkeypatch.setattr(source, "torch_chunk_gated_delta_rule", counted)
    first, second = (pack_samples(one, [np.arange(len(ids)) > 0 for ids in one]) for one in (samples(), samples()[:2]))
    losses = [model(row, lambda hidden_NH, _: hidden_NH.sum()) for row in (first, second)]
    assert calls == [*LENGTHS, *LENGTHS, *LENGTHS[:2], *LENGTHS[:2]]
    calls.clear()
    losses[0].backward()
    assert calls == [*LENGTHS, *LENGTHS]


TAKE_BOUNDARIES = {
    "causal_conv1d_fn": ("seq_idx", 2),
    "mamba2_chunk_scan": ("seq_idx", 1),
    "torch_chunk_gated_delta_rule": ("cu_seqlens", 1),
}
"""Functions of transformers that kernels may replace -> the argument with the samples, and the dimension of tokens."""


def kernel(own: Callable[..., Any], name: str, calls: list[str], shift: int) -> Callable[..., Any]:
    """A stand-in for a kernel that takes boundaries, which are all moved by some tokens."""
    argument, dimension = TAKE_BOUNDARIES[name]

    def computed(*inputs: Any, **named: Any) -> Any:
        bounds = named.pop(argument, None)
        named = {key: value for key, value in named.items() if key not in ("seq_idx", "cu_seq_lens_q")}
        if bounds is None:
            return own(*inputs, **named)
        calls.append(name)
        assert bounds.dtype == torch.int32
        if argument == "cu_seqlens":
            lengths = bounds.diff().tolist()
        else:
            assert bounds.shape[0] == 1
            lengths = bounds[0].unique_consecutive(return_counts=True)[1].tolist()
        if len(lengths) > 1:
            lengths[:2] = [lengths[0] + shift, lengths[1] - shift]
        values, layout = tree_flatten((inputs, named))
        have = [isinstance(x, torch.Tensor) and x.ndim > 2 and x.shape[dimension] == sum(lengths) for x in values]
        split = [
            x.split(lengths, dimension) if has else [x] * len(lengths) for x, has in zip(values, have, strict=True)
        ]
        found = [own(*one, **more) for one, more in (tree_unflatten(list(x), layout) for x in zip(*split, strict=True))]
        if isinstance(found[0], tuple):
            return torch.cat([one[0] for one in found], dimension), None
        return torch.cat(found, dimension)

    return computed


@since_5
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", ["bamba", "lfm2", "olmo_hybrid", "qwen3_next"])
def test_kernels_that_keep_samples_apart_compute_whole_rows(
    tmp_path: Path, kind: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if they do: kernels with other boundaries, and code that ignores them, get one sample at a time."""
    path, calls = str(make_model(tmp_path, kind)), list[str]()
    monkeypatch.setattr(models_mixers, "has_kernels", lambda _family: True)
    source = sys.modules[type(load(path).hf).__module__]
    names = [name for name in TAKE_BOUNDARIES if hasattr(source, name)]
    for name in names:
        monkeypatch.setattr(source, name, kernel(getattr(source, name), name, calls, shift))
    # One kernel for all of a mixer; without it, transformers calls the others.
    monkeypatch.setattr(source, "mamba2_split_conv1d_scan_combined", lambda *_, **_named: None, raising=False)
    model = load(path, enable_gradient_checkpointing=True)
    mixers = [part for part in model.hf.modules() if isinstance(part, PerSample)]
    assert {mixer.whole_rows for mixer in mixers} == {not shift}
    calls.clear()
    assert_equal(step(model), step_alone(path))
    assert set(calls) == (set() if shift else set(names))


def test_a_layer_without_the_samples_is_an_error(tmp_path: Path) -> None:
    model = load(str(make_model(tmp_path, "lfm2")))
    with pytest.raises(UserError, match="lfm2 do not pass the samples' lengths to their layers"):
        model.hf(torch.tensor([[3, 4, 5]]), use_cache=False)


@since_5
def test_attention_counts_in_the_layers_that_have_it(tmp_path: Path) -> None:
    count = {
        kind: count_flops(load(str(make_model(tmp_path / kind, kind)))).per_squared_token
        for kind in ("lfm2", "falcon_h1")
    }
    assert count == {"lfm2": 12 * 128, "falcon_h1": 3 * 12 * 128}
