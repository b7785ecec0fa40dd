"""vLLM's weight transfer between processes that share GPUs: CUDA IPC."""

from __future__ import annotations

from typing import Any

import torch

from hpc_rl.rl.weights.base import EngineActors, WeightSender, WeightSource
from hpc_rl.rl.weights.vllm_source import vllm_source
from hpc_rl.training.parallel.distributed import World

_TYPES = {"Tensor": torch.Tensor, "TypedStorage": torch.storage.TypedStorage, "uint8": torch.uint8}
"""What a handle names: the types of vLLM's buffer."""


def open_sender(source: WeightSource, engines: EngineActors, world: World, bucket_bytes: int) -> WeightSender:
    """Return this rank's sender; `hpc_rl.rl.weights.transfers.Opener` describes the arguments.

    There is one buffer of `bucket_bytes` on each GPU.

    vLLM's own sender exchanges the ranks' handles as pickles. Here they travel as JSON.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    class Sender(IPCTrainerWeightTransferEngine):
        def _all_gather_and_merge_handles(self, handles: list[dict[str, Any]]) -> list[dict[str, Any]]:
            """Return the handles of all ranks: for each buffer, GPU -> arguments of rebuild_cuda_tensor."""
            plain = [{gpu: as_json(handle) for gpu, handle in one.items()} for one in handles]
            merged: list[dict[str, Any]] = [{} for _ in handles]
            for rank in world.gather(plain):
                for into, one in zip(merged, rank, strict=True):
                    into.update({gpu: from_json(handle) for gpu, handle in one.items()})
            return merged

    # vLLM refuses a tensor that is larger than the buffer.
    buffer_bytes = max(bucket_bytes, *(entry.nbytes for entry in source.metadata()))
    info = IPCTrainerInitInfo(rank=world.rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
    sender: WeightSender = Sender.trainer_init(info, client=engines, source=vllm_source(source))
    return sender


def as_json(handle: Any) -> Any:
    """Return a handle of a buffer, as `reduce_tensor` describes a CUDA tensor, in the types of JSON.

    Raises:
        TypeError: it contains something else than numbers, bytes and the types of a buffer.
    """
    if isinstance(handle, tuple):
        return [as_json(part) for part in handle]
    if handle is None or isinstance(handle, bool | int):
        return handle
    if isinstance(handle, bytes):
        return {"bytes": handle.hex()}
    for name, known in _TYPES.items():
        if handle is known:
            return {"type": name}
    raise TypeError(f"a handle of shared GPU memory contains {handle!r}, which hpc-rl does not exchange")


def from_json(handle: Any) -> Any:
    """Return the handle that `as_json` has described.

    Raises:
        KeyError: it names a type that is not one of a buffer.
    """
    if isinstance(handle, list):
        return tuple(from_json(part) for part in handle)
    if isinstance(handle, dict):
        return bytes.fromhex(handle["bytes"]) if "bytes" in handle else _TYPES[handle["type"]]
    return handle
