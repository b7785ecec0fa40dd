"""A teacher on ranks of its own, the last ones of each node. All other ranks train the student.

Each rank of the student has a rank of the teacher on its own node, which may serve several. In a round, every rank of
the student sends one micro-batch. The ranks of the teacher hold parts of one model, so all of them evaluate the same
number of micro-batches, one after the other. The student asks for one micro-batch more than it uses, so that both work
at the same time:

    student     ask for 0 | ask for 1 | forward of 0 | loss and backward of 0 | ask for 2 | forward of 1 | ...
    teacher                  forward of 0            | forward of 1                       | forward of 2 ...

The answer is the last hidden states, in the teacher's type, of the positions with a target; the student has the weight
of the teacher's LM head. With teacher.top_k it is the most probable tokens. Tokens, answers and the end of the run
travel as tensors.

Shape suffixes: T tokens of a micro-batch, N positions with a target, G hidden size of the teacher, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.errors import AgreedError
from hpc_rl.finetune.teacher import Teacher
from hpc_rl.formats.counted import counted
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.training import guards
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples
from hpc_rl.training.models.distill_head import Taught, Teaching, in_chunks, live, stored
from hpc_rl.training.parallel.distributed import World

_PATIENCE = timedelta(days=7)
"""How long a team waits for the other one, which may tokenize, load or export for hours. A rank that dies ends the job
sooner, and one that hangs is found by its heartbeat."""
_WORK = -1
"""First number of a message that asks for an answer, in place of an exit code."""


@dataclass(frozen=True)
class Teams:
    """The two teams of a job, from the view of one of its ranks."""

    everyone: World
    """All ranks, with a group for messages between the teams, which waits for `_PATIENCE`."""
    own: World
    """The ranks of this rank's team."""
    waiting: World
    """The same ranks, with a group that waits for `_PATIENCE`, while one of them waits for the other team."""
    students: tuple[int, ...]
    teachers: tuple[int, ...]

    @property
    def teaches(self) -> bool:
        """Whether this rank holds the teacher."""
        return self.everyone.rank in self.teachers

    def teacher_of(self, student: int) -> int:
        """Return the rank of the teacher that serves a rank of the student. It is on the same node."""
        place = self.students.index(student) * len(self.teachers) // len(self.students)
        return self.teachers[place]

    @property
    def pupils(self) -> list[int]:
        """The ranks of the student that this rank serves."""
        return [student for student in self.students if self.teacher_of(student) == self.everyone.rank]

    @property
    def most_pupils(self) -> int:
        """The largest number of pupils of a rank."""
        return max(Counter(map(self.teacher_of, self.students)).values())


def split(world: World, ranks_per_node: int) -> Teams:
    """Divide the ranks into two teams: on each node, this number holds the teacher. Every rank calls this.

    Raises:
        AgreedError: the nodes have different numbers of ranks, or no rank is left to train.
    """
    there = world.ranks_per_node
    if there is None or ranks_per_node >= there:
        found = "different numbers of ranks" if there is None else f"{counted(there, 'rank')} each"
        raise AgreedError(
            f"teacher.ranks_per_node={ranks_per_node} needs more ranks than that on each node, and the same number on "
            f"all nodes; the nodes have {found}: lower it, or start more ranks"
        )
    students, teachers = divided(world, ranks_per_node)
    teaches = world.rank in teachers
    members, per_node = (teachers, ranks_per_node) if teaches else (students, there - ranks_per_node)
    everyone = world.part(range(world.size), there, backend="gloo", timeout=_PATIENCE)
    own, waiting = world.part(members, per_node), world.part(members, per_node, backend="gloo", timeout=_PATIENCE)
    return Teams(everyone, own, waiting, students, teachers)


def divided(world: World, ranks_per_node: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that train, and those that hold the teacher: the last ones of each node."""
    there = world.ranks_per_node
    assert there is not None
    teachers = tuple(rank for rank in range(world.size) if rank % there >= there - ranks_per_node)
    return tuple(rank for rank in range(world.size) if rank not in teachers), teachers


class RemoteTeacher:
    """The teacher, as a rank of the student has it.

    Args:
        tokens: number of its outputs to use, the first ones.
    """

    def __init__(self, config: DistillConfig, tokens: int, teams: Teams) -> None:
        self._config = config
        self._device, self._rank = teams.everyone.device, teams.teacher_of(teams.everyone.rank)
        self._group = teams.everyone.group
        with heart.waiting():
            teams.everyone.together(lambda: None)  # the teacher is loaded
            self._hidden, self._softcap, *types = teams.everyone.gather(None)[self._rank]
        self._type, weight_type = (getattr(torch, name) for name in types)
        self._weight_VG: torch.Tensor | None = None
        if config.teacher.top_k is None:
            with guards.explain_out_of_memory("receiving the teacher's LM head"):
                self._weight_VG = torch.empty(tokens, self._hidden, dtype=weight_type, device=self._device)
            dist.recv(self._weight_VG, self._rank)
        self._batches: Iterator[PackedBatch] = iter(())
        self._used: _Answer | None = None
        self._asked: _Answer | None = None

    def begin(self, batches: Iterable[PackedBatch]) -> None:
        """Ask for the first of some micro-batches. Each rank of the student has the same number."""
        self._drop()
        self._batches = iter(batches)
        self._asked = self._ask()

    def teaching(self, batch: PackedBatch) -> Teaching:
        """Return the distributions at the targets of the next micro-batch, and ask for the one after it.

        They arrive while the student computes its hidden states: this waits for them only when they are used.

        Args:
            batch: the next one of those given to `begin`.
        """
        answer, self._asked = self._asked, self._ask()
        assert answer is not None and answer.positions == len(batch.rows_N)
        self._used = answer
        return lambda rows: self._taught(answer, rows)

    def release(self) -> None:
        """Free the memory of the micro-batch that was used last."""
        if self._used is not None:
            self._used.wait()
        self._used = None

    def leave(self, exit_code: int) -> None:
        """Let the ranks of the teacher end with this exit code."""
        self._drop()
        with heart.waiting():
            dist.send(torch.tensor([exit_code, 0, 0]), self._rank, group=self._group)

    def _taught(self, answer: _Answer, rows: slice) -> Taught:
        answer.wait()
        if self._weight_VG is None:
            return stored(*answer.tensors)(rows)
        temperature = self._config.algorithm.temperature
        return live(*answer.tensors, self._weight_VG, temperature, None, self._softcap)(rows)

    def _ask(self) -> _Answer | None:
        """Ask for the next micro-batch; return None without one."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        # One number per token: twice its id, plus 1 if it is a target.
        marked_T = 2 * batch.input_ids_T
        marked_T[batch.rows_N + 1] += 1
        body = torch.cat([batch.cu_seqlens.long(), marked_T])
        header = torch.tensor([_WORK, len(batch.lengths), len(marked_T)])
        positions = len(batch.rows_N)
        tensors = self._empty(positions) if positions else []
        works = [dist.isend(header, self._rank, group=self._group), dist.isend(body, self._rank)]
        works += [dist.irecv(tensor, self._rank) for tensor in tensors]
        return _Answer(positions, tensors, (header, body), works)

    def _empty(self, positions: int) -> list[torch.Tensor]:
        """Return tensors that an answer fits into."""
        top_k = self._config.teacher.top_k
        if top_k is None:
            return [torch.empty(positions, self._hidden, dtype=self._type, device=self._device)]
        return [
            torch.empty(positions, top_k, dtype=torch.int64, device=self._device),
            torch.empty(positions, top_k + 1, dtype=torch.float32, device=self._device),
        ]

    def _drop(self) -> None:
        """Receive what was asked for and is not needed: a step was discarded."""
        self.release()
        if self._asked is not None:
            self._asked.wait()
        self._asked = None


@dataclass
class _Answer:
    """What the teacher has been asked for."""

    positions: int
    tensors: list[torch.Tensor]
    """Hidden states [N, G]; or ids [N, K] and log-probabilities [N, K + 1]. Empty without targets."""
    sent: tuple[torch.Tensor, ...]
    """Kept in memory until they have been sent."""
    works: list[dist.Work | None] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until the tensors are there."""
        with heart.waiting():
            for work in self.works:
                if work is not None:
                    work.wait()
        self.works = []


def serve(config: DistillConfig, tokens: int, teams: Teams) -> int:
    """Answer the student until its run ends, and return its exit code. Every rank of the teacher calls this.

    Args:
        tokens: number of the teacher's outputs to use, the first ones.

    Raises:
        AgreedError: the teacher cannot be loaded; the ranks of the student raise it too.
    """
    with heart.waiting():
        teacher = teams.everyone.together(lambda: _load(config, tokens, teams.own))
    with heart.phase("load"):
        _introduce(config, teacher, teams)
    while True:
        exit_code, questions = _next_round(teams)
        if exit_code != _WORK:
            return exit_code
        with heart.phase("teach"), guards.explain_out_of_memory("the teacher's forward pass"):
            for place in range(teams.most_pupils):
                batch = _receive(questions[place], teams.own.device) if place < len(questions) else filler()
                answer = _answer(config, teacher, batch.to(teams.own.device))
                for tensor in answer:
                    dist.send(tensor, questions[place].pupil)
                heart.beat()
            teacher.release()


class _Question(NamedTuple):
    """What a rank of the student has announced."""

    pupil: int
    samples: int
    tokens: int


def _load(config: DistillConfig, tokens: int, own: World) -> Teacher:
    with heart.phase("load"), guards.explain_out_of_memory("loading the teacher"):
        return Teacher(config, tokens, own)


def _introduce(config: DistillConfig, teacher: Teacher, teams: Teams) -> None:
    """Tell the student what the answers look like, and send it the weight of the LM head if it needs it."""
    with guards.explain_out_of_memory("the teacher's forward pass"):
        hidden_NG, weight_VG = teacher.outputs(filler().to(teams.own.device))
    types = [str(tensor.dtype).removeprefix("torch.") for tensor in (hidden_NG, weight_VG)]
    teams.everyone.gather([hidden_NG.shape[1], teacher.softcap, *types])
    for pupil in teams.pupils if config.teacher.top_k is None else ():
        dist.send(weight_VG.detach().contiguous(), pupil)
    teacher.release()


def _next_round(teams: Teams) -> tuple[int, list[_Question]]:
    """Wait for the next message of each pupil. Return the exit code with which the run ends, or _WORK, and what they
    ask. All ranks of the teacher get the same first value."""
    headers = {pupil: torch.empty(3, dtype=torch.int64) for pupil in teams.pupils}
    with heart.waiting():
        for pupil, header in headers.items():
            dist.recv(header, pupil, group=teams.everyone.group)
        found = max((int(header[0]) for header in headers.values()), default=_WORK)
        exit_code = int(teams.waiting.gather_rows([found]).max())  # some of them may have no pupil
    return exit_code, [_Question(pupil, *header[1:].tolist()) for pupil, header in headers.items()]


def _receive(question: _Question, device: torch.device) -> PackedBatch:
    """Return the micro-batch that a pupil sends."""
    body = torch.empty(question.samples + 1 + question.tokens, dtype=torch.int64, device=device)
    dist.recv(body, question.pupil)
    starts, marked_T = np.split(body.cpu().numpy(), [question.samples + 1])
    samples = np.split(marked_T, starts[1:-1])
    return pack_samples([marked >> 1 for marked in samples], [(marked & 1).astype(bool) for marked in samples])


@torch.no_grad()
def _answer(config: DistillConfig, teacher: Teacher, batch: PackedBatch) -> list[torch.Tensor]:
    """Return what the student needs to know about the targets of a micro-batch; see `_Answer.tensors`."""
    hidden_NG, weight_VG = teacher.outputs(batch)
    if not len(hidden_NG):
        return []
    if config.teacher.top_k is None:
        return [hidden_NG.contiguous()]
    teaching = live(hidden_NG, weight_VG, config.algorithm.temperature, config.teacher.top_k, teacher.softcap)
    logprobs, ids = zip(*in_chunks(teaching, len(hidden_NG), weight_VG), strict=True)
    return [torch.cat(ids), torch.cat(logprobs)]
