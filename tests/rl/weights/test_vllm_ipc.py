"""Handles of shared GPU memory between ranks: JSON, and nothing that a pickle could name."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from hpc_rl.rl.weights.vllm_ipc import as_json, from_json

HANDLE = (
    *(torch.Tensor, torch.Size([1000]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 3, b"\x00handle", 1024, 512),
    *(False, b"counter\xff", 7, b"event", True),
)
"""What torch.multiprocessing.reductions.reduce_tensor returns for vLLM's buffer."""


def test_a_handle_arrives_as_it_was() -> None:
    found = from_json(json.loads(json.dumps(as_json(HANDLE))))
    assert found == HANDLE
    assert isinstance(found, tuple) and hash(found)  # vLLM keeps mapped memory by its handle
    assert from_json(as_json((None, 5))) == (None, 5)


@pytest.mark.parametrize("foreign", [os.system, torch.load, "text", torch.float32, {"a": 1}, 1.5])
def test_anything_else_is_refused(foreign: Any) -> None:
    with pytest.raises(TypeError, match="which hpc-rl does not exchange"):
        as_json((1, (foreign,)))


def test_a_name_that_is_no_type_of_a_buffer_is_refused() -> None:
    with pytest.raises(KeyError, match=r"os\.system"):
        from_json([{"type": "os.system"}])
