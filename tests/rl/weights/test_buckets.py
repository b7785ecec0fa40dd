from __future__ import annotations

import pytest
import torch

from hpc_rl.rl.weights.buckets import ALIGNMENT, MemoryFile, Segment, TensorEntry, pack, plan_buckets, unpack


def test_buckets_keep_the_order_and_the_limit() -> None:
    sizes = [100, 3, 250, 40, 1000, 1, 1]
    entries = [TensorEntry(str(index), torch.float32, (size,)) for index, size in enumerate(sizes)]
    buckets = plan_buckets(entries, 1200)
    assert [entry.name for bucket in buckets for entry in bucket] == [entry.name for entry in entries]
    assert [[entry.shape[0] for entry in bucket] for bucket in buckets] == [[100, 3], [250, 40], [1000], [1, 1]]
    for bucket in buckets:
        assert all(entry.offset % ALIGNMENT == 0 for entry in bucket)
        ends = [0, *(entry.offset + entry.nbytes for entry in bucket)]
        assert all(entry.offset >= end for entry, end in zip(bucket, ends, strict=False))
        assert ends[-1] <= 1200 or len(bucket) == 1


def test_unpacking_returns_the_packed_tensors() -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(5, 3).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "large": torch.randn(500),
    }
    buckets = list(pack(tensors.items(), 300))
    assert len(buckets) == 2
    arrived = {name: tensor for bucket in buckets for name, tensor in unpack(bucket)}
    assert list(arrived) == list(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(arrived[name], tensor, rtol=0, atol=0)


def test_a_segment_is_shared_until_its_owner_ends() -> None:
    memory = MemoryFile(256)
    memory.bytes[64:70] = torch.arange(6, dtype=torch.uint8)
    segment = memory.segment(64, 6)
    assert segment.map().tolist() == [0, 1, 2, 3, 4, 5]
    memory.bytes[64] = 9
    assert segment.map()[0] == 9
    with pytest.raises(FileNotFoundError, match="has ended"):
        Segment(segment.path, segment.inode + 1, 64, 6).map()
