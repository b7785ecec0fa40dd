"""Options of training on preferences: `submit dpo` and `submit rm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from hpc_rl.config.base import Path, Section
from hpc_rl.config.training.finetune import FinetuneConfig, FinetuneDataConfig

NEEDS_NO_REFERENCE = ("simpo", "orpo")
"""Losses that use the policy's own log-probabilities only."""
_SMOOTHED = ("sigmoid", "robust")
_OF_ONE_LOSS = {"gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
"""Option -> the only loss that uses it."""


class PreferenceDataConfig(FinetuneDataConfig):
    max_length: int = Field(1024, ge=2)
    """Longest sample (prompt and one response), in tokens. Pairs with a longer sample are left out, and counted in the
    log."""
    train_batch_size: int = Field(64, ge=1)
    """Pairs per optimizer step, over all ranks; with label_key, responses."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or chat messages. Not needed if chosen and rejected are whole chats."""
    chosen_key: str = "chosen"
    """Column with the better response: text, messages, or a whole chat."""
    rejected_key: str = "rejected"
    """Column with the worse response, in the same form."""
    label_key: str | None = None
    """Column with a label. If set, a row has one response (response_key) with a label. null: a row has a pair."""
    response_key: str = "response"
    """Column with the response of a row with a label: text, messages, or a whole chat."""

    @property
    def labels(self) -> list[str]:
        """The columns with the labels of a response; empty if the rows are pairs."""
        return [] if self.label_key is None else [self.label_key]

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        responses = [self.response_key, *self.labels] if self.labels else [self.chosen_key, self.rejected_key]
        return [self.prompt_key, *responses]

    @property
    def longest(self) -> int:
        """The largest number of tokens that cannot be split among micro-batches."""
        return 2 * self.max_length

    def problems(self) -> Iterator[str]:
        if self.chosen_key == self.rejected_key:
            yield f"chosen_key and rejected_key are both {self.chosen_key!r}: name two columns"
        elif self.chosen_key == "rejected" or self.rejected_key == "chosen":
            yield (
                f"chosen_key={self.chosen_key} and rejected_key={self.rejected_key} are swapped: the model would learn "
                "the worse responses; rename the columns of the data if that is intended"
            )
        if not self.labels and self._is_changed("response_key"):
            yield (
                f"response_key={self.response_key} has no effect on pairs: set label_key, or use chosen_key and "
                "rejected_key"
            )


class RefConfig(Section):
    path: Path | None = None
    """Folder or hub name of the reference. null: model.path, the policy before training."""
    precompute_logprobs: bool = True
    """Compute the reference's log-probabilities once, before training, and store them in the run directory. false: keep
    the reference in memory and compute them in each step."""


class PreferenceLossConfig(Section):
    loss: Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo", "kto"] = "sigmoid"
    """Loss: sigmoid (DPO), robust, ipo, hinge (SLiC), simpo and orpo (without a reference), or kto (labels instead of
    pairs)."""
    beta: float = Field(0.1, gt=0)
    """Strength of the constraint that keeps the policy close to the reference. With simpo, the scale of the rewards
    (2.0 to 2.5 in its paper); with orpo, the weight of the odds ratio."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs whose order is wrong, for sigmoid (conservative DPO) and robust."""
    gamma: float = Field(0.5, ge=0)
    """Margin by which the rewards of a pair should differ at least, for simpo."""
    sft_coeff: float = Field(0.0, ge=0)
    """Weight of the chosen responses' cross-entropy per token, which is added to the loss."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of responses with a true label, for kto."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of responses with a false label, for kto."""

    def problems(self) -> Iterator[str]:
        if self.label_smoothing and self.loss not in _SMOOTHED:
            able = " or ".join(_SMOOTHED)
            yield f"label_smoothing has no effect with loss={self.loss}: use loss={able}, or remove it"
        for name, loss in _OF_ONE_LOSS.items():
            if self.loss != loss and self._is_changed(name):
                yield f"{name} has no effect with loss={self.loss}: use loss={loss}, or remove it"


class DpoConfig(FinetuneConfig):
    data: PreferenceDataConfig
    algorithm: PreferenceLossConfig = PreferenceLossConfig()
    ref: RefConfig = RefConfig()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        loss = self.algorithm.loss
        if loss == "kto" and self.data.label_key is None:
            yield "algorithm.loss=kto learns from single responses with labels: set data.label_key=label"
        if loss != "kto" and self.data.label_key is not None:
            yield (
                f"data.label_key={self.data.label_key} means single responses with labels, but algorithm.loss={loss} "
                "needs pairs: remove it, or set algorithm.loss=kto"
            )
        if self.ref.path is not None and loss in NEEDS_NO_REFERENCE:
            yield f"ref.path {self.ref.path}: algorithm.loss={loss} uses no reference; remove it"
        if not self.ref.precompute_logprobs and loss in NEEDS_NO_REFERENCE:
            yield f"ref.precompute_logprobs=false has no effect: algorithm.loss={loss} uses no reference; remove it"
        if self.data.stream_rows and self.ref.precompute_logprobs and loss not in NEEDS_NO_REFERENCE:
            yield (
                f"data.stream_rows={self.data.stream_rows} reads rows while the run trains, and "
                "ref.precompute_logprobs=true needs all of them before: set ref.precompute_logprobs=false"
            )
        if self.model.lora.dropout:
            yield "model.lora.dropout: the policy has no dropout in DPO, because the reference has none; remove it"


class RewardDataConfig(PreferenceDataConfig):
    margin_key: str | None = None
    """Column with the margin by which the scores of a pair should differ at least. null: no margin."""
    label_keys: list[Annotated[str, Field(min_length=1)]] = []
    """Columns with several numbers for each response, such as [helpful,correct], instead of label_key. The model has
    one output for each, in this order."""

    @property
    def labels(self) -> list[str]:
        """The columns with the labels of a response; empty if the rows are pairs."""
        return self.label_keys or super().labels

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [*super().columns, *([self.margin_key] if self.margin_key is not None else [])]

    @property
    def longest(self) -> int:
        """The largest number of tokens that cannot be split among micro-batches."""
        return self.max_length if self.labels else super().longest

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        names = self.label_keys
        if names and self.label_key is not None:
            yield f"label_key={self.label_key} and label_keys=[{','.join(names)}]: set one of them"
        if len(names) == 1:
            yield f"label_keys has one column, {names[0]}: name at least two, or set label_key={names[0]}"
        if len({*names}) < len(names):
            yield f"label_keys [{', '.join(names)}] has a name twice: name each column once"
        if self.labels and self.margin_key is not None:
            key = "label_keys" if names else "label_key"
            yield f"{key} means single responses, but margin_key belongs to pairs: remove one of them"


class RmConfig(FinetuneConfig):
    data: RewardDataConfig

    @property
    def outputs(self) -> int:
        """Outputs of the model: one for each label, or one score for pairs."""
        return max(1, len(self.data.labels))
