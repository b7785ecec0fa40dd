"""Which rank keeps the others waiting: the records of torch's flight recorder.

Each rank writes a file with its latest collectives (hpc_rl/training/parallel/flight_recorder.py) when a collective
times out, or when the node entry has found a hang. Collectives of a process group are numbered, and all ranks of the
group must make the same collectives. The others therefore wait for a rank with a lower number, or with another
collective of the same number. On GPUs, only the records show this: a rank there starts collectives without waiting, and
its stacks show where it later waits for its GPU.

The files are pickles of dictionaries, lists, texts and numbers (torch/csrc/distributed/c10d/FlightRecorder.hpp, version
2.x of the format). Nothing else is admitted, since a pickle can otherwise run any program.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.system.files import read_regular

LARGEST_BYTES = 64 << 20
"""A file above this size is not read; torch keeps 2,000 collectives, which take about 2 MB."""
_DAMAGE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, TypeError, ValueError),
    pickle.UnpicklingError,
)
"""What reading a damaged pickle raises."""
MARK = "flight recorder: "
OF_GLOO = ".gloo"
"""End of the name of the second file of a rank on a GPU. This file has the collectives in host memory."""
_FILE = re.compile(rf"flight-(?:(?P<pool>.+)-)?rank(?P<rank>\d+)(?P<second>{re.escape(OF_GLOO)})?")
_LIBRARY = re.compile(r"[/\\](?:torch|hpc_rl[/\\]training[/\\]parallel)[/\\.]|^<")
"""Files of frames that are not the place in a program where a collective was called."""
_MOST_RANKS = 8


@dataclass(frozen=True)
class Collective:
    """One collective on one rank."""

    name: str
    sizes: str
    backend: str
    """nccl or gloo. Only NCCL records whether a collective has completed."""
    completed: bool
    place: str
    """File and line of the program; empty if they are not known."""


@dataclass(frozen=True)
class GroupRecord:
    """One process group, as one rank has recorded it."""

    label: str
    calls: Mapping[int, Collective]
    """The latest collectives by their number in the group."""
    ranks: tuple[int, ...] = ()
    """Ranks of the group; empty if they are not recorded."""

    @property
    def last(self) -> int:
        """The number of the latest collective, or 0."""
        return max(self.calls, default=0)

    @property
    def waits(self) -> bool:
        """Whether a collective is known not to have completed."""
        return any(not call.completed and call.backend == "nccl" for call in self.calls.values())


Record = Mapping[str, GroupRecord]
"""The groups of one rank, by name."""


@dataclass(frozen=True)
class WaitCause:
    """What keeps ranks waiting."""

    line: str
    ranks: tuple[int, ...] = ()
    """The ranks for which the others wait, if these ranks wait for no others; empty if they are not known."""
    pool: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the ranks in heartbeats."""
        of_pool = f" of pool {self.pool}" if self.pool else ""
        return [f"rank {rank}{of_pool}" for rank in self.ranks]


class NoRecordError(ValueError):
    """A file that is not a flight recorder's."""


def explanations(attempt: Path) -> list[str]:
    """Return a line for each finding in the records of an attempt, the most likely cause first."""
    return [f"{MARK}{finding.line}" for finding in wait_causes(attempt)]


def wait_causes(attempt: Path) -> list[WaitCause]:
    """Compare the records of an attempt. Return what keeps ranks waiting, in each pool the most likely cause first."""
    pools: dict[str, dict[int, list[Path]]] = {}
    for path in sorted(attempt.glob("flight-*")):
        if found := _FILE.fullmatch(path.name):
            pools.setdefault(found["pool"] or "", {}).setdefault(int(found["rank"]), []).append(path)
    return [finding for pool, paths in pools.items() for finding in _of_pool(attempt, pool, paths)]


def _of_pool(attempt: Path, pool: str, paths: Mapping[int, Sequence[Path]]) -> Iterator[WaitCause]:
    records: dict[int, Record] = {}
    unreadable: list[str] = []
    for rank, files in paths.items():
        for path in files:
            try:
                records[rank] = {**records.get(rank, {}), **read_record(path)}
            except (NoRecordError, OSError) as error:
                unreadable.append(f"{path.name} cannot be read: {error}")
    logs = attempt.glob(f"node*-{pool}-rank*.log" if pool else "node*-rank*.log")
    expected = {int(path.stem.rpartition("rank")[2]) for path in logs}
    where = f" of pool {pool}" if pool else ""
    for finding in compare(records, expected):
        yield replace(finding, line=f"{finding.line}{where}", pool=pool)
    yield from (WaitCause(line, pool=pool) for line in unreadable)


def compare(records: Mapping[int, Record], expected: Collection[int] = ()) -> list[WaitCause]:
    """Compare the records of ranks. Return what keeps them waiting, the most likely cause first.

    Args:
        expected: all ranks of the job, for those that left no record.
    """
    if not records:
        return []
    absent = sorted(
        {*expected, *(rank for one in records.values() for g in one.values() for rank in g.ranks)} - {*records}
    )
    found: list[tuple[int, WaitCause]] = []
    if absent:
        waiting = "; ".join(_waiting(records))
        ended = f"{_ranks(absent)} left no record: ended, or hangs outside of torch.distributed. {waiting}"
        found.append((1, WaitCause(ended, tuple(absent))))
    groups = {name: _views(name, records) for name in sorted({name for record in records.values() for name in record})}
    held_up = {rank for views in groups.values() for rank in _held_up(views)}
    held_up |= {rank for rank, record in records.items() if any(group.waits for group in record.values())}
    for views in groups.values():
        if line := _different(views):
            found.append((0, WaitCause(line)))
        elif line := _late(views):
            late = {rank for rank, view in views.items() if view.last == min(v.last for v in views.values())}
            free = sorted(late - held_up)
            found.append((2 if len(free) == len(late) else 3 if free else 4, WaitCause(line, tuple(free))))
        elif not absent and (line := _stuck(views)):
            found.append((5, WaitCause(line)))
    return [finding for _, finding in sorted(found, key=lambda pair: pair[0])]


def _views(name: str, records: Mapping[int, Record]) -> dict[int, GroupRecord]:
    """Return a group as recorded by each of its ranks that left a record."""
    views = {rank: record[name] for rank, record in records.items() if name in record}
    label = next(iter(views.values())).label
    members = next((view.ranks for view in views.values() if view.ranks), ())
    everyone = members or (tuple(records) if label.startswith("default_pg") else tuple(views))
    return views | {rank: GroupRecord(label, {}) for rank in everyone if rank in records and rank not in views}


def _held_up(views: Mapping[int, GroupRecord]) -> list[int]:
    """Return the ranks that wait in a collective which another rank has not reached."""
    low = min(view.last for view in views.values())
    return [rank for rank, view in views.items() if low + 1 in view.calls and not view.calls[low + 1].completed]


def _different(views: Mapping[int, GroupRecord]) -> str | None:
    """Describe the first number at which ranks made different collectives."""
    common = set.intersection(*(set(view.calls) for view in views.values()))
    for number in sorted(common):
        names: dict[str, list[int]] = {}
        for rank, view in views.items():
            names.setdefault(_alike(view.calls[number]), []).append(rank)
        if len(names) > 1:
            parts = (
                f"{_ranks(ranks)} {name}{_place(views[ranks[0]].calls[number])}"
                for name, ranks in sorted(names.items(), key=lambda item: len(item[1]))
            )
            label = next(iter(views.values())).label
            return f"the ranks made different collectives as number {number} of group {label}: {', '.join(parts)}"
    return None


def _late(views: Mapping[int, GroupRecord]) -> str | None:
    """Describe the ranks that have not reached a collective in which others wait."""
    low, high = min(view.last for view in views.values()), max(view.last for view in views.values())
    if low == high:
        return None
    late = [rank for rank, view in views.items() if view.last == low]
    waiting = _held_up(views)
    if not waiting:
        return None
    view, call = views[late[0]], views[waiting[0]].calls[low + 1]
    before = f"the last one was {view.calls[low].name}{_place(view.calls[low])}" if low else "there was none before"
    return (
        f"{_ranks(late)} did not reach {call.name} {call.sizes}, number {low + 1} of group {view.label}, in which "
        f"{_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}{_place(call)}; {before}"
    )


def _stuck(views: Mapping[int, GroupRecord]) -> str | None:
    """Describe a collective that all ranks have begun and none has completed."""
    pending = [
        number for number in sorted(next(iter(views.values())).calls) if all(_pends(v, number) for v in views.values())
    ]
    if not pending or not any(view.waits for view in views.values()):
        return None
    view = next(iter(views.values()))
    call = view.calls[pending[0]]
    return (
        f"all ranks began {call.name} {call.sizes}, number {pending[0]} of group {view.label}{_place(call)}, and it "
        "did not complete: suspect the network or a GPU"
    )


def _pends(view: GroupRecord, number: int) -> bool:
    return number in view.calls and not view.calls[number].completed


def _waiting(records: Mapping[int, Record]) -> Iterator[str]:
    """Yield where the ranks with a record are, at most two of them."""
    for rank in sorted(records)[:2]:
        last = [(view.label, view.calls[view.last]) for view in records[rank].values() if view.calls]
        pending = [one for one in last if not one[1].completed] or last
        if pending:
            label, call = pending[-1]
            yield f"rank {rank} is in {call.name} {call.sizes} of group {label}{_place(call)}"


def _alike(call: Collective) -> str:
    """Return what must be equal on all ranks; the sizes of a reduction are, those of other collectives may differ."""
    return f"{call.name} {call.sizes}" if call.name.endswith(("all_reduce", "allreduce", "broadcast")) else call.name


def _place(call: Collective) -> str:
    return f" at {call.place}" if call.place else ""


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, texts and numbers only."""

    def find_class(self, module: str, name: str) -> Any:
        raise NoRecordError(f"it names {module}.{name}, which no flight recorder writes")


def read_record(path: Path) -> Record:
    """Read one file of a rank. Groups of the second file get other names, since gloo numbers its collectives apart.

    Raises:
        NoRecordError: the file is not a flight recorder's, or is cut off.
        OSError: the file cannot be read, or is too large.
    """
    data = read_regular(path, LARGEST_BYTES)
    try:
        found = groups_of(_Plain(io.BytesIO(data)).load())
    except NoRecordError:
        raise
    except _DAMAGE as error:
        raise NoRecordError(f"{type(error).__name__}: {error}") from error
    if path.suffix != OF_GLOO:
        return found
    return {f"{name}{OF_GLOO}": replace(group, label=f"{group.label} (gloo)") for name, group in found.items()}


def groups_of(dump: Mapping[str, Any]) -> Record:
    """Return the groups of a dump in the format of torch's flight recorder.

    Raises:
        KeyError, TypeError, ValueError: it has another format.
    """
    config = {str(one["name"]): one for one in dump.get("pg_config", {}).values()}
    calls: dict[str, dict[int, Collective]] = {name: {} for name in config if name}
    labels: dict[str, str] = {name: str(one["desc"]) or name for name, one in config.items()}
    for entry in dump.get("entries", ()):
        name, label = entry["process_group"]
        labels[name] = label or name
        if not entry["is_p2p"]:
            calls.setdefault(name, {})[int(entry["collective_seq_id"])] = _call(entry)
    ranks = {name: tuple(json.loads(one["ranks"] or "[]")) for name, one in config.items()}
    return {name: GroupRecord(labels[name], found, ranks.get(name, ())) for name, found in calls.items()}


def _call(entry: Mapping[str, Any]) -> Collective:
    frames = [f for f in entry.get("frames", ()) if not _LIBRARY.search(f["filename"])]
    place = f"{Path(frames[0]['filename']).name}:{frames[0]['line']}" if frames else ""
    backend, _, name = str(entry["profiling_name"]).rpartition(":")
    return Collective(name, str(entry["input_sizes"]), backend, entry["state"] == "completed", place)
