"""Rows that several ranks compute together, compared with one rank; test_sequence_parallel.py starts this."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.finetune.pair_batch import PairBatch, response_logprobs
from hpc_rl.rl.workers.logprobs import token_logprobs_of
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, PackedModel, causal_lm
from hpc_rl.training.models.lm_head import cross_entropy_sum
from hpc_rl.training.models.loading import load_sharded, set_adapters, weights_of
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.models.scalar_model import critic, trained_reward_model
from hpc_rl.training.parallel import distributed, sharding
from hpc_rl.training.parallel.distributed import World

TOLERANCE = 1e-5
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def rows(seed: int = 0) -> list[PackedBatch]:
    """Rows of two micro-batches for two groups: samples on borders of slices, sizes that nothing divides, and none."""
    generator = np.random.default_rng(seed)
    found = []
    for lengths in ([9, 1, 30, 7], [16, 16], [2], []):
        ids = [generator.integers(3, 300, length).astype(np.int32) for length in lengths]
        masks = [(np.arange(length) > 0) & (generator.random(length) < 0.8) for length in lengths]
        found.append(pack_samples(ids, masks) if ids else filler())
    return found


def pretrained(case: dict[str, Any]) -> Pretrained[Any]:
    lora = {"rank": 4} if case.get("lora") else {}
    settings = {"enable_gradient_checkpointing": case.get("recompute", False), "lora": lora}
    config = ModelConfig.model_validate(
        {"path": case["path"], "use_torch_compile": case.get("compile", False), **settings}
    )
    if case["role"] == "critic":
        return critic(case["path"], config)
    if case["role"] == "rm":
        return trained_reward_model(config, ["a", "b"])
    return causal_lm(config)


def results(role: str, model: Any, batch: PackedBatch) -> torch.Tensor:
    """What a role computes of a row, [N] or [N, K]."""
    if role == "critic":
        found: torch.Tensor = model(batch)
    elif role == "rm":
        found = model(batch.last_tokens())
    elif role == "dpo":
        found = _of_pairs(model, batch)
    else:
        found = torch.stack(token_logprobs_of(model, batch, 0.7), dim=1)
    return found


def _of_pairs(model: CausalLM, batch: PackedBatch) -> torch.Tensor:
    samples = len(batch.lengths)
    ends = np.cumsum(batch.lengths)
    sample_N = torch.from_numpy(np.searchsorted(ends, batch.rows, side="right"))
    nothing = torch.zeros(samples, 1)
    return response_logprobs(model, PairBatch(batch, sample_N, nothing, nothing, nothing))


def loss_of(role: str, model: Any, batch: PackedBatch, scale: float) -> torch.Tensor:
    """A loss that depends on all positions together."""
    if role == "sft":
        own = model.sequence.own(batch)
        total = model(own, lambda hidden_NH, weight_VH: cross_entropy_sum(hidden_NH, weight_VH, own.targets_N, scale))
        whole: torch.Tensor = model.sequence.total(total)
        return whole
    found = results(role, model, batch)
    weights = torch.linspace(0.5, 2.0, found.numel()).view_as(found)
    return scale * (torch.nn.functional.softplus((found * weights).sum()) + found.square().sum())


def train(model: PackedModel, role: str, batches: list[PackedBatch], world: World, case: dict[str, Any]) -> list[float]:
    """The losses of some micro-batches, whose gradients are added up."""
    trainer = TrainingConfig.model_validate({"sharding": case.get("sharding", "full")})
    factor = sharding.loss_factor(model, world)
    losses = []
    for number, batch in enumerate(batches):
        sharding.begin_micro_batch(model, trainer, last=number == len(batches) - 1)
        loss = loss_of(role, model, batch, factor)
        loss.backward()
        losses.append(loss.item() / factor)
    return losses


def differences(case: dict[str, Any], world: World) -> Iterator[tuple[str, float]]:
    """The largest difference to one rank of each kind of result; of sums, relative."""
    size, role, source = case["size"], case["role"], pretrained(case)
    trainer = TrainingConfig.model_validate({"sharding": case.get("sharding", "full"), "sequence_parallel": size})
    model = load_sharded(source, world, trainer)
    plain = pretrained({**case, "compile": False}).load()
    set_adapters(plain, trainer.seed)
    for name, weight in weights_of(model.hf).items():
        if name.endswith("sinks"):  # which start at random, close to 0
            whole = torch.linspace(-1, 2, weight.numel())
            weights_of(plain.hf)[name].copy_(whole)
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.copy_(whole if local.shape == weight.shape else _own_rows(weight, whole))
    for one in (model, plain):  # the heads of classifiers start at 0
        if role in ("critic", "rm"):
            head = weights_of(one.hf)["score.weight"]
            whole = torch.linspace(-1, 1, head.numel()).view(head.shape)
            local = head.to_local() if isinstance(head, DTensor) else head
            local.copy_(whole if local.shape == head.shape else _own_rows(head, whole))
    every, groups, group = rows()[: case.get("rows")], world.size // size, world.rank // size
    mine = every[group::groups]
    if role != "sft":
        with torch.no_grad():
            pairs = [(results(role, model, row), results(role, plain, row)) for row in mine]
        sharding.reshard(model)
        yield "results", max(float((ours - theirs).abs().max()) for ours, theirs in pairs if ours.numel())
    ours = train(model, role, mine, world, case)
    theirs = train(plain, role, every, world, case)
    yield "losses", max(abs(a - b) / (1 + abs(b)) for a, b in zip(ours, theirs[group::groups], strict=True))
    if model.routers is not None:
        found, expected = model.routers.take_metrics(world), plain.routers.take_metrics(ALONE)
        assert found.keys() == expected.keys() == {"largest_load", "entropy", "aux_loss"}
        yield "routers", max(abs(found[name] - expected[name]) for name in found)
    gradients = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in gradients)
    for a, b in gradients:
        if a is not None and b is not None:
            assert isinstance(a, DTensor) or world.size == 1
            yield "gradients", float((a.full_tensor() - b).abs().max() / (1 + b.abs().max()))


def _own_rows(head: Any, whole: torch.Tensor) -> torch.Tensor:
    local = head.to_local()
    rank = head.device_mesh.get_local_rank(head.device_mesh.ndim - 1)
    step = -(-len(whole) // head.device_mesh.size(head.device_mesh.ndim - 1))
    return whole[rank * step :][: len(local)]


if __name__ == "__main__":
    torch.compile = functools.partial(torch.compile, fullgraph=True)
    world = distributed.start("cpu", start_timeout_s=600)
    answers = []
    for each in json.loads(sys.argv[1]):
        largest: dict[str, float] = {}
        for name, value in differences(each, world):
            largest[name] = max(value, largest.get(name, 0.0))
        answers.append(largest)
    print("found", json.dumps(answers))
    distributed.finish()
