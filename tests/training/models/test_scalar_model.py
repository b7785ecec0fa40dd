"""Critics and reward models: one number per position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.training.models.attention.packed_batch import PackedBatch, pack_samples
from hpc_rl.training.models.causal_lm import load_model
from hpc_rl.training.models.scalar_model import critic, reward_model, trained_reward_model
from tests.helpers import make_tiny_model

LENGTHS = [5, 9, 1]


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("causal")))


@pytest.fixture(scope="module")
def classifier(causal: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    model = AutoModelForSequenceClassification.from_pretrained(causal, num_labels=1)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(3)))
    model.save_pretrained(folder)
    return str(folder)


def samples() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 300, length).astype(np.int32) for length in LENGTHS]


def packed() -> PackedBatch:
    """Every token but a sample's first is a target, which is read one position before it."""
    return pack_samples(samples(), [np.arange(length) > 0 for length in LENGTHS])


def test_a_new_critic_says_zero_and_learns(causal: str) -> None:
    model = critic(causal, ModelConfig(path=causal)).load()
    values_N = model(packed())
    assert values_N.shape == (sum(LENGTHS) - len(LENGTHS),) and values_N.dtype == torch.float32
    assert (values_N == 0).all()
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    (values_N - 1).square().sum().backward()
    assert float(model.hf.score.weight.grad.norm()) > 0


def test_a_critic_starts_from_the_policys_backbone(causal: str) -> None:
    config = ModelConfig(path=causal)
    with torch.no_grad():
        torch.testing.assert_close(critic(causal, config).load().hidden(packed()), load_model(config).hidden(packed()))


def test_a_critic_may_start_from_a_reward_model(causal: str, classifier: str) -> None:
    assert float(critic(classifier, ModelConfig(path=causal)).load()(packed()).detach().abs().min()) > 0


def test_packed_scores_are_those_of_single_samples(causal: str, classifier: str) -> None:
    from transformers import AutoModelForSequenceClassification

    model = reward_model(classifier, ModelConfig(path=causal), torch.float32).load()
    assert not model.hf.training and not any(parameter.requires_grad for parameter in model.parameters())
    plain = AutoModelForSequenceClassification.from_pretrained(classifier)
    with torch.no_grad():
        hidden = [plain.base_model(torch.from_numpy(ids)[None].long()).last_hidden_state[0] for ids in samples()]
        expected_N = torch.cat([plain.score(hidden_TH[:-1])[:, 0] for hidden_TH in hidden])
    torch.testing.assert_close(model(packed()), expected_N[:, None], atol=1e-5, rtol=1e-5)


def test_a_reward_model_with_several_outputs(causal: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(causal, num_labels=3)
    plain.save_pretrained(tmp_path)
    model = reward_model(str(tmp_path), ModelConfig(path=causal), torch.float32, 3).load()
    with torch.no_grad():
        hidden = [plain.base_model(torch.from_numpy(ids)[None].long()).last_hidden_state[0] for ids in samples()]
        expected_NK = torch.cat([plain.score(hidden_TH[:-1]) for hidden_TH in hidden])
    torch.testing.assert_close(model(packed()), expected_NK, atol=1e-5, rtol=1e-5)


def test_a_new_reward_model_names_its_outputs(causal: str) -> None:
    model = trained_reward_model(ModelConfig(path=causal), ["helpful", "correct"]).load()
    assert model(packed()).shape == (sum(LENGTHS) - len(LENGTHS), 2)
    assert model.hf.config.id2label == {0: "helpful", 1: "correct"}
    assert trained_reward_model(ModelConfig(path=causal), []).load().hf.config.num_labels == 1


def test_a_reward_model_in_half_precision_gives_float32(causal: str, classifier: str) -> None:
    model = reward_model(classifier, ModelConfig(path=causal), torch.bfloat16).load()
    assert model.hf.model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32
    assert model(packed()).dtype == torch.float32


def test_a_reward_model_needs_a_trained_head(causal: str) -> None:
    with pytest.raises(
        UserError, match=r"^reward\.model .* has no trained head 'score': it is not a sequence classifier$"
    ):
        reward_model(causal, ModelConfig(path=causal), torch.float32).load()


def test_no_model_there(causal: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^critic\.path: no model could be loaded"):
        critic(str(tmp_path), ModelConfig(path=causal)).load()
