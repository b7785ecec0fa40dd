"""A transformer that outputs one number per position: the values of a critic, or the score of a reward model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from hpc_rl.config.training import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.host.vocabulary import vocabulary_difference
from hpc_rl.training.models.causal_lm import PackedModel, load_tokenizer, refuse_unsupported_backbone
from hpc_rl.training.models.lora import new_like
from hpc_rl.training.models.packed_batch import PackedBatch
from hpc_rl.training.models.pretrained import Pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD = "score"
"""Name of the linear head in transformers' sequence classifiers based on decoder models."""


class ScalarModel(PackedModel):
    """A sequence classifier with one output, computed at all positions that a batch requests.

    The head is float32, because bfloat16 distinguishes fewer than 400 values between 1 and 4.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__(hf)
        weight = self.head.weight
        weight.data = weight.data.float()

    @property
    def head(self) -> nn.Module:
        """The linear layer that computes the output."""
        head: nn.Module = getattr(self.hf, _HEAD)
        return head

    def head_name(self) -> str:
        """See PackedModel.head_name."""
        return _HEAD

    def float32_modules(self) -> list[nn.Module]:
        """See PackedModel.float32_modules."""
        return [self.head]

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return the head's output at `batch.rows_N`: [N], float32."""
        values_N1: torch.Tensor = self.head(self.hidden(batch)[batch.rows_N].float())
        return values_N1[:, 0].clone()  # FSDP warns of views


def critic(path: str, config: ModelConfig) -> Pretrained[ScalarModel]:
    """Return a critic to be loaded.

    Without a trained head the values are 0. This is a better start than random values: the first advantages are then
    the returns themselves.
    """
    # The adapters to continue from are the policy's.
    return trained_scalar_model(path, "critic.path", config.updated("lora", new_like(config.lora)))


def trained_scalar_model(path: str, key: str, config: ModelConfig) -> Pretrained[ScalarModel]:
    """Return a model to be loaded and trained: from a causal language model, or from an earlier critic or reward model.
    Without a trained head its outputs are 0.

    Args:
        key: the option that names `path`, for errors.
    """

    def wrap(hf: PreTrainedModel, _missing: frozenset[str]) -> ScalarModel:
        _refuse_unsupported(hf, key, path)
        model = ScalarModel(hf)
        model.prepare_training(config)
        return model

    return _classifier(path, key, config, getattr(torch, config.dtype), wrap, new_head=_HEAD)


def reward_model(path: str, config: ModelConfig, dtype: torch.dtype) -> Pretrained[ScalarModel]:
    """Return a trained reward model to be loaded, without gradients. It needs a trained head with one output."""

    def wrap(hf: PreTrainedModel, missing: frozenset[str]) -> ScalarModel:
        _refuse_unsupported(hf, "reward.model", path)
        if any(name.startswith(_HEAD) for name in missing):
            raise UserError(f"reward.model {path} has no trained head {_HEAD!r}: it is not a sequence classifier")
        hf.eval().requires_grad_(False)
        return ScalarModel(hf)

    return _classifier(path, "reward.model", config, dtype, wrap)


def refuse_other_vocabulary(key: str, path: str, policy: ModelConfig) -> None:
    """Raise UserError if a model would read the policy's token ids as other tokens.

    Args:
        key: the option that names `path`, for the error.
    """
    theirs = load_tokenizer(policy.model_copy(update={"path": path, "tokenizer_path": None})).get_vocab()
    ours = load_tokenizer(policy).get_vocab()
    if (found := vocabulary_difference(theirs, ours)) is not None:
        raise UserError(
            f"{key} {path} and model.path {policy.path} have different vocabularies: {found}; choose a model of the "
            "same family"
        )


def _classifier(
    path: str,
    key: str,
    config: ModelConfig,
    dtype: torch.dtype,
    wrap: Callable[[PreTrainedModel, frozenset[str]], ScalarModel],
    new_head: str = "",
) -> Pretrained[ScalarModel]:
    auto, remote, one_output = "AutoModelForSequenceClassification", config.trust_remote_code, {"num_labels": 1}
    return Pretrained(auto, path, key, dtype, remote, wrap, settings=one_output, new_head=new_head)


def _refuse_unsupported(hf: PreTrainedModel, key: str, path: str) -> None:
    refuse_unsupported_backbone(hf)
    if not hasattr(hf, _HEAD):
        raise UserError(f"{key} {path}: models of type {hf.config.model_type} have no head {_HEAD!r}")
