"""A transformer with a small head: the values of a critic, one per position, or the scores of a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from hpc_rl.config.training.common import ModelConfig, ModelSource
from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import refuse_other_outputs
from hpc_rl.formats.vocabulary import vocabulary_difference
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.models.causal_lm import PackedModel, load_tokenizer, refuse_unsupported_backbone
from hpc_rl.training.models.lora import new_like
from hpc_rl.training.models.pretrained import Pretrained, weight_files

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
        """Return the name of the head in transformers' model."""
        return _HEAD

    def float32_modules(self) -> list[nn.Module]:
        """Return the head."""
        return [self.head]

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return the head's output at `batch.rows_N`: [N], float32."""
        return self.outputs(batch)[:, 0].clone()  # FSDP warns of views

    def outputs(self, batch: PackedBatch) -> torch.Tensor:
        """Return the head's K outputs at the positions of a whole row, `batch.rows_N`: [N, K], float32."""
        own = self.sequence.own(batch)
        return self.sequence.whole(self.head(self.hidden(own)[own.rows_N].float()), batch)


class ScoreModel(ScalarModel):
    """A sequence classifier with one or several outputs."""

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return the head's K outputs at `batch.rows_N`: [N, K], float32."""
        return self.outputs(batch)


Kind = TypeVar("Kind", bound=ScalarModel)
Wrap = Callable[["PreTrainedModel", frozenset[str]], Kind]
"""Turns a module into a model; see `Pretrained.wrap`."""


def critic(path: str, config: ModelConfig) -> Pretrained[ScalarModel]:
    """Return a critic to be loaded.

    Without a trained head the values are 0. This is a better start than random values: the first advantages are then
    the returns themselves.
    """
    # The adapters to continue from are the policy's.
    key, own = "critic.path", config.updated("lora", new_like(config.lora))
    return _classifier(path, key, own, getattr(torch, config.dtype), _trained(ScalarModel, key, path, own))


def trained_reward_model(config: ModelConfig, labels: Sequence[str]) -> Pretrained[ScoreModel]:
    """Return a reward model to be loaded and trained: from a causal language model, or from an earlier reward model.
    Without a trained head its outputs are 0.

    Args:
        labels: names of the outputs; empty for one output without a name.
    """
    dtype = getattr(torch, config.dtype)
    wrap = _trained(ScoreModel, "model.path", config.path, config)
    return _classifier(config.path, "model.path", config, dtype, wrap, max(1, len(labels)), labels)


def reward_model(path: str, config: ModelSource, dtype: torch.dtype, outputs: int = 1) -> Pretrained[ScoreModel]:
    """Return a trained reward model to be loaded, without gradients. It needs a trained head with so many outputs."""

    def wrap(hf: PreTrainedModel, missing: frozenset[str]) -> ScoreModel:
        _refuse_unsupported(hf, "reward.model", path)
        if any(name.startswith(_HEAD) for name in missing):
            raise UserError(f"reward.model {path} has no trained head {_HEAD!r}: it is not a sequence classifier")
        hf.eval().requires_grad_(False)
        return ScoreModel(hf)

    return _classifier(path, "reward.model", config, dtype, wrap, outputs)


def check_outputs(key: str, path: str, needed: int) -> None:
    """Raise UserError if a classifier has another number of outputs than is needed, as far as its files show it.

    Args:
        key: the option that names `path`, for the error.
    """
    with suppress(OSError, ValueError):  # loading the model explains it
        refuse_other_outputs(key, path, weight_files(path) or (), needed)


def refuse_other_vocabulary(key: str, path: str, policy: ModelSource) -> None:
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


def _trained(
    kind: type[Kind], key: str, path: str, config: ModelConfig
) -> Callable[[PreTrainedModel, frozenset[str]], Kind]:
    """Return what turns a module into a model that is trained."""

    def wrap(hf: PreTrainedModel, _missing: frozenset[str]) -> Kind:
        _refuse_unsupported(hf, key, path)
        model = kind(hf)
        model.prepare_training(config)
        return model

    return wrap


def _classifier(
    path: str,
    key: str,
    config: ModelSource,
    dtype: torch.dtype,
    wrap: Wrap[Kind],
    outputs: int = 1,
    labels: Sequence[str] = (),
) -> Pretrained[Kind]:
    settings: dict[str, object] = {"num_labels": outputs}
    if len(labels) > 1:
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {label: number for number, label in enumerate(labels)}
    auto, remote = "AutoModelForSequenceClassification", config.trust_remote_code
    return Pretrained(auto, path, key, dtype, remote, wrap, settings=settings, new_head=_HEAD)


def _refuse_unsupported(hf: PreTrainedModel, key: str, path: str) -> None:
    refuse_unsupported_backbone(hf, key, path)
    if not hasattr(hf, _HEAD):
        raise UserError(f"{key} {path}: models of type {hf.config.model_type} have no head {_HEAD!r}")
