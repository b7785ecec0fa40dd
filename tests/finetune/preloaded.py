"""What processes import before they fork others for training: all that it imports, at once or when it needs it."""

import importlib
import os

from tests.finetune.forked import SETTINGS

os.environ.update(SETTINGS)
for name in (
    "hpc_rl.finetune.trainer",
    "hpc_rl.training.memory_snapshot",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.serialization",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "hydra.core.override_parser.overrides_parser",
    "hydra._internal.core_plugins.basic_launcher",
):
    importlib.import_module(name)
