"""Tokenized data on disk: all ranks tokenize it once, together, and later runs map the same files into memory.

The ranks that see the same folder are a team, and its first rank, the leader, decides for it: the entry of the data is
used, or written. If all nodes share the folder, all ranks are one team; otherwise, each node has a team. All ranks go
through the same steps, so that they agree on each of them. Runs do not wait for each other: each of two that start at
once writes the entry under a name of its own, and the first one that is complete stays.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hpc_rl.config.job import JobConfig
from hpc_rl.data.tokenized import Tokenized
from hpc_rl.errors import AgreedError, AgreedRunError, UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir
from hpc_rl.system import entries
from hpc_rl.system.disk import explained
from hpc_rl.system.scratch import local_folder, own_scratch
from hpc_rl.token_cache.entry import PartWriter, TokenizeRequest, Unusable, cannot_read, complete, opened
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.stopping import Stopped, Stopping

MOST_PARTS = 64
"""Largest number of ranks that write at the same time; each writes a file, which every rank opens."""
_ROUND_S = 10.0
"""Time between two exchanges of the ranks while they tokenize."""
_MOST_TRIES = 3
"""An entry may be damaged, and another run that finds this too may remove the one that takes its place."""
_IN_VAIN = (
    "the walltime ends before the data is tokenized, and another attempt would not change that: raise --time, or use "
    "more ranks"
)


class Unwritable(Exception):
    """A folder cannot be used, or files in it cannot be written, for the reason in the message. All ranks raise it."""


@dataclass(frozen=True)
class Team:
    """The ranks that see the same folder, from the view of one of them."""

    leader: int
    ranks: tuple[int, ...]
    rank: int

    @property
    def leads(self) -> bool:
        """Whether this rank decides for the team."""
        return self.rank == self.leader

    def share(self) -> tuple[int, int]:
        """Return (this rank's number in the team, number of ranks)."""
        return self.ranks.index(self.rank), len(self.ranks)

    def part(self) -> tuple[int, int] | None:
        """Return (this rank's part, number of parts) of what the team writes; None if this rank writes nothing."""
        writers = self.ranks[:: -(-len(self.ranks) // MOST_PARTS)]
        return (writers.index(self.rank), len(writers)) if self.rank in writers else None


def open_tokenized(
    request: TokenizeRequest, root: Path, group: int | None, world: World, stopping: Stopping
) -> tuple[Tokenized[Any], Any]:
    """Return the tokenized data, and the counts of its rows. Every rank calls this.

    Args:
        root: folder for the entries. If it cannot be used, each node has the data in a temporary folder.
        group: id of a group whose members the user trusts.

    Raises:
        AgreedError: a row is not valid, or no folder can be written.
        Stopped: the run stops before the data is tokenized.
    """
    try:
        return open_cached(request, root, group, world, stopping)
    except Unwritable as error:
        problem = str(error)
    if world.is_main:
        print(
            f"{request.what} is in a temporary folder of each node, and not kept: {root} cannot be used ({problem}); "
            "to keep it, set cache.data_dir to a folder with space that only you can write to",
            flush=True,
        )
    team = _team(world, is_one=False)
    with _temporary(world, team) as folder:
        try:
            return _obtained(request, folder, team, world, stopping)
        except Unwritable as error:
            raise AgreedRunError(
                f"{request.what} cannot be written, neither to {root} ({problem}) nor to a temporary folder ({error}): "
                "free space, or set cache.data_dir to a folder with space that only you can write to"
            ) from error


def open_cached(
    request: TokenizeRequest, root: Path, group: int | None, world: World, stopping: Stopping
) -> tuple[Tokenized[Any], Any]:
    """Return the same as `open_tokenized`, but from files in `root`, and nowhere else.

    Raises:
        AgreedError: a row is not valid.
        Stopped: the run stops before the data is tokenized.
        Unwritable: `root` cannot be used.
        Unstorable: the files cannot hold one of the values. Only this rank raises it.
    """
    problem = next(filter(None, world.gather(entries.unusable(root, group))), None)
    if problem is not None:
        raise Unwritable(problem)
    return _obtained(request, root, _team(world, _sees_all(world, root)), world, stopping)


def folder_of(config: JobConfig, run: RunDir) -> Path:
    """Return the folder for the entries of a run."""
    chosen = config.cache.data_dir
    return Path(chosen).absolute() if chosen else run.tokenized


def _sees_all(world: World, root: Path) -> bool:
    if world.size == 1:
        return True
    name = world.broadcast(f".seen-{secrets.token_hex(8)}" if world.is_main else None)
    with contextlib.ExitStack() as stack:
        if world.is_main:
            with contextlib.suppress(OSError):
                (root / name).touch(mode=0o600)
                stack.callback((root / name).unlink, missing_ok=True)
        world.barrier()
        # Nobody has asked for this name before, so that no network file system answers from its memory.
        return not world.any(not (root / name).exists())


def _team(world: World, is_one: bool) -> Team:
    """Return this rank's team: all ranks, or those of its node."""
    hosts = [""] * world.size if is_one else world.gather(socket.gethostname())
    ranks = tuple(rank for rank, host in enumerate(hosts) if host == hosts[world.rank])
    return Team(ranks[0], ranks, world.rank)


@contextlib.contextmanager
def _temporary(world: World, team: Team) -> Iterator[Path]:
    """Yield a temporary folder, which the leader of a team creates and removes: files that are open stay readable."""
    with contextlib.ExitStack() as stack:

        def create() -> str | None:
            if not team.leads:
                return None
            try:
                return str(stack.enter_context(own_scratch(os.environ)))
            except OSError as error:
                place = local_folder(os.environ)
                raise UserError(f"no temporary folder in {place}: {explained(error, place)}") from error

        yield Path(world.gather(world.together(create))[team.leader])


def _obtained(
    request: TokenizeRequest, root: Path, team: Team, world: World, stopping: Stopping
) -> tuple[Tokenized[Any], Any]:
    """Return the data from an entry, which is written if there is none. See `open_tokenized`."""
    entry = root / request.name
    damage: str | None = None
    for _ in range(_MOST_TRIES):
        with contextlib.ExitStack() as stack:
            building = _begun(request, root, damage, team, world, stack)
            is_new = _write(request, root, building, team, world, stopping)
            share = None if is_new else team.share()
            found, problem = world.together(partial(_opened, request, entry, share))
        problems = world.gather(problem)
        if found is not None and not any(problems):
            return found
        found = None  # lets the leader remove the entry
        damage = next(filter(None, (problems[rank] for rank in team.ranks)), None)
    raise AgreedError(cannot_read(request, entry, next(filter(None, problems))))


def _begun(
    request: TokenizeRequest, root: Path, damage: str | None, team: Team, world: World, stack: contextlib.ExitStack
) -> entries.EntryWriter | None:
    """Begin an entry if this rank leads a team that has none, or whose entry is damaged. Every rank calls this.

    Args:
        damage: what is wrong with the entry that there is.
        stack: discards at its end what has not been published.

    Raises:
        Unwritable: a team cannot write.
    """
    building: entries.EntryWriter | None = None
    problem: str | None = None
    entry = root / request.name
    if team.leads:
        try:
            if damage is not None:
                print(f"{request.what} in {entry} is damaged ({damage}): tokenizing again", flush=True)
                entries.set_aside(entry)
            if not entry.exists():
                with contextlib.suppress(OSError):
                    entries.sweep(root)
                building = entries.EntryWriter(root, request.name)
                stack.callback(building.discard)
        except OSError as error:
            problem = explained(error, root)
    _refuse_unwritable(world.gather(problem))
    return building


def _write(
    request: TokenizeRequest,
    root: Path,
    building: entries.EntryWriter | None,
    team: Team,
    world: World,
    stopping: Stopping,
) -> bool:
    """Tokenize the data into the entries that leaders have begun. Every rank calls this.

    Returns:
        whether this rank's team has written an entry.

    Raises:
        AgreedError: a row is not valid.
        Unwritable: a file cannot be written.
        Stopped: the run stops.
    """
    folders = world.gather(None if building is None else str(building.folder))
    if not any(folders):
        return False
    request.source.bring()
    if building is not None and _earlier(request, root) and world.is_main:
        print(f"{request.what} {request.source.staleness}: tokenizing again", flush=True)
    folder, place = folders[team.leader], team.part()
    part = None if folder is None or place is None else PartWriter(request, Path(folder), *place)
    with contextlib.ExitStack() as stack:
        if part is not None:
            stack.callback(part.close)
        _tokenize(part, world, stopping)
    world.together(request.source.refuse_changed)
    summaries = world.gather(None if part is None else part.summary())
    own = [summaries[rank] for rank in team.ranks if summaries[rank] is not None]
    _refuse_unwritable(world.gather(None if building is None else _publish(request, root, building, own)))
    return folder is not None


def _tokenize(part: PartWriter | None, world: World, stopping: Stopping) -> None:
    while True:
        problem = world.together(lambda: None if part is None else part.advance(_ROUND_S))
        heart.beat()
        state = [part is None or part.is_done, problem, is_due(world, stopping)]
        done, problems, stops = zip(*world.gather(state), strict=True)
        _refuse_unwritable(problems)
        if all(done):
            return
        if stops[0]:
            stop(stopping, world)


def _publish(
    request: TokenizeRequest, root: Path, building: entries.EntryWriter, summaries: Sequence[Mapping[str, Any]]
) -> str | None:
    """Complete an entry, and remove those of earlier contents. Return why this is not possible, or None."""
    try:
        complete(building.folder, request, summaries)
        building.publish()
    except OSError as error:
        return explained(error, root)
    with contextlib.suppress(OSError):  # the entry is complete: what cannot be removed stays
        for path in _earlier(request, root):
            entries.remove(path)
    return None


def _earlier(request: TokenizeRequest, root: Path) -> list[Path]:
    """Return the entries of earlier contents of the same files."""
    return [path for path in root.glob(f"{request.key}-*") if path.name != request.name]


def _opened(
    request: TokenizeRequest, entry: Path, share: tuple[int, int] | None
) -> tuple[tuple[Tokenized[Any], Any] | None, str | None]:
    try:
        return opened(request, entry, share), None
    except Unusable as error:
        return None, str(error)


def _refuse_unwritable(problems: Sequence[str | None]) -> None:
    if (problem := next(filter(None, problems), None)) is not None:
        raise Unwritable(problem)


def is_due(world: World, stopping: Stopping) -> bool:
    """Return whether this rank decides that the run stops while it waits for data: rank 0. If there are ranks that only
    serve the others, they cannot end before the first step."""
    can_stop = world.group is None or stopping.made_a_step
    return world.is_main and can_stop and stopping.due(0.0)


def stop(stopping: Stopping, world: World) -> NoReturn:
    """Stop the run. What has been tokenized is lost."""
    if world.broadcast(stopping.is_in_vain()):
        raise AgreedRunError(_IN_VAIN)
    raise Stopped("stopped before the data was tokenized: nothing is saved yet")


def forget(key: str, root: Path, world: World) -> None:
    """Remove all entries with a key that no other run uses. Every rank calls this when it has dropped the data."""
    world.barrier()
    with contextlib.suppress(OSError):
        for entry in root.glob(f"{key}-*"):
            entries.discard(entry)
    world.barrier()  # before one of them writes a new one
