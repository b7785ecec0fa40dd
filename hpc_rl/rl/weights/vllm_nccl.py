"""vLLM's weight transfer between separate GPUs: NCCL."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from hpc_rl.errors import RunError
from hpc_rl.rl.weights.base import EngineActors, WeightSender, WeightSource
from hpc_rl.rl.weights.vllm_source import has_iter_full, vllm_source
from hpc_rl.training.parallel.distributed import World


def open_sender(source: WeightSource, engines: EngineActors, world: World, bucket_bytes: int) -> WeightSender:
    """Return this rank's sender; `hpc_rl.rl.weights.transfers.Opener` describes the arguments.

    There are up to two buffers of `bucket_bytes` on each GPU.

    vLLM's own trainer_init meets the engines in a TCPStore, from which it takes pickles, and which everyone on the
    network can reach. Here NCCL's unique id, which contains a secret number, reaches the engines through Ray.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.nccl_common import (
        NCCLWeightTransferInitInfo,
        uid_init_process_group,
        worker_init_payload,
    )
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    # A tensor that is larger than the buffer would not fit.
    buffer_bytes = max(bucket_bytes, *(entry.nbytes for entry in source.metadata()))
    # Each buffer has a stream. Before version 0.33, an engine loads a layer when its last buffer is there, and does not
    # wait for the streams of the others.
    buffers = packed_tensor.DEFAULT_PACKED_NUM_BUFFERS if has_iter_full() else 1
    sender = NCCLTrainerWeightTransferEngine(
        client=engines,
        source=vllm_source(source),
        is_sender=world.is_main,
        packed=True,
        packed_buffer_size_bytes=buffer_bytes,
        packed_num_buffers=buffers,
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
            packed_num_buffers=buffers,
        )
        device = torch.accelerator.current_device_index()
        sender.model_update_group = joined_from_both_sides(
            partial(uid_init_process_group, unique_id, 0, ranks, device),
            partial(engines.init_weight_transfer_engine, worker_init_payload(info)),
            engines.timeout_s,
        )
    found: WeightSender = sender
    return found


def joined_from_both_sides(join: Callable[[], Any], join_engines: Callable[[], None], timeout_s: float) -> Any:
    """Join the engines while they join this process, and return what `join` returns.

    Both sides wait for each other in NCCL, which has no deadline of its own.

    Args:
        join_engines: has a deadline, and raises RunError.

    Raises:
        RunError: the engines do not answer, or NCCL does not connect both sides in time.
    """
    joined: Future[Any] = Future()

    def work() -> None:
        try:
            joined.set_result(join())
        except BaseException as error:  # noqa: BLE001 - raised in the other thread
            joined.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    join_engines()
    try:
        return joined.result(timeout_s)
    except TimeoutError as error:
        raise RunError(
            f"NCCL has not connected the policy's worker with the rollout engines within {timeout_s:.0f} s: set "
            "slurm.interface to the network between their nodes; slurm.env.NCCL_DEBUG=INFO shows which one NCCL uses"
        ) from error
