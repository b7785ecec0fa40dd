"""Two ranks, of which one may be unable to compile; test_compiled_layers.py starts this."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._dynamo.backends.common import aot_autograd

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.training.models import compiled
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import causal_lm
from hpc_rl.training.models.lm_head import cross_entropy_sum
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel import distributed, sharding


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError("no compiler on this node")


def run_as_it_is(graph: Any, _inputs: Any) -> Any:
    return graph


def main(folder: str, fails: str) -> None:
    world = distributed.start("cpu", start_timeout_s=300)
    backend: Any = aot_autograd(fw_compiler=run_as_it_is, bw_compiler=refuse) if fails == "backward" else refuse
    can_compile = world.rank == 0 or fails == "nothing"
    torch.compile = functools.partial(torch.compile, backend="aot_eager" if can_compile else backend)
    config, trainer = ModelConfig(path=folder), TrainingConfig()
    with mock.patch.object(compiled, "is_automatic", lambda *_: True):
        model = load_sharded(causal_lm(config), world, trainer)
    batch = pack_samples([np.arange(3, 12), np.arange(3, 20)], [np.arange(9) > 0, np.arange(17) > 0])
    sharding.begin_micro_batch(model, trainer, last=True)
    loss = model(batch, lambda hidden_NH, weight_VH: cross_entropy_sum(hidden_NH, weight_VH, batch.targets_N))
    loss.backward()
    found = sum(layer._compiled_call_impl is not None for layer in model.layers())
    print("found " + json.dumps({"compiled": found, "loss": loss.item()}), flush=True)
    distributed.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
