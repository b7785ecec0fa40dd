"""The supervised objective: the mean cross-entropy of the target tokens of a global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_rl.config.training.sft import SftConfig
from hpc_rl.data.sample_files import CHATS, Samples
from hpc_rl.data.sft_dataset import Sample, chat_tokenizer
from hpc_rl.data.tokenized import Tokenize
from hpc_rl.finetune.base import Found, Objective, Work
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.lm_head import cross_entropy_sum
from hpc_rl.training.models.pretrained import Pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Sft(Objective):
    """Learn the assistant's tokens of chats."""

    config: SftConfig

    form: Samples[Sample] = CHATS

    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Tokenize:
        """Return the function that tokenizes chats."""
        return chat_tokenizer(self.untemplated_data, tokenizer)

    def model(self) -> Pretrained[CausalLM]:
        """Return the policy."""
        return causal_lm(self.config.model)

    def collate(self, items: Sequence[Sample]) -> PackedBatch:
        """Build a micro-batch; the filler if a rank has no samples left."""
        if not items:
            return filler()
        return pack_samples([sample.input_ids for sample in items], [sample.loss_mask for sample in items])

    def loss(self, model: CausalLM, batch: PackedBatch, scale: float) -> Found:
        """Return `scale` times the summed cross-entropy of a micro-batch's targets, in nats."""
        own = model.sequence.own(batch)
        cap = model.softcap
        total = model(own, lambda hidden_NH, head_VH: cross_entropy_sum(hidden_NH, head_VH, own.targets_N, scale, cap))
        total = model.sequence.total(total)
        return Found(total, total.new_zeros(0))

    def divisor(self, work: Work) -> float:
        """Return the target tokens of the whole global batch, not of a micro-batch."""
        return work.targets
