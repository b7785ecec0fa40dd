"""What the server of `forked` imports before it forks: all that training imports, at once or when it needs it."""

import importlib
import os

from tests.finetune.forked import SETTINGS

os.environ.update(SETTINGS)
for name in (
    "hpc_rl.finetune.trainer",
    "hpc_rl.training.memory_snapshot",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(name)
