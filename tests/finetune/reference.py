"""Supervised fine-tuning in the plainest PyTorch: one padded batch, full logits, no package of ours but the data's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpc_rl.config.training.sft import SftConfig
from hpc_rl.data.order import epoch_order
from hpc_rl.data.reading.sources import all_rows
from hpc_rl.data.sft_dataset import Sample, chat_tokenizer


@dataclass(frozen=True)
class Reference:
    """What a run should measure."""

    losses: list[float]
    """Training loss of every step."""
    norms: list[float]
    """Norm of the gradient of every step, before clipping."""
    val_loss: float
    """At the end."""


def reference_run(config: SftConfig) -> Reference:
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="eager").train()
    train, val = (
        [sample for sample in chat_tokenizer(config.data, tokenizer)(all_rows(files, split))[0] if sample]
        for files, split in ((config.data.train_files, "train"), (config.data.val_files, "test"))
    )
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
    )
    size = config.data.train_batch_size
    batches = [
        [train[index] for index in order[start : start + size]]
        for order in (epoch_order(len(train), config.trainer.seed, e, True) for e in range(config.trainer.total_epochs))
        for start in range(0, len(train), size)
    ]
    warmup, losses, norms = math.ceil(config.optim.warmup_ratio * len(batches)), [], []
    for number, batch in enumerate(batches):
        loss = mean_loss(model, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_grad).item())
        rising = (number + 1) / (warmup + 1)
        falling = 0.5 * (1 + math.cos(math.pi * (number - warmup) / max(1, len(batches) - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * (rising if number < warmup else falling)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return Reference(losses, norms, mean_loss(model, val).item())


def mean_loss(model: torch.nn.Module, samples: list[Sample]) -> torch.Tensor:
    longest = max(len(sample.input_ids) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, attention = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        tokens = torch.from_numpy(sample.input_ids).long()
        ids[row, :length], attention[row, :length] = tokens, 1
        labels[row, :length] = torch.where(torch.from_numpy(sample.loss_mask), tokens, -100)
    logits = model(input_ids=ids, attention_mask=attention).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
