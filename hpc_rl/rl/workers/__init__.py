"""Training processes of the pools. Ray imports their modules by itself, so their large libraries are imported here."""

from hpc_rl.software.imports import large_imports

with large_imports():
    import tensordict  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401
