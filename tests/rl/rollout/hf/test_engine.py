from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.rl.rollout.engine import Completion, Request, Sampling, Span, complete
from hpc_rl.rl.rollout.hf.batch import STEPS_BETWEEN_CHECKS, Slots, micro_batches
from hpc_rl.rl.rollout.hf.engine import HfEngine
from hpc_rl.rl.rollout.sampling import uniforms
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.lm_head import token_logprobs
from tests.helpers import make_tiny_model
from tests.marks import IS_TRANSFORMERS_4
from tests.rl.rollout.tiny_engine import (
    LENGTHS,
    Prompts,
    counted_tokens,
    forward_logprobs,
    prompts,
    sharp_model,
    token_lists,
)

GREEDY = Sampling(max_new_tokens=12, temperature=0)


def generate(
    model: CausalLM, given: Prompts, sampling: Sampling, seeds: Sequence[int] | None = None, **options: Any
) -> list[Completion]:
    engine = HfEngine(model.hf, options.pop("eos", ()), **options)
    return complete(engine, given, range(len(given)) if seeds is None else seeds, sampling)


@torch.no_grad()
def plain_greedy(hf: Any, prompt: NDArray[np.int32], steps: int) -> list[int]:
    """Compute the whole sequence for every token, with transformers' own attention."""
    ids = torch.from_numpy(prompt)[None].long()
    for _ in range(steps):
        ids = torch.cat([ids, hf(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {}),
        ("qwen2", {"tie": True, "num_attention_heads": 4}),
        ("llama", {"num_attention_heads": 4}),
        ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("gemma2", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "sliding_window": 6}),
        ("granite", {"logits_scaling": 3.0}),
        ("gpt_oss", {"num_attention_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("phi", {}),
        ("bloom", {"packing": False}),
    ],
    ids=[
        "qwen2",
        "tied, grouped",
        "llama",
        "qwen3",
        "windows",
        "mixed windows",
        "soft-capping",
        "scaled logits",
        "experts, sinks",
        "states",
        "head with a bias",
        "unpacked",
    ],
)
def test_greedy_equals_a_plain_loop(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = sharp_model(tmp_path / "model", kind=kind, **settings)
    model.hf.save_pretrained(tmp_path / "sharp")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "sharp", attn_implementation="eager")
    given = prompts()
    expected = [plain_greedy(plain, prompt, GREEDY.max_new_tokens) for prompt in given]
    for max_num_seqs in (3, 64):
        completions = generate(model, given, GREEDY, max_num_seqs=max_num_seqs)
        assert token_lists(completions) == expected
        assert not any(completion.finished for completion in completions)
        logprobs = np.concatenate([completion.logprobs for completion in completions])
        np.testing.assert_allclose(logprobs, forward_logprobs(model, given, completions), atol=1e-4)


@pytest.mark.parametrize(("longest", "factor"), [(42, "long_factor"), (16, "short_factor")])
def test_one_length_decides_about_rotary_embeddings(tmp_path: Path, longest: int, factor: str) -> None:
    """Responses that cross the original length, and those that do not, have the log-probabilities of training."""
    from transformers import AutoModelForCausalLM

    rotary = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}
    rotary |= {"short_factor": [1.0] * 8, "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]}
    model = sharp_model(tmp_path / "model", kind="llama", longest=longest, rope_parameters=rotary)
    model.hf.save_pretrained(tmp_path / "sharp")
    name = "rope_scaling" if IS_TRANSFORMERS_4 else "rope_parameters"
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "sharp", attn_implementation="eager", **{name: rotary | {"short_factor": rotary[factor]}}
    )
    given = [prompt for prompt in prompts() if len(prompt) + 2 <= longest]
    steps = [min(GREEDY.max_new_tokens, longest - len(prompt)) for prompt in given]
    getattr(plain.config, name)["long_factor"] = rotary[factor]
    completions = [
        completion
        for prompt, most in zip(given, steps, strict=True)
        for completion in generate(model, [prompt], Sampling(most, temperature=0))
    ]
    expected = [plain_greedy(plain, prompt, most) for prompt, most in zip(given, steps, strict=True)]
    assert token_lists(completions) == expected
    together = generate(model, given, Sampling(min(steps), temperature=0))
    assert token_lists(together) == [tokens[: min(steps)] for tokens in expected]
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    np.testing.assert_allclose(logprobs, forward_logprobs(model, given, completions), atol=1e-4)


def test_an_engine_needs_the_length_of_all_samples(tmp_path: Path) -> None:
    rotary = {"rope_type": "dynamic", "factor": 4.0}
    model = sharp_model(tmp_path, kind="llama", rope_parameters=rotary)
    with pytest.raises(AssertionError, match="an engine needs the length of all samples"):
        generate(model, prompts(), GREEDY)


@pytest.mark.parametrize("sampling", [Sampling(20, 0.7), Sampling(20, 1.3, top_p=0.8), Sampling(20, top_k=5)])
def test_logprobs_equal_those_of_training(tmp_path: Path, sampling: Sampling) -> None:
    model = sharp_model(tmp_path)
    given = prompts()
    completions = generate(model, given, sampling)
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    expected = forward_logprobs(model, given, completions, sampling.temperature)
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    assert logprobs.dtype == np.float32
    assert completions[0].token_ids.dtype == np.int32


def test_a_response_depends_on_its_seed_and_not_on_other_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharp_model(tmp_path)
    given = prompts() * 2
    seeds = [10**12 + 7 * number for number in range(len(given))]
    sampling = Sampling(15)
    eos = range(0, 300, 12)  # responses of different length
    together = token_lists(generate(model, given, sampling, seeds, eos=eos))
    assert len({len(tokens) for tokens in together}) > 2
    in_turns = token_lists(generate(model, given[::-1], sampling, seeds[::-1], eos=eos, max_num_seqs=3))[::-1]
    alone = [
        token_lists(generate(model, [prompt], sampling, [seed], eos=eos))[0]
        for prompt, seed in zip(given, seeds, strict=True)
    ]
    assert together == in_turns == alone
    monkeypatch.setitem(STEPS_BETWEEN_CHECKS, "cpu", 4)  # ends are noticed late, as on a GPU
    late = token_lists(generate(model, given, sampling, seeds, eos=eos, max_num_seqs=3))
    assert together == late
    assert together != token_lists(generate(model, given, sampling, [seed + 1 for seed in seeds], eos=eos))


def test_tokens_are_as_frequent_as_the_models_probabilities(tmp_path: Path) -> None:
    model = sharp_model(tmp_path)
    prompt = prompts([8])[0]
    draws = 8_000
    completions = generate(model, [prompt] * draws, Sampling(1, temperature=0.8), max_num_seqs=1_000)
    counts_V = np.bincount([completion.token_ids[0] for completion in completions], minlength=320)
    every = [Completion(np.array([token], np.int32), np.zeros(1, np.float32), False) for token in range(320)]
    expected_V = draws * np.exp(forward_logprobs(model, [prompt] * 320, every, 0.8).astype(np.float64))
    common = expected_V >= 5
    observed, expected = (np.append(x[common], x[~common].sum()) for x in (counts_V, expected_V))
    freedom = len(observed) - 1
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert 20 < freedom < 300
    assert chi_square < freedom + 3 * np.sqrt(2 * freedom)


def test_end_of_sequence_ends_a_response(tmp_path: Path) -> None:
    model = sharp_model(tmp_path)
    given = prompts()
    whole = token_lists(generate(model, given, GREEDY))
    eos = {whole[0][4], whole[2][0]}
    completions = generate(model, given, GREEDY, eos=eos)
    for tokens, completion in zip(whole, completions, strict=True):
        ends = [position for position, token in enumerate(tokens) if token in eos]
        assert completion.token_ids.tolist() == (tokens[: ends[0] + 1] if ends else tokens)
        assert completion.finished == bool(ends)
        assert len(completion.logprobs) == len(completion.token_ids)
    assert len(completions[2].token_ids) == 1


@pytest.mark.parametrize("max_num_seqs", [4, 64])
def test_neither_padding_nor_finished_sequences_are_computed(tmp_path: Path, max_num_seqs: int) -> None:
    model = sharp_model(tmp_path)
    given = prompts()
    with counted_tokens(model) as counts:
        completions = generate(model, given, Sampling(15), eos=range(0, 300, 12), max_num_seqs=max_num_seqs)
    # The last token of a prompt enters with the first step.
    assert sum(counts) == sum(LENGTHS) - len(LENGTHS) + sum(len(completion.token_ids) for completion in completions)


def test_equal_prompts_are_computed_once(tmp_path: Path) -> None:
    model = sharp_model(tmp_path)
    given = [prompt for prompt in prompts([20, 30]) for _ in range(4)]
    with counted_tokens(model) as counts:
        completions = generate(model, given, Sampling(6))
    assert sum(counts) == 19 + 29 + 8 * 6
    assert len({tuple(tokens) for tokens in token_lists(completions)}) == 8


def test_a_later_sequence_copies_an_equal_prompt_from_the_cache(tmp_path: Path) -> None:
    model = sharp_model(tmp_path)
    given = prompts([20]) * 5
    eos = range(0, 300, 12)
    with counted_tokens(model) as counts:
        completions = generate(model, given, Sampling(30), seeds=range(20, 25), eos=eos, max_num_seqs=4)
    lengths = [len(completion.token_ids) for completion in completions]
    assert min(lengths[:4]) < max(lengths[:4])
    assert sum(counts) == 19 + sum(lengths)
    alone = [token_lists(generate(model, given[:1], Sampling(30), [seed], eos=eos))[0] for seed in range(20, 25)]
    assert token_lists(completions) == alone


@pytest.mark.parametrize("tie", [False, True])
def test_new_weights_take_effect(tmp_path: Path, tie: bool) -> None:
    settings = {"tie": tie, "num_attention_heads": 4}
    engine = HfEngine(load_model(ModelConfig(path=str(make_tiny_model(tmp_path / "a", **settings)))).hf, ())
    other = sharp_model(tmp_path / "b", **settings)
    given = prompts()
    before = token_lists(complete(engine, given, range(7), GREEDY))
    weights = [(name, parameter.detach().double()) for name, parameter in other.hf.named_parameters()]
    engine.load_weights(weights[:3])
    engine.load_weights(weights[3:])
    after = token_lists(complete(engine, given, range(7), GREEDY))
    assert before != after == token_lists(generate(other, given, GREEDY))


def test_weights_change_between_the_last_of_some_and_the_first_of_others(tmp_path: Path) -> None:
    """The sequences of a slice have all ended, and the other requests still wait."""
    engine = HfEngine(sharp_model(tmp_path).hf, (), max_num_seqs=2)
    for version, sampling in ((0, Sampling(1)), (1, Sampling(1))):
        engine.add([Request(number, prompt, 0, sampling) for number, prompt in enumerate(prompts()[:3])])
        found = engine.advance(0.0, version)
        assert [completion.spans for _, completion in found] == [(Span(version, 1),)] * 2 and engine.running == 1
        ((number, last),) = engine.advance(0.0, version + 1)
        assert number == 2 and last.spans == (Span(version + 1, 1),)
    engine.add([Request(number, prompt, 0, Sampling(1)) for number, prompt in enumerate(prompts()[:3])])
    engine.advance(0.0, 2)
    assert engine.withdraw() == {} and not engine.running


def test_buffers_that_files_contain_are_weights_too(tmp_path: Path) -> None:
    hf = load_model(ModelConfig(path=str(make_tiny_model(tmp_path)))).hf
    hf.model.register_buffer("correction", torch.zeros(4))  # as routers of DeepSeek V3 and GLM 4.5
    hf.model.register_buffer("computed", torch.zeros(4), persistent=False)
    engine = HfEngine(hf, ())
    engine.load_weights([("model.correction", torch.arange(4.0))])
    assert hf.model.correction.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"no weight model\.computed"):
        engine.load_weights([("model.computed", torch.zeros(4))])


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    engine = HfEngine(load_model(ModelConfig(path=str(make_tiny_model(tmp_path)))).hf, ())
    with pytest.raises(ValueError, match=r"no weight model.norm.weight of shape \(1,\)"):
        engine.load_weights([("model.norm.weight", torch.ones(1))])


def test_a_model_in_training_is_not_changed(tmp_path: Path) -> None:
    settings = {"attention_dropout": 0.5}
    model = sharp_model(tmp_path, **settings)
    model.hf.gradient_checkpointing_enable({"use_reentrant": False})
    frozen = model.layers()[0].eval()
    given = prompts()
    first = token_lists(generate(model, given, GREEDY))
    assert first == token_lists(generate(model, given, GREEDY))
    assert model.hf.training and model.layers()[1].training
    assert not any(part.training for part in frozen.modules())
    batch = pack_samples(given, [np.arange(len(prompt)) > 0 for prompt in given])
    model(batch, lambda h, w: token_logprobs(h, w, batch.targets_N)[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.hf.parameters())


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    given = prompts()
    model = sharp_model(tmp_path / "a", "bfloat16", hidden=64)
    completions = generate(model, given, Sampling(10))
    model.hf.float()
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    differences = np.abs(np.exp(logprobs) - np.exp(forward_logprobs(model, given, completions)))
    assert differences.mean() < 0.01


def test_generation_works_after_sleep(tmp_path: Path) -> None:
    engine = HfEngine(sharp_model(tmp_path).hf, (), max_num_seqs=4)
    given = prompts()
    first = token_lists(complete(engine, given[:2], range(2), GREEDY))
    everything = token_lists(complete(engine, given, range(7), GREEDY))
    engine.sleep()
    engine.wake()
    assert token_lists(complete(engine, given, range(7), GREEDY)) == everything
    assert everything[:2] == first
    assert complete(engine, [], [], GREEDY) == []


def test_more_tokens_than_positions_are_refused(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, max_position_embeddings=40))))
    assert len(generate(model, prompts([28]), GREEDY)[0].token_ids) == 12
    with pytest.raises(UserError, match=r"prompt of 29 tokens and a response of 12 .* 40 positions: lower data.max"):
        generate(model, prompts([3, 29]), GREEDY)


def test_a_model_that_does_not_pass_arguments_to_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a family that no table has."""
    monkeypatch.setattr("hpc_rl.training.models.causal_lm.refuse_family", lambda *_: None)
    path = str(make_tiny_model(tmp_path, kind="nemotron"))
    refused = "no custom attention" if IS_TRANSFORMERS_4 else "models of type nemotron do not pass the samples' lengths"
    with pytest.raises(UserError, match=refused):
        generate(load_model(ModelConfig(path=path)), prompts(), GREEDY)


def test_micro_batches_respect_the_limit() -> None:
    assert list(micro_batches([4, 5, 6, 7], [3, 9, 2, 3], 5)) == [[4], [5], [6, 7]]
    assert list(micro_batches([], [], 5)) == []


def test_slots_are_used_again_and_keep_their_contents_when_they_grow() -> None:
    slots = Slots(torch.device("cpu"))
    slots.grow(2, 3)
    first, second = slots.take([7, 8], 3)
    places = slots.places(np.array([first, second]), np.array([1, 2]))
    slots.tokens.view(-1)[places] = torch.tensor([11, 12])
    slots.logprobs.view(-1)[places] = torch.tensor([-1.0, -2.0])
    slots.grow(4, 5)
    assert slots.uniforms.shape == slots.tokens.shape == slots.logprobs.shape == (4, 5)
    np.testing.assert_array_equal(slots.uniforms[[first, second], :3].numpy(), uniforms([7, 8], 3))
    tokens_NS, logprobs_NS = slots.read([second, first], 3)
    assert tokens_NS.tolist() == [[0, 0, 12], [0, 11, 0]] and tokens_NS.dtype == np.int32
    assert logprobs_NS.tolist() == [[0, 0, -2], [0, -1, 0]]
    assert len({first, second, *slots.take([1, 2], 2)}) == 4
    slots.free([second])
    assert slots.take([9], 5) == [second]
    np.testing.assert_array_equal(slots.uniforms[[second]].numpy(), uniforms([9], 5))
    with pytest.raises(IndexError):
        slots.take([1], 1)
