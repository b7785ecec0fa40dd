"""vLLM's weight transfer between processes that share GPUs: CUDA IPC."""

from __future__ import annotations

from hpc_rl.rl.weights.base import EngineActors, WeightSender, WeightSource
from hpc_rl.rl.weights.vllm_source import vllm_source
from hpc_rl.training.distributed import World


def open_sender(source: WeightSource, engines: EngineActors, world: World, bucket_bytes: int) -> WeightSender:
    """See `hpc_rl.rl.weights.transfers.Opener`. There is one buffer of `bucket_bytes` on each GPU."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    # vLLM refuses a tensor that is larger than the buffer.
    buffer_bytes = max(bucket_bytes, *(entry.nbytes for entry in source.metadata()))
    info = IPCTrainerInitInfo(rank=world.rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
    sender: WeightSender = WeightTransferTrainerFactory.trainer_init(info, client=engines, source=vllm_source(source))
    return sender
