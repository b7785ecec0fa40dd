"""Tokenized data on disk: all ranks tokenize it once, together, and later runs map the same files into memory.

The ranks that see the same folder are a team, and its first rank, the leader, decides for it: the entry of the data is
used, or written, or another run writes it at the moment. If all nodes share the folder, all ranks are one team;
otherwise, each node has a team. All ranks go through the same steps, so that they agree on each of them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from hpc_rl.config.job import JobConfig
from hpc_rl.data.tokenized import Tokenized
from hpc_rl.errors import AgreedRunError, UserError
from hpc_rl.host import entries
from hpc_rl.host.disk import explained
from hpc_rl.host.heartbeat import heart
from hpc_rl.host.scratch import local_folder, own_scratch
from hpc_rl.run_dir import RunDir
from hpc_rl.token_cache.entry import Part, Request, complete, opened, problem_of, wrong_contents
from hpc_rl.training.distributed import World
from hpc_rl.training.stopping import Stopped, Stopping

MOST_PARTS = 64
"""Largest number of ranks that write at the same time; each writes a file, which every rank opens."""
_ROUND_S = 10.0
"""Time between two exchanges of the ranks while they tokenize."""
_POLL_S = 1.0
_IN_VAIN = (
    "the walltime ends before the data is tokenized, and another attempt would not change that: raise --time, or use "
    "more ranks"
)
_STALLED_S = 600.0
"""Time after which another run that writes the entry and does not advance is not waited for any longer."""


class Unwritable(Exception):
    """A folder cannot be used, or files in it cannot be written, for the reason in the message. All ranks raise it."""


@dataclass(frozen=True)
class Team:
    """The ranks that see the same folder, from the view of one of them."""

    leader: int
    ranks: tuple[int, ...]
    rank: int
    teams: int = 1
    """Number of teams."""

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
    request: Request, root: Path, group: int | None, world: World, stopping: Stopping
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
        return open_kept(request, root, group, world, stopping)
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


def open_kept(
    request: Request, root: Path, group: int | None, world: World, stopping: Stopping
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
    """Return whether all ranks see the same folder."""
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
    return Team(ranks[0], ranks, world.rank, len(set(hosts)))


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


class Seat:
    """What the leader of a team does about an entry. It holds what this needs until `close`.

    Args:
        may_wait: whether it waits for another run that writes the entry.
    """

    def __init__(self, root: Path, request: Request, may_wait: bool) -> None:
        self._may_wait = may_wait
        self.entry = root / request.name
        self.building: entries.Building | None = None
        self._root, self._request = root, request
        self._stack = contextlib.ExitStack()
        self._held: IO[str] | None = None
        """Keeps a complete entry until the data is open, which has a lock of its own."""
        self._lock: IO[str] | None = None
        """Keeps other runs from writing the entry."""
        self._rejected: os.stat_result | None = None
        self._sign: object = None
        self._changed_at = time.monotonic()
        self._waits = False

    def look(self) -> tuple[str, str]:
        """Return ("use", folder), ("write", folder), ("wait", "") or ("fail", reason)."""
        if self.building is not None:
            return "write", str(self.building.folder)
        try:
            if self._is_complete():
                return "use", str(self.entry)
            if self._lock is None:
                self._lock = entries.begin_building(self._root, self._request.name)
                if self._lock is not None:
                    self._stack.callback(entries.end_building, self._lock)
            if self._lock is None and self._may_wait and not self._has_stalled():
                time.sleep(_POLL_S)
                return "wait", ""
            if self._is_complete():  # another run has just written it
                return "use", str(self.entry)
            entries.set_aside(self.entry)
            with contextlib.suppress(OSError):
                entries.sweep(self._root)
            self.building = entries.Building(self._root, self._request.name)
        except OSError as error:
            return "fail", explained(error, self._root)
        self._stack.callback(self.building.discard)
        return "write", str(self.building.folder)

    def reject(self, problem: str) -> None:
        """Write the entry again, because of a problem with its files."""
        print(f"{self._request.what} in {self.entry} is damaged ({problem}): tokenizing again", flush=True)
        if self._held is not None:
            self._rejected = os.fstat(self._held.fileno())
            self._hold(None)

    def earlier(self) -> list[Path]:
        """Return the entries of earlier contents of the same files."""
        return [path for path in self._root.glob(f"{self._request.key}-*") if path != self.entry]

    def finish(self, summaries: Sequence[Mapping[str, Any]]) -> str | None:
        """Complete the entry that the team has written, if any, and remove those of earlier contents.

        Args:
            summaries: of the parts.

        Returns:
            why this is not possible, or None.
        """
        if self.building is None:
            return None
        try:
            complete(self.building.folder, self._request, summaries)
            held = self.building.publish()
        except OSError as error:
            return explained(error, self._root)
        self._hold(held)
        with contextlib.suppress(OSError):  # the entry is complete: what cannot be removed stays
            for path in self.earlier():
                entries.remove(path)
        return None

    def close(self) -> None:
        """Let other runs write the entry. What is not published is removed."""
        self._hold(None)
        self._stack.close()

    def _is_complete(self) -> bool:
        """Hold the entry if it is there; return whether it can be used, as far as names and sizes show."""
        self._hold(entries.hold(self.entry))
        if self._held is None:
            return False
        if self._rejected is not None and os.path.samestat(self._rejected, os.fstat(self._held.fileno())):
            self._hold(None)
        elif (problem := problem_of(self.entry)) is not None:
            self.reject(problem)
        return self._held is not None

    def _hold(self, held: IO[str] | None) -> None:
        if self._held is not None:
            self._held.close()
        self._held = held

    def _has_stalled(self) -> bool:
        sign, now = entries.sign_of_building(self._root, self._request.name), time.monotonic()
        if not self._waits:
            print(f"{self._request.what}: another run is writing it to {self._root}; waiting", flush=True)
        if sign != self._sign or not self._waits:
            self._sign, self._changed_at, self._waits = sign, now, True
        if now - self._changed_at < _STALLED_S:
            return False
        print(
            f"{self._request.what}: the other run has not advanced for {_STALLED_S:.0f} s; tokenizing here", flush=True
        )
        return True


def _obtained(request: Request, root: Path, team: Team, world: World, stopping: Stopping) -> tuple[Tokenized[Any], Any]:
    """Return the data from an entry, which is written if there is none. See `open_tokenized`."""
    # Each of two runs with several teams could write one entry and wait for the other. The first entry stays.
    seat = Seat(root, request, may_wait=team.teams == 1) if team.leads else None
    with contextlib.ExitStack() as stack:
        if seat is not None:
            stack.callback(seat.close)
        while True:
            action, folder = _agreed_action(seat, team, world, stopping)
            checks = action == "use"
            problems = world.gather(wrong_contents(Path(folder), *team.share()) if checks else None)
            own = next(filter(None, (problems[rank] for rank in team.ranks)), None)
            if seat is not None and own is not None:
                seat.reject(own)
            if not any(problems):
                break
        if world.any(action == "write"):
            request.source.bring()
            if seat is not None and seat.building is not None and seat.earlier() and world.is_main:
                print(f"{request.what} {request.source.staleness}: tokenizing again", flush=True)
            _write(request, Path(folder) if action == "write" else None, seat, team, world, stopping)
        entry = Path(world.gather(str(seat.entry) if seat is not None else None)[team.leader])
        return world.together(lambda: opened(request, entry))


def _agreed_action(seat: Seat | None, team: Team, world: World, stopping: Stopping) -> tuple[str, str]:
    """Return what this rank's team does, after all teams have something to do.

    Raises:
        Unwritable: a team cannot write.
        Stopped: the run stops.
    """
    while True:
        heart.beat()
        actions = world.gather(seat.look() if seat is not None else None)
        failed = next((reason for action, reason in filter(None, actions) if action == "fail"), None)
        if failed is not None:
            raise Unwritable(failed)
        if all(action != "wait" for action, _ in filter(None, actions)):
            action, folder = actions[team.leader]
            return action, folder
        if world.any(is_due(world, stopping)):
            stop(stopping, world)


def _write(
    request: Request, folder: Path | None, seat: Seat | None, team: Team, world: World, stopping: Stopping
) -> None:
    """Tokenize the data into the folder of a new entry. Every rank calls this; those of other teams without a folder.

    Raises:
        AgreedError: a row is not valid.
        Unwritable: a file cannot be written.
        Stopped: the run stops.
    """
    place = None if folder is None else team.part()
    part = None if folder is None or place is None else Part(request, folder, *place)
    with contextlib.ExitStack() as stack:
        if part is not None:
            stack.callback(part.close)
        _tokenize(part, seat, world, stopping)
    world.together(request.source.refuse_changed)
    summaries = world.gather(None if part is None else part.summary())
    own = [summaries[rank] for rank in team.ranks if summaries[rank] is not None]
    _refuse_unwritable(world.gather(None if seat is None else seat.finish(own)))


def _tokenize(part: Part | None, seat: Seat | None, world: World, stopping: Stopping) -> None:
    """Write all parts; see `_write`."""
    while True:
        problem = world.together(lambda: None if part is None else part.advance(_ROUND_S))
        heart.beat()
        if seat is not None and seat.building is not None:
            seat.building.sign()
        state = [part is None or part.is_done, problem, is_due(world, stopping)]
        done, problems, stops = zip(*world.gather(state), strict=True)
        _refuse_unwritable(problems)
        if all(done):
            return
        if stops[0]:
            stop(stopping, world)


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
    raise Stopped("stopped before the data was tokenized: submit again to continue")


def forget(key: str, root: Path, world: World) -> None:
    """Remove all entries with a key that no other run uses. Every rank calls this when it has dropped the data."""
    world.barrier()
    with contextlib.suppress(OSError):
        for entry in root.glob(f"{key}-*"):
            entries.discard(entry)
    world.barrier()  # before one of them writes a new one
