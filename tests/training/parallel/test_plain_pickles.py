"""What torch may unpickle that came from another rank."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import WriteItemType

from hpc_rl.errors import UserError
from hpc_rl.training.parallel import distributed, plain_pickles
from tests.finetune.jobs import spawn


class Taken:
    """Its pickle takes an attribute of an object, as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return getattr, (self.owner, self.name)


class Program:
    """Its pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_unpickler", distributed_c10d._unpickler)
    plain_pickles.require()


def received(pickled: bytes) -> object:
    """Return what torch makes of the bytes that another rank sent."""
    tensor = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    return distributed_c10d._tensor_to_object(tensor, len(pickled), None)


@pytest.mark.usefixtures("required")
def test_a_program_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir, which hpc-rl does not admit"):
        received(pickle.dumps(Program(tmp_path / "created")))
    assert not (tmp_path / "created").exists()


@pytest.mark.usefixtures("required")
def test_members_of_enumerations_are_read_and_no_other_attribute() -> None:
    assert received(pickle.dumps(Taken(WriteItemType, "SHARD"))) is WriteItemType.SHARD
    for owner, name in ((WriteItemType, "__class__"), (WriteItemType, "mro"), (torch.Size, "count"), ("text", "join")):
        with pytest.raises(pickle.UnpicklingError, match=r"it takes .* which hpc-rl does not admit"):
            received(pickle.dumps(Taken(owner, name)))


@pytest.mark.usefixtures("required")
@pytest.mark.parametrize(
    "named",
    [
        *(
            "builtins eval",
            "builtins exec",
            "builtins SystemExit",
            "torch load",
            "torch serialization",
        ),
        *("torch.serialization load", "torch.distributed.checkpoint.filesystem os.system", "pathlib os.system"),
        *("torch.distributed.checkpoint.filesystem os", "torch.distributed.checkpoint.planner pickle.loads"),
    ],
)
def test_a_name_outside_the_list_is_refused(named: str) -> None:
    module, name = named.split()
    with pytest.raises(pickle.UnpicklingError, match="does not admit"):
        received(
            b"\x80\x04\x8c"
            + bytes([len(module)])
            + module.encode()
            + b"\x8c"
            + bytes([len(name)])
            + name.encode()
            + b"\x93."
        )


@pytest.mark.usefixtures("required")
@pytest.mark.parametrize(
    "value",
    [
        *({"a": [1, (2.5, None)]}, torch.Size([2, 3]), torch.bfloat16, {1, 2}, ValueError("x"), UserError("x")),
        *(torch.OutOfMemoryError("x"), dist.DistBackendError("x"), dist.DistStoreError("x")),
    ],
)
def test_data_is_admitted(value: object) -> None:
    assert repr(received(pickle.dumps(value))) == repr(value)


def test_ranks_write_and_read_a_checkpoint_and_report_its_errors(tmp_path: Path) -> None:
    for code, out, err in spawn(["-m", "tests.training.parallel.test_plain_pickles", str(tmp_path)], 2):
        assert (code, out.split()[-1:]) == (0, ["done"]), err


def rank(folder: Path) -> None:
    """Part of one rank: torch's checkpoints, and a program from the other rank."""
    world = distributed.start("cpu", start_timeout_s=600)
    assert world.gather([world.rank, "é"]) == [[0, "é"], [1, "é"]]
    assert world.broadcast({"rank": world.rank, "pair": (1, 2)}) == {"rank": 0, "pair": [1, 2]}
    own = {f"rank {world.rank}": torch.arange(4.0) + world.rank, "all": torch.ones(3, dtype=torch.bfloat16)}
    dcp.save(own, checkpoint_id=folder / "good")
    read = {name: torch.zeros_like(value) for name, value in own.items()}
    dcp.load(read, checkpoint_id=folder / "good")
    assert all(torch.equal(read[name], value) for name, value in own.items())
    with pytest.raises(CheckpointException, match=r"No such file|Not a directory"):
        dcp.save(own, checkpoint_id=Path(f"/proc/none-{world.rank}/x"))
    with (
        pytest.raises(CheckpointException, match=r"(?s)\(RANK 1\).*torch\.OutOfMemoryError: 80 GB"),
        (
            mock.patch.object(DefaultLoadPlanner, "create_local_plan", side_effect=torch.OutOfMemoryError("80 GB"))
            if world.rank
            else nullcontext()
        ),
    ):
        dcp.load(read, checkpoint_id=folder / "good")
    with pytest.raises(pickle.UnpicklingError, match="does not admit"):
        dist.all_gather_object([None, None], Program(folder / f"created-by-{world.rank}"))
    world.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["good"]
    distributed.finish()
    print("done")


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
