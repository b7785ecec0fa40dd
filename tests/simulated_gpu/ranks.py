"""Several real processes, each with a pretended GPU: what only two, three or eight ranks do, runs.

    results = run_ranks(function, 8, *arguments, nodes=2)    # function(world, *arguments) on each of 8 ranks
    results[3].value                                         # what it has returned on rank 3
    results[3].collectives                                   # in order: name, group, ranks, shapes, dtype, stream
    results[3].calls                                         # of streams and events

The ranks meet and exchange as in a job (`hpc_rl.training.parallel.distributed`), over gloo. Their collectives, streams
and events are written down (`groups.py`, `streams.py`, `record.py`); code that has a communicator of another library
calls `record.note_collective` in its stand-in. While they run, this process compares their records. It ends all of them
and raises

- `RankFailed` with the traceback of the first rank that raises or ends,
- `WrongOrder` as soon as two ranks of a group begin different collectives (name, shape, dtype, root or operation),
- `NotArrived` if the others wait for a rank that has returned, or at the deadline: which ranks, and for what.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from hpc_rl.run_dir import ENV_GROUP_DIR
from hpc_rl.system.processes import die_with_parent
from tests.simulated_gpu.process import call_in, compiled
from tests.simulated_gpu.record import PAIRWISE, Call, Collective, open_record, parsed

LOOK_EVERY_S = 0.2
"""How often the records of running ranks are compared."""


class RanksError(AssertionError):
    """What went wrong with ranks."""


class RankFailed(RanksError):
    """A rank has raised an exception, or has ended."""


class WrongOrder(RanksError):
    """Two ranks of a group have begun different collectives."""


class NotArrived(RanksError):
    """Ranks wait for others that do not come."""


@dataclass(frozen=True)
class Rank:
    """What one rank has returned and done."""

    value: Any
    record: list[Collective | Call]

    @property
    def collectives(self) -> list[Collective]:
        """Its collectives, in the order in which they began."""
        return [row for row in self.record if isinstance(row, Collective)]

    @property
    def calls(self) -> list[Call]:
        """Its calls of streams and events."""
        return [row for row in self.record if isinstance(row, Call)]


@dataclass(frozen=True)
class Beside:
    """Processes that belong to the job, but not to its process group. They have the numbers after its ranks."""

    function: Callable[..., Any]
    """A module's function, called with the number and the arguments."""
    count: int


def run_ranks(
    function: Callable[..., Any],
    count: int,
    *arguments: Any,
    nodes: int = 1,
    device: str = "cpu",
    beside: Beside | None = None,
    deadline_s: float = 1500,
) -> list[Rank]:
    """Call `function(world, *arguments)` in `count` processes, and return what each of them has returned and done.

    Args:
        function: a module's function. Arguments and results are pickled.
        nodes: pretended nodes, with equal numbers of ranks.
        device: of the ranks. Tensors on `cuda` have real numbers too (kernels.cpp).
        beside: further processes, which come after the ranks in the result.

    Raises:
        RankFailed, WrongOrder, NotArrived: see above. No process is left.
    """
    assert count % nodes == 0, "nodes have equal numbers of ranks"
    layout = Layout(count, count // nodes, device, beside, deadline_s)
    done = call_in("ranks", _run, function, arguments, layout, compiled("kernels.cpp"))
    if isinstance(done, RanksError):
        raise done
    return done


def check_same_order(records: Sequence[Sequence[Collective | Call]]) -> None:
    """Compare the collectives of all ranks, group by group, and the messages of each pair of ranks. `run_ranks` does
    this while they run.

    Args:
        records: by rank. One that is shorter is compared as far as it goes.

    Raises:
        WrongOrder: two ranks of a group have begun different collectives.
    """
    for group, rows in _by_group(records).items():
        lists = [(rank, [row for row in found if row.name not in PAIRWISE]) for rank, found in rows.items()]
        leader, longest = max(lists, key=lambda one: len(one[1]))
        for rank, found in lists:
            for number, (own, expected) in enumerate(zip(found, longest, strict=False)):
                if own.in_common != expected.in_common:
                    raise WrongOrder(
                        f"collective {number} of group {group} ({_ranks(own.ranks)}): rank {leader} has begun "
                        f"{expected}, and rank {rank} {own}"
                    )
        for (source, target), (sent, received) in _messages(rows).items():
            for number, (one, other) in enumerate(zip(sent, received, strict=False)):
                if (one.shapes, one.dtype) != (other.shapes, other.dtype):
                    raise WrongOrder(
                        f"message {number} of group {group}: rank {source} sends {one}, rank {target} expects {other}"
                    )


def check_same_turns(records: Sequence[Sequence[Collective | Call]]) -> None:
    """Compare in what order two ranks that are in several groups take turns with them: otherwise, one rank may wait in
    one group for the other rank, which waits in another group. `run_ranks` does this at the end.

    Args:
        records: by rank.

    Raises:
        WrongOrder: two ranks have begun collectives of their common groups in different orders in one thread.
    """
    for first, second in combinations(range(len(records)), 2):
        turns = [_turns(records[rank], {first, second}) for rank in (first, second)]
        for thread in turns[0].keys() & turns[1].keys():
            for number, (one, other) in enumerate(zip(turns[0][thread], turns[1][thread], strict=False)):
                if one.group != other.group:
                    raise WrongOrder(
                        f"turn {number}: rank {first} has begun {one} in group {one.group}, and rank {second} {other} "
                        f"in group {other.group}"
                    )


def _turns(rows: Sequence[Collective | Call], both: set[int]) -> dict[str, list[Collective]]:
    """Return the collectives of groups that have two ranks, by thread."""
    found: dict[str, list[Collective]] = defaultdict(list)
    for row in rows:
        if isinstance(row, Collective) and row.name not in PAIRWISE and both <= set(row.ranks):
            found[row.thread].append(row)
    return found


def missing_ranks(records: Sequence[Sequence[Collective | Call]], among: set[int] | None = None) -> str | None:
    """Return which ranks the others wait for, as text; None if no group waits.

    Args:
        records: by rank.
        among: only these ranks count as missing. None: all.
    """
    lines = []
    for group, rows in _by_group(records).items():
        members = next(found[0].ranks for found in rows.values() if found)
        counts = {
            rank: sum(row.name not in PAIRWISE for row in rows.get(rank, [])) for rank in members if rank < len(records)
        }
        most, fewest = max(counts.values()), min(counts.values())
        late = [rank for rank, number in counts.items() if number < most and (among is None or rank in among)]
        if not late:
            continue
        there = [rank for rank, number in counts.items() if number > fewest]
        collectives = [row for row in rows[there[0]] if row.name not in PAIRWISE]
        lines.append(
            f"{_ranks(late)} did not come to collective {fewest} of group {group} ({_ranks(members)}), in which "
            f"{_ranks(there)} wait: {collectives[fewest]}"
        )
    return "; ".join(lines) or None


def _by_group(records: Sequence[Sequence[Collective | Call]]) -> dict[str, dict[int, list[Collective]]]:
    groups: dict[str, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, rows in enumerate(records):
        for row in rows:
            if isinstance(row, Collective):
                groups[row.group][rank].append(row)
    return groups


def _messages(rows: Mapping[int, Sequence[Collective]]) -> dict[tuple[int, int], tuple[list[Collective], ...]]:
    """Return what was sent from one rank to another, and what the other one received, by the pair."""
    found: dict[tuple[int, int], tuple[list[Collective], ...]] = defaultdict(lambda: ([], []))
    for rank, own in rows.items():
        for row in own:
            if row.name == "send":
                found[rank, int(row.detail)][0].append(row)
            elif row.name == "recv":
                found[int(row.detail), rank][1].append(row)
    return found


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, and where."""

    count: int
    on_node: int
    device: str
    beside: Beside | None
    deadline_s: float

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.count + (0 if self.beside is None else self.beside.count)


class _Process:
    """A rank, from the view of the process that has started it."""

    def __init__(self, number: int, folder: Path, start: Callable[[int, Connection], None]) -> None:
        self.number = number
        self.result: tuple[bool, Any] | None = None
        """Whether it succeeded, and its value or its traceback."""
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(target=start, args=(number, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.record: list[Collective | Call] = []
        """What it has written down, as far as `read` has read it."""
        self._file, self._read = folder / f"record-{number}", 0

    def read(self) -> None:
        """Read what it has written down since the last call."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read)
            text, _, _ = file.read().rpartition(b"\n")  # the last line may not be complete
        if text:
            self._read += len(text) + 1
            self.record += parsed(text.decode())

    def receive(self) -> None:
        """Take over the result, or how the process has ended without one."""
        try:
            self.result = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join()
            self.result = (False, f"it ended with exit code {self.process.exitcode}")


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...], layout: Layout, kernels: Path
) -> list[Rank] | RanksError:
    """Start the ranks from this process, which has one thread and has imported what they need."""
    importlib.import_module("tests.finetune.preloaded")
    torch.ops.load_library(kernels)
    gc.collect()
    gc.freeze()  # otherwise the collector of each rank would write to, and so copy, all memory that they share
    deadline = time.monotonic() + layout.deadline_s
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)

        def start(number: int, pipe: Connection) -> None:
            die_with_parent(signal.SIGKILL)
            open_record(folder / f"record-{number}")
            pipe.send_bytes(_result_of(function, arguments, number, layout, folder / "group"))
            signal.pause()  # if it ended, those that wait for it would fail with an error of gloo

        ranks = [_Process(number, folder, start) for number in range(layout.processes)]
        try:
            while any(rank.result is None for rank in ranks):
                for pipe in wait([rank.pipe for rank in ranks if rank.result is None], LOOK_EVERY_S):
                    next(rank for rank in ranks if rank.pipe is pipe).receive()
                _judge(ranks, layout.deadline_s if time.monotonic() > deadline else None)
            check_same_turns([rank.record for rank in ranks])
            return [Rank(rank.result[1], rank.record) for rank in ranks if rank.result is not None]
        except RanksError as error:
            return error  # raised here, it would end this process
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()


def _judge(ranks: Sequence[_Process], over_s: float | None) -> None:
    """Raise what is wrong with the ranks so far.

    Args:
        over_s: the seconds that they had, if these are over.
    """
    for rank in ranks:
        rank.read()
    records = [rank.record for rank in ranks]
    check_same_order(records)
    returned = {rank.number for rank in ranks if rank.result is not None}
    for rank in ranks:
        if rank.result is not None and not rank.result[0]:
            raise RankFailed(f"rank {rank.number}: {rank.result[1]}")
    if returned and (text := missing_ranks(records, among=returned)):
        raise NotArrived(f"{text} (the former have returned)")
    if over_s is not None:
        running = [rank.number for rank in ranks if rank.result is None]
        waiting = missing_ranks(records) or "no group waits for a rank"
        raise NotArrived(f"after {over_s:g} s, {_ranks(running)} have not returned; {waiting}")


def _result_of(
    function: Callable[..., Any], arguments: tuple[Any, ...], number: int, layout: Layout, group: Path
) -> bytes:
    """Be one process; return its result, pickled."""
    try:
        if number < layout.count:
            return pickle.dumps((True, _be_rank(function, arguments, number, layout, group)))
        return pickle.dumps((True, _be_beside(arguments, number, layout)))
    except BaseException:  # noqa: BLE001  # raised in the process of the test
        return pickle.dumps((False, traceback.format_exc()))


def _be_rank(function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, layout: Layout, group: Path) -> Any:
    from hpc_rl.training.parallel import distributed
    from tests.simulated_gpu.groups import recorded_groups
    from tests.simulated_gpu.pretended import pretended_gpu

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.count),
        "LOCAL_RANK": str(rank % layout.on_node),
        "LOCAL_WORLD_SIZE": str(layout.on_node),
        ENV_GROUP_DIR: str(group),
    }
    with recorded_groups(), pretended_gpu(rank % layout.on_node, layout.on_node):
        world = distributed.start(layout.device, start_timeout_s=int(layout.deadline_s))
        return function(world, *arguments)


def _be_beside(arguments: tuple[Any, ...], number: int, layout: Layout) -> Any:
    """Be a process beside the ranks, with a GPU of its own."""
    from tests.simulated_gpu.pretended import pretended_gpu

    assert layout.beside is not None
    with pretended_gpu(number - layout.count, layout.beside.count):
        return layout.beside.function(number, *arguments)
