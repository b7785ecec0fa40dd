"""What the driver of reinforcement learning takes per step, without models: `python -m benchmarks.driver`.

The run has 100,000 prompts, and a step has 4,096 responses of 8,192 tokens on average. What the driver does in a step
is the real code: `hpc_rl.rl.loop.trainer.step` with draws, dispatch to engines, experience, assignment, advantages,
weights of the loss, the carrier, metrics and timeline. Engines and ranks are stand-ins that answer at once:

- An answer of the engines completes one response, so that a step has as many turns as responses. Tokens and
  log-probabilities of the responses lie in shared memory, as the results of the calls of Ray do.
- A call to a rank copies its arguments into shared memory as Ray does: pickled, with the buffers of arrays apart.
  Columns that a rank returns lie there before the step.
- Rewards are numbers that are there at once. The decoding of responses into text for a reward function, calls to Ray
  and the RequestQueue are not part of the measurement.

A quarter of the responses is a quarter shorter than the mean, and a quarter is a quarter longer. Seconds are those of
the processor, with one thread. `draw` is what the driver does while engines generate; `rest` is everything else in a
step, during which engines and ranks wait for the driver. Memory is the largest resident size of the process with its
prompts, without shared memory; shared memory is what the calls of a step and the responses take together.
"""

from __future__ import annotations

import argparse
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import json
import mmap
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import median, publish, table
from hpc_rl.algorithms.kl import AdaptiveKl
from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.liveness.walltime import unlimited
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.carriers.through_ray import RayCarrier
from hpc_rl.rl.loop import setup, trainer
from hpc_rl.rl.loop.batches import SynchronousBatches
from hpc_rl.rl.loop.metrics import timeline
from hpc_rl.rl.loop.state import PpoState
from hpc_rl.rl.rollout.dispatch import Dispatch
from hpc_rl.rl.rollout.engine import Completion, Request, Span
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.respondent import Samplings
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.run_dir import RunDir
from hpc_rl.software.allocator import keep_freed_memory
from hpc_rl.training.models.causal_lm import Flops
from hpc_rl.training.perf import Clock, Spans
from hpc_rl.training.rows import FIXED
from hpc_rl.training.stopping import Stopping

T = TypeVar("T")
PROMPTS, PROMPT, RESPONSES, TOKENS, N = 100_000, 256, 4096, 8192, 8
ROW_TOKENS, PLACES, SEED = 32_768, 256, 0
COMMON = (
    "model.path=/model",
    "data.train_files=train.jsonl",
    "reward.function=exact",
    "trainer.device=cpu",
    f"trainer.micro_tokens={ROW_TOKENS}",
)
ALGORITHMS = {
    "GRPO": (
        "algorithm.advantage=grpo",
        "algorithm.kl={where: loss, estimator: k3}",
        "algorithm.tis_cap=2",
        "rollout.calculate_log_probs=true",
    ),
    "PPO": ("algorithm.advantage=gae", "algorithm.kl.where=reward", "rollout.calculate_log_probs=true"),
}
"""GRPO with a reference and a correction of the engines' probabilities. PPO with a critic, and with the divergence from
the reference as part of the reward."""
_SUMS = ("tokens", "updates", "pg_loss", "clipped", "kl", "entropy", "grad_norm", "lr", "kl_loss", "loss")
TIMEOUT_S = 3600


class Shared:
    """Memory that processes share, as Ray's object store. Its pages are there from the beginning."""

    def __init__(self, size: int) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, max(size, mmap.PAGESIZE)), np.uint8)
        self._memory.fill(0)
        self._end = self._kept = self.most = 0

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of an array that lies here, and cannot be written, as what `ray.get` returns."""
        found = self._take(values.nbytes).view(values.dtype)
        found[:] = values
        found.flags.writeable = False
        return found

    def put(self, arguments: Any) -> None:
        """Copy the arguments of a call."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(arguments, protocol=5, buffer_callback=buffers.append)
        self._take(len(body))[:] = np.frombuffer(body, np.uint8)
        for buffer in buffers:
            raw = np.frombuffer(buffer.raw(), np.uint8)
            self._take(len(raw))[:] = raw

    def keep(self) -> None:
        """Keep what is here now in each `clear`."""
        self._kept = self._end

    def clear(self) -> None:
        """Forget what came after `keep`, at the end of a step."""
        self._end = self._kept

    def _take(self, size: int) -> NDArray[np.uint8]:
        start = -(-self._end // 64) * 64
        self._end = start + size
        self.most = max(self.most, self._end)
        return self._memory[start : self._end]


class Ranks(WorkerGroup):
    """The real group of a pool, whose ranks answer at once.

    Args:
        numbers: of which the columns of all ranks are parts.
    """

    def __init__(self, config: PpoConfig, ranks: int, shared: Shared, numbers: NDArray[np.float32]) -> None:
        self._carrier = RayCarrier()
        self.row_tokens, self.longest_row = config.trainer.row_tokens, 0
        self._trainer = config.trainer
        self._workers = [None] * ranks
        self._held = None
        self.shared, self._numbers = shared, numbers

    def take_spans(self) -> Pending[dict[str, list[tuple[float, float]]]]:
        return Pending.known({"update_actor": [(-1.0, 0.0)]})

    def _each(self, method: str, arguments: Iterator[Sequence[Any]], combine: Callable[[list[Any]], T]) -> Pending[T]:
        for own in arguments:
            self.shared.put(own)
        answers = [self._answer(method, rank) for rank in range(self.size)]
        return Pending.known(answers).then(combine)

    def _answer(self, method: str, rank: int) -> Any:
        if method == "update":
            return dict.fromkeys(_SUMS, 1.0)
        if method == "max_memory_gb":
            return 1.0
        if method == "hold":
            return None
        assignment, lengths_B = self._assigned
        return self._numbers[: int(lengths_B[torch.from_numpy(assignment.orders[rank])].sum())]


class Engines:
    """Engines that complete one response in each turn, behind the real `Dispatch`. A RequestQueue and a Rollout.

    Args:
        completions: the responses of each step.
    """

    busy_s, version, repeated, lost_tokens = 0.0, 0, 0, 0

    def __init__(self, count: int, completions: Sequence[Completion]) -> None:
        self.queue = self
        self.own, self.tokens = count, [0] * count
        self.spans = Spans()
        self._completions = completions
        self._dispatch = Dispatch(count, PLACES)
        self._running: list[tuple[int, Request]] = []
        self._asked: dict[int, QueuedResponses] = {}
        self._number = 0
        self._order = np.random.default_rng(SEED)

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0) -> QueuedResponses:
        """See RequestQueue."""
        first, self._number = self._number, self._number + len(draws)
        asked = QueuedResponses([Request(first + index, prompt.token_ids, *draw) for index, draw in enumerate(draws)])
        self._asked.update((request.number, asked) for request in asked.requests)
        self._dispatch.add(asked.requests, wave)
        return asked

    def turn(self, timeout_s: float) -> None:
        """Complete any of the responses that an engine has."""
        new = [(engine, request) for engine, own in self._dispatch.assign().items() for request in own]
        self._running += new
        if new:
            self._order.shuffle(self._running)
        engine, request = self._running.pop()
        self._dispatch.complete(engine, request.number)
        asked = self._asked.pop(request.number)
        asked.found[request.number] = self._completions[request.number % len(self._completions)]
        asked.engines[request.number] = engine

    def pause(self) -> None:
        """Do nothing: nothing is generated between two turns."""

    wake = sleep = sync = pause


class Rewards:
    """Rewards of 0 and 1, at once."""

    at_once = True

    def __init__(self) -> None:
        self._draw = np.random.default_rng(SEED)

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        """See Scoring."""
        return Pending.known(Scores(self._draw.integers(0, 2, len(completions)).astype(np.float32), []))

    def take_spans(self) -> dict[str, list[tuple[float, float]]]:
        """See Scoring."""
        return {}


def draw_lengths(responses: int, tokens: int) -> NDArray[np.int64]:
    """Return the tokens of each response: `tokens` for half of them, and a quarter more or less for the others, in a
    random order. Their mean is `tokens`."""
    lengths = np.full(responses, tokens)
    lengths[: responses // 4] -= tokens // 4
    lengths[responses // 4 : responses // 4 * 2] += tokens // 4
    return np.random.default_rng(SEED).permutation(lengths)


def responses_of(lengths: NDArray[np.int64], shared: Shared) -> list[Completion]:
    """Return random responses of these lengths."""
    draw, total = np.random.default_rng(SEED), int(lengths.sum())
    ids = shared.array(draw.integers(0, 1 << 17, total, np.int32))
    logprobs = shared.array(-draw.random(total, np.float32))
    found, start = [], 0
    for length in lengths.tolist():
        part = slice(start, start + length)
        found.append(Completion(ids[part], logprobs[part], True, (Span(0, length),)))
        start += length
    return found


def configuration(algorithm: str, responses: int, tokens: int) -> PpoConfig:
    """Return the configuration of a run, whose files need not exist."""
    sizes = (
        f"data.train_batch_size={responses // N}",
        f"rollout.n={N}",
        f"data.max_response_length={tokens * 5 // 4}",
        f"actor.mini_batch_size={responses // 4}",
    )
    config = compose("ppo", [*COMMON, *sizes, *ALGORITHMS[algorithm]])
    assert isinstance(config, PpoConfig)
    return config


def state_of(config: PpoConfig, ranks: int, prompts: int, lengths: NDArray[np.int64], folder: Path) -> PpoState:
    """Return the state of a run between two steps, with stand-ins for engines, ranks and rewards."""
    total = int(lengths.sum())
    columns = 12 if "critic" in config.roles else 9
    shared = Shared(4 * total * columns + (64 << 20))
    completions = responses_of(lengths, shared)
    numbers = shared.array(-np.random.default_rng(SEED + 1).random(total, np.float32))
    shared.keep()
    group = Ranks(config, ranks, shared, numbers)
    engines, rewards = cast(Any, Engines(ranks, completions)), cast(Any, Rewards())
    ids = np.random.default_rng(SEED).integers(0, 1 << 17, (prompts, PROMPT), np.int32)
    train = [Prompt(own.copy(), str(number), {}, f"prompt {number}") for number, own in enumerate(ids)]
    of_role = {role: group for role in config.roles if role != "rollout"}
    computed = setup.computed_columns(config, cast(Any, of_role))
    run = RunDir(folder)
    tracker = SimpleNamespace(log=lambda *_: None, log_timeline=lambda _: None, log_samples=lambda *_: None)
    return PpoState(
        config=config,
        run=run,
        tokenizer=cast(Any, None),
        train=train,
        val=[],
        groups=[group],
        actor=group,
        critic=cast(Any, of_role.get("critic")),
        computed=computed,
        carrier=cast(Any, shared),
        rollout=engines,
        queue=engines,
        scoring=rewards,
        batches=SynchronousBatches(config, train, engines, rewards, Position(), computed),
        old_logprobs=setup.old_logprobs(config),
        adapter_check=None,
        gpus=ranks,
        flops=Flops(1.0, 1.0, 1.0),
        peak=1.0,
        total_steps=10**6,
        tracker=cast(Any, tracker),
        saver=cast(Any, None),
        stopping=Stopping(run, 180, unlimited),
        rows=FIXED,
        kl=AdaptiveKl(config.algorithm.kl.coef, None, 1),
        step=1,
        total_tokens=0,
    )


def measure(algorithm: str, ranks: int, steps: int, responses: int, tokens: int, prompts: int) -> dict[str, Any]:
    """Return the processor seconds of each step, the wall seconds of its phases, and bytes."""
    keep_freed_memory()  # as the driver does
    config = configuration(algorithm, responses, tokens)
    found: dict[str, Any] = {"draw_s": [], "rest_s": [], "phases": []}
    with tempfile.TemporaryDirectory() as folder:
        state = state_of(config, ranks, prompts, draw_lengths(responses, tokens), Path(folder))
        draw = Timed(state.batches.draw)
        state.batches.draw = draw  # type: ignore[method-assign]
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        for _ in range(steps):
            clock, began = Clock(), time.process_time()
            with clock("step"):
                trainer.step(state, clock)
                with clock("carry"):
                    state.carrier.clear()
            timeline(state.step, clock, state.groups, state.rollout.queue, state.scoring)
            found["draw_s"].append(draw.seconds)
            found["rest_s"].append(time.process_time() - began - draw.seconds)
            found["phases"].append(clock.seconds)
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
        found["own_bytes"] = sizes["VmHWM:"] - sizes["RssShmem:"]
        found["shared_bytes"] = cast(Ranks, state.actor).shared.most
    return found


class Timed:
    """A function, and the processor seconds of its latest call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        began = time.process_time()
        found = self._function(*arguments)
        self.seconds = time.process_time() - began
        return found


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            name,
            f"{median(found['draw_s']):.2f}",
            f"{median(found['rest_s']):.2f}",
            f"{found['own_bytes'] / 1e9:.2f}",
            f"{found['shared_bytes'] / 1e9:.2f}",
        ]
        for name, found in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--responses", type=int, default=RESPONSES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.steps, options.responses, options.tokens, options.prompts)
    if options.algorithm:
        print(json.dumps(measure(options.algorithm, options.ranks[0], *sizes)))
        return
    results = {}
    for algorithm in ALGORITHMS:
        for ranks in options.ranks:
            command = [sys.executable, "-m", "benchmarks.driver", *sys.argv[1:], "--algorithm", algorithm]
            ended = subprocess.run(
                [*command, "--ranks", str(ranks)], check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
            )
            results[f"{algorithm}, {ranks} ranks"] = json.loads(ended.stdout.splitlines()[-1])
    headers = ["", "draw, s", "rest, s", "memory, GB", "shared memory, GB"]
    publish("driver", table(headers, rows_of(results)), results, ["numpy", "torch", "tensordict"])


if __name__ == "__main__":
    main()
