"""The largest memory of a rank that loads a model; test_loading_memory.py starts one process for each rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.training.models import loading
from hpc_rl.training.models.causal_lm import causal_lm, load_model
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel import distributed

if __name__ == "__main__":
    world = distributed.start("cpu", start_timeout_s=600)
    config = ModelConfig(path=sys.argv[1])
    loading.check_packing = lambda *_: None  # a forward pass needs the memory of a training step
    model = load_sharded(causal_lm(config), world, TrainingConfig())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = 1024 * int(status["VmHWM"].split()[0])
    same = True
    for ours, whole in zip(model.parameters(), load_model(config).parameters(), strict=True):
        assert isinstance(ours, DTensor)
        first = ours.__create_chunk_list__()[0].offsets[0]
        mine = ours.to_local()
        same &= torch.equal(mine, whole[first : first + len(mine)])
    print("found", json.dumps({"peak": peak, "same": same}))
    distributed.finish()
