"""Engines and their processes. Ray imports these modules by itself, so their large libraries are imported here."""

from hpc_rl.software.imports import large_imports

with large_imports():
    import torch.distributed.fsdp  # noqa: F401
    import transformers.generation.configuration_utils  # noqa: F401
