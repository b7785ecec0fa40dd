"""A transformer that outputs one number per position: the values of a critic, or the score of a reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpc_rl.config.training import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.training import packed_attention
from hpc_rl.training.model import PackedModel, from_pretrained, load_tokenizer, refuse_unsupported_backbone
from hpc_rl.training.packed_batch import PackedBatch

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

    def float32_modules(self) -> list[nn.Module]:
        """See PackedModel.float32_modules."""
        return [self.head]

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return the head's output at `batch.rows_N`: [N], float32."""
        values_N1: torch.Tensor = self.head(self.hidden(batch)[batch.rows_N].float())
        return values_N1[:, 0].clone()  # FSDP warns of views


def load_critic(path: str, config: ModelConfig) -> ScalarModel:
    """Load a critic from a causal language model, with initial values of 0, or from an earlier critic or reward model.

    Raises:
        UserError: no model can be loaded, or packed training cannot compute it correctly.
    """
    hf, missing = _load(path, "critic.path", config, getattr(torch, config.dtype))
    if missing:
        # Values of 0 are a better start than random values: the first advantages are then the returns themselves.
        torch.nn.init.zeros_(getattr(hf, _HEAD).weight)
    model = ScalarModel(hf)
    model.prepare_training(config)
    return model


def load_reward_model(path: str, config: ModelConfig, dtype: torch.dtype) -> ScalarModel:
    """Load a trained reward model, without gradients.

    Raises:
        UserError: no model can be loaded, or it has no trained head with one output.
    """
    hf, missing = _load(path, "reward.model", config, dtype)
    if missing:
        raise UserError(f"reward.model {path} has no trained head {_HEAD!r}: it is not a sequence classifier")
    hf.eval().requires_grad_(False)
    return ScalarModel(hf)


def refuse_other_vocabulary(key: str, path: str, policy: ModelConfig) -> None:
    """Raise UserError if a model would read the policy's token ids as other tokens.

    Args:
        key: the option that names `path`, for the error.
    """
    theirs = load_tokenizer(policy.model_copy(update={"path": path, "tokenizer_path": None})).get_vocab()
    ours = load_tokenizer(policy).get_vocab()
    if theirs != ours:
        different = sum(theirs.get(token) != number for token, number in ours.items())
        raise UserError(
            f"{key} {path} and model.path {policy.path} have different vocabularies: {different:,} of {len(ours):,} "
            "tokens differ; choose a model of the same family"
        )


def _load(path: str, key: str, config: ModelConfig, dtype: torch.dtype) -> tuple[Any, bool]:
    """Return the model, and whether its head was initialised instead of loaded."""
    from transformers import AutoModelForSequenceClassification

    packed_attention.register()
    hf, info = from_pretrained(
        AutoModelForSequenceClassification,
        path,
        "model",
        key,
        trust_remote_code=config.trust_remote_code,
        num_labels=1,
        dtype=dtype,
        attn_implementation=packed_attention.ATTENTION,
        output_loading_info=True,
    )
    refuse_unsupported_backbone(hf)
    if not hasattr(hf, _HEAD):
        raise UserError(f"{key} {path}: models of type {hf.config.model_type} have no head {_HEAD!r}")
    return hf, any(name.startswith(_HEAD) for name in info["missing_keys"])
