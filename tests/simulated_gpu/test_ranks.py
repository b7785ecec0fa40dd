"""The harness itself: ranks that fail, that do not come, and that come in another order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpc_rl.training.parallel.distributed import World
from tests.simulated_gpu.ranks import NotArrived, RankFailed, WrongOrder, run_ranks


def exchange(world: World, factor: int) -> list[float]:
    total = torch.full((2,), float(world.rank * factor), device=world.device)
    stream = torch.cuda.Stream(name="side")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dist.all_reduce(total)
    dist.barrier()
    return [*total.tolist(), world.ranks_per_node, total.device.index]


def test_results_and_records_are_in_the_order_of_ranks() -> None:
    results = run_ranks(exchange, 4, 10, nodes=2, device="cuda")
    assert [rank.value for rank in results] == [[60, 60, 2, 0], [60, 60, 2, 1]] * 2
    for rank in results:
        *_, total, barrier = rank.collectives
        assert (total.name, total.shapes, total.dtype, total.stream) == ("allreduce", ((2,),), "float32", "side")
        assert (barrier.name, barrier.ranks, barrier.stream) == ("barrier", (0, 1, 2, 3), "default")
        assert [tuple(call) for call in rank.calls] == [("wait_stream", "side", "default")]


def fail(world: World) -> None:
    if world.rank == 1:
        raise ValueError("a reason")
    world.barrier()


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)^rank 1: Traceback.*ValueError: a reason"):
        run_ranks(fail, 3)


def leave(world: World) -> None:
    if world.rank != 2:
        dist.all_reduce(torch.ones(3))


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(NotArrived, match=r"rank 2 did not come to .* in which ranks? 0(, 1)? wait: allreduce\(\[3\]"):
        run_ranks(leave, 3)


def wait_elsewhere(world: World) -> None:
    if world.rank == 0:
        dist.recv(torch.ones(1), src=1)
    dist.all_reduce(torch.ones(3))


@pytest.mark.long
def test_a_rank_that_waits_elsewhere_is_named_at_the_deadline() -> None:
    with pytest.raises(NotArrived, match=r"after 15 s, ranks 0, 1 .* rank 0 did not come to .* rank 1 wait"):
        run_ranks(wait_elsewhere, 2, deadline_s=15)


def invert(world: World) -> None:
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[:: -1 if world.rank else 1]:
        dist.all_reduce(torch.ones(2), operation)


def test_another_order_is_an_error() -> None:
    with pytest.raises(WrongOrder, match=r"rank 0 has begun allreduce\(\[2\] float32 SUM\).*and rank 1 .*MAX"):
        run_ranks(invert, 2)


def misunderstand(world: World) -> None:
    if world.rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2, dtype=torch.int32), 0)


def test_a_message_of_another_type_is_an_error() -> None:
    with pytest.raises(WrongOrder, match=r"rank 0 sends send\(\[2\] float32 1\).*rank 1 expects recv\(\[2\] int32 0\)"):
        run_ranks(misunderstand, 2)


def take_turns(world: World) -> None:
    other = dist.new_group()
    works = [
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
        for group in (other, dist.group.WORLD)[:: -1 if world.rank else 1]
    ]
    for work in works:
        work.wait()


def test_another_order_of_two_groups_is_an_error() -> None:
    """gloo does not mind. Two communicators of NCCL may wait for each other."""
    with pytest.raises(
        WrongOrder, match=r"turn \d+: rank 0 has begun allreduce.* in group 1, and rank 1 .* in group 0"
    ):
        run_ranks(take_turns, 2)
