"""vLLM's weight transfer between separate GPUs: NCCL."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor

import torch

from hpc_rl.rl.weights.base import EngineActors, WeightSender, WeightSource
from hpc_rl.rl.weights.vllm_source import vllm_source
from hpc_rl.training.distributed import World


def open_sender(source: WeightSource, engines: EngineActors, world: World, bucket_bytes: int) -> WeightSender:
    """See `hpc_rl.rl.weights.transfers.Opener`. There are two buffers of `bucket_bytes` on each GPU.

    vLLM's own trainer_init meets the engines in a TCPStore, from which it takes pickles, and which everyone on the
    network can reach. Here NCCL's unique id, which contains a secret number, reaches the engines through Ray.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import (
        NCCLWeightTransferInitInfo,
        uid_init_process_group,
        worker_init_payload,
    )
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    # A tensor that is larger than the buffer would not fit.
    buffer_bytes = max(bucket_bytes, *(entry.nbytes for entry in source.metadata()))
    sender = NCCLTrainerWeightTransferEngine(
        client=engines,
        source=vllm_source(source),
        is_sender=world.is_main,
        packed=True,
        packed_buffer_size_bytes=buffer_bytes,
    )
    if world.is_main:
        ranks = 1 + len(engines.actors) * engines.workers_each
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId())
        info = NCCLWeightTransferInitInfo(
            nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
            rank_offset=1,
            world_size=ranks,
            packed=True,
            packed_buffer_size_bytes=buffer_bytes,
        )
        with ThreadPoolExecutor(1) as thread:  # both sides wait for each other in NCCL
            joined = thread.submit(engines.init_weight_transfer_engine, worker_init_payload(info))
            device = torch.accelerator.current_device_index()
            sender.model_update_group = uid_init_process_group(unique_id, 0, ranks, device)
            joined.result()
    found: WeightSender = sender
    return found
