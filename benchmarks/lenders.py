"""Runs whose engines other jobs lend, simulated on a virtual clock: `python -m benchmarks.lenders`.

`RequestQueue`, `Dispatch`, `LentEngines`, `Draws` and the bound on staleness are the real code, which uses a virtual
Ray (`benchmarks/virtual_ray.py`). Engines, nodes, trainer and weights are replaced by the times that they take.
Assumptions:

- A node has 4 engines of one GPU each. It is lent for a time that is exponential, with the mean in the name of the
  row. Then there is a gap, which is exponential with a mean of 60 s, and another node comes. The driver hears of a
  loss after 5 s.
- The model has 7B parameters, and its weights 15 GB. An engine loads it in 60 s, and takes new weights from its node's
  memory at 5 GB/s. The driver puts them into Ray's object store at 5 GB/s. A node that has them serves one other node
  at a time, at 2.5 GB/s, so the number of copies doubles in each round. "One source": only the first node serves
  others.
- An engine computes 64 responses at a time. A step of r responses takes 7 + 0.17 r milliseconds, as in
  `benchmarks/rollout_simulation.py`. Prompts take no time. A token that is computed again takes 0.14 ms.
- Lengths are log-normal: 2,000 tokens on average before they are cut at 8,192; the standard deviation of the logarithm
  is 1.
- A step has 32 prompts with 16 responses for each engine, and on "fixed" rows those of 8 engines. Training takes 60 s.
- Synchronous rows generate and train in turns. The others have `rollout.staleness=1` and `rollout.partial`.

Columns: "Efficiency" are the tokens of complete responses, relative to what all engines could have generated with 64
responses at any time, from the moment when each has loaded its model until it leaves. Of synchronous runs, only the
time counts in which they generate, from the end of an update on. "Kept" is the efficiency relative to that of the same
number of engines that stay. "Lost" is the part of all tokens that were generated and lost with an engine. "Loading" is
the part of the lent time in which engines load the model. "First request" is the median time from the arrival of a
node until one of its engines has requests. "Weights" is the mean time from the end of an update until an engine has
the new weights, and "last" the mean time until all have them. "Driver" is the processor time of `RequestQueue.turn`
and of `publish`, without Ray, relative to the time of generation.

"Moves": nodes leave with notice, and another engine continues a response after the tokens that the last complete call
had, at the cost of computing these again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import publish, table
from benchmarks.rollout_simulation import NoScoring, step_seconds
from benchmarks.virtual_ray import Actor, Copies, Machine, Ray, overlap, stays
from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.loop.draws import Batch, Draws, prompt_order
from hpc_rl.rl.loop.staleness import batches_ahead
from hpc_rl.rl.rollout.lent import LentEngines
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.rollout.respondent import TURN_S
from hpc_rl.rl.weights.base import EngineActors

ENGINES_PER_NODE = 4
N, PROMPTS_EACH = 16, 32
MEAN_TOKENS, SPREAD, MOST_TOKENS = 2000, 1.0, 8192
PLACES, RECOMPUTE_S = 64, 0.14e-3
LOAD_S, GAP_S, NOTICE_S, TRAIN_S = 60.0, 60.0, 5.0, 60.0
WEIGHTS_GB, NETWORK_GB_S, MEMORY_GB_S = 15.0, 2.5, 5.0
OWN_SYNC_S = 5.0
"""Seconds of a weight sync to engines of the run itself."""
LIVES = {"5 min": 300.0, "60 min": 3600.0, "stay": math.inf}
WITHOUT_END = 10**9


@dataclass(frozen=True)
class Variant:
    """One run."""

    engines: int
    """Lent ones, if no place of a node is empty."""
    own: int = 0
    staleness: int = 0
    life: str = "stay"
    moves: bool = False
    """Whether a response continues elsewhere."""
    fixed: bool = False
    """Whether the step is that of 8 engines."""
    one_source: bool = False
    """Whether all nodes get weights from the first one."""

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return PROMPTS_EACH * (8 if self.fixed else self.engines + self.own)

    @property
    def steps(self) -> int:
        """Steps that are measured: more if few nodes leave in each. With staleness, long and short ones take turns."""
        least = 4 if self.staleness or self.engines < 512 else 2
        return max(least, {"stay": 0, "5 min": 64, "60 min": 192}[self.life] // self.engines)

    @property
    def warm_up(self) -> int:
        """Steps before them."""
        return 1 + self.staleness

    @property
    def name(self) -> str:
        words = [f"8 own and {self.engines}" if self.own else f"{self.engines}"]
        words.append("staleness 1" if self.staleness else "synchronous")
        words += [word for word in ("fixed", "one source", "moves") if getattr(self, word.replace(" ", "_"))]
        return ", ".join([*words, self.life])


@dataclass(frozen=True)
class Outcome:
    """What a run has shown after its first step."""

    step_s: float
    efficiency: float
    lost: float
    loading: float
    first_request_s: float
    weights_s: float
    last_weights_s: float
    driver_share: float
    """Processor time of the driver per second of generation."""
    departures: int
    """Nodes that left."""
    repeated: int
    """Requests that were lost with them."""
    lent_engines: float
    """Present ones, on average."""


class Simulation:
    """One run on a virtual clock."""

    def __init__(self, variant: Variant, logs: Path) -> None:
        self._variant = variant
        config = configuration(variant)
        memory_s = WEIGHTS_GB / MEMORY_GB_S
        machine = Machine(PLACES, step_seconds, RECOMPUTE_S, LOAD_S, memory_s, NOTICE_S, ENGINES_PER_NODE)
        random = np.random.default_rng(0)
        nodes = variant.engines // ENGINES_PER_NODE
        longest_s = 3600.0 * (variant.steps + variant.warm_up)
        lent = stays(nodes, LIVES[variant.life], GAP_S, longest_s, random)
        self._ray = Ray(machine, draw_lengths(variant.prompts * N * 2, random), lent, variant.moves)
        self._own = self._ray.own_engines(variant.own)
        labels = [ActorLabel(f"engine {index}", "engine") for index in range(variant.own)]
        actors = EngineActors(self._own, labels, [""] * variant.own, math.inf)
        self._queue = RequestQueue(actors, PLACES, math.inf, math.inf, self._refuse)
        self._lent = LentEngines(config, self._queue, self._published, None, logs)
        self._lent._next_look = 0.0  # as `open` does, which asks Ray for an address
        prompts = [Prompt(np.zeros(1, np.int32), "", {}, "")] * (variant.prompts * 4)
        self._config, self._prompts = config, prompts
        self._ended: list[float] = []
        """When each update ended."""
        self._wanted: list[tuple[float, float]] = []
        """When the run generated."""
        self._driver_s: list[float] = []

    def run(self) -> Outcome:
        with self._ray:
            steps = self._variant.warm_up + self._variant.steps
            for trained in self._steps(steps):
                if trained == self._variant.warm_up:
                    begin, useful, lost, repeated = (
                        self._ended[-1],
                        self._ray.useful,
                        self._ray.lost,
                        self._ray.repeated,
                    )
                    driver_s = sum(self._driver_s)
            end = self._ended[-1]
        wanted = [(first, last) for first, last in self._wanted if first >= begin]
        wanted_s = sum(last - first for first, last in wanted)
        lent = [actor for node in self._ray.nodes_lent for actor in node.actors]
        every = [*lent, *self._own]
        ready_s = sum(overlap(actor.loaded_at, actor.end, wanted) for actor in every)
        stays_ = [node.stay for node in self._ray.nodes_lent]
        there_s = ENGINES_PER_NODE * sum(overlap(stay.begin, stay.end, [(begin, end)]) for stay in stays_)
        loading_s = sum(overlap(a.loaded_at - LOAD_S, min(a.loaded_at, a.end), [(begin, end)]) for a in lent)
        useful, lost = self._ray.useful - useful, self._ray.lost - lost
        full = PLACES / step_seconds(PLACES)
        firsts = [a.first_at - a.node.stay.begin for a in lent if a.node.stay.begin > begin and a.first_at < math.inf]
        delays = self._delays(lent, begin)
        return Outcome(
            (end - begin) / self._variant.steps,
            useful / (ready_s * full),
            lost / (useful + lost),
            loading_s / there_s,
            float(np.median(firsts)) if firsts else 0.0,
            float(np.mean([each for of_step in delays for each in of_step])),
            float(np.mean([max(of_step) for of_step in delays])),
            (sum(self._driver_s) - driver_s) / wanted_s,
            sum(begin < stay.end <= end for stay in stays_),
            self._ray.repeated - repeated,
            there_s / (end - begin),
        )

    def _delays(self, lent: Sequence[Actor], begin: float) -> list[list[float]]:
        """Return how long each engine that was there at the end of an update waited for the weights."""
        ended = [each for each in self._ended if each >= begin]
        found: list[list[float]] = [[] for _ in ended]
        for actor in lent:
            for index, update in enumerate(ended):
                following = [done for asked, done in actor.syncs if asked >= update]
                if actor.loaded_at < update and following and min(following) < actor.end:
                    found[index].append(min(following) - update)
        return [each for each in found if each]

    def _steps(self, steps: int) -> Iterator[int]:
        """Do what the loop and its thread do, in one thread. Yield the number of trained steps after each."""
        order = prompt_order(self._config, len(self._prompts), Position())
        draws = Draws(self._config, self._prompts, self._queue, NoScoring(), order)  # type: ignore[arg-type]
        trained, until, began = 0, math.inf, 0.0
        while trained < steps:
            taken = trained + (until < math.inf)
            # The look at `Draws` is one that can change something: the others would take much of the time.
            if until == math.inf and self._ray.completed >= (taken + 1) * self._variant.prompts * N:
                draws.judge()
                if (found := draws.take()) is not None:
                    self._check(found[0], trained)
                    taken, until = taken + 1, self._ray.now + TRAIN_S
                    self._wanted += [] if self._variant.staleness else [(began, self._ray.now)]
            draws.ask(taken, batches_ahead(trained, taken, self._variant.staleness, WITHOUT_END))
            if draws.is_generating:
                with self._ray.driver(self._driver_s):
                    self._queue.turn(TURN_S)
            else:
                self._ray.sleep(TURN_S)
            if until <= self._ray.now:
                self._sync()
                self._wanted += [(began, self._ended[-1])] if self._variant.staleness else []
                trained, until, began = trained + 1, math.inf, self._ended[-1]
                yield trained

    def _check(self, batch: Batch, trained: int) -> None:
        oldest = min(completion.spans[0].version for completion in batch.completions)
        assert trained - oldest <= self._variant.staleness, "a token is older than rollout.staleness"

    def _sync(self) -> None:
        """Do what SeparateRollout and LentRollout do."""
        self._ended.append(self._ray.now)
        with self._ray.driver(self._driver_s):
            self._queue.pause()
            if self._own:
                self._queue.tell("answer")
                for actor in self._own:
                    actor.change_weights(self._ray.now, OWN_SYNC_S, self._queue.version + 1)
                self._ray.now += OWN_SYNC_S
            self._queue.version += 1
            self._lent.publish()

    def _published(self) -> list[Any]:
        self._ray.now += WEIGHTS_GB / MEMORY_GB_S
        return [(self._queue.version, Copies(self._ray.now, WEIGHTS_GB / NETWORK_GB_S, self._variant.one_source))]

    def _refuse(self, _engine: int, error: Exception) -> Any:
        raise error


def draw_lengths(count: int, random: np.random.Generator) -> list[int]:
    """Draw the tokens of responses, whose mean is MEAN_TOKENS before they are cut."""
    drawn = random.lognormal(math.log(MEAN_TOKENS) - SPREAD**2 / 2, SPREAD, count)
    lengths: list[int] = np.clip(drawn, 1, MOST_TOKENS).astype(int).tolist()
    return lengths


def configuration(variant: Variant) -> PpoConfig:
    """Return a configuration whose files need not exist."""
    options = ["model.path=/model", "data.train_files=train.jsonl", "reward.function=exact", "trainer.device=cpu"]
    options += [f"data.train_batch_size={variant.prompts}", f"rollout.n={N}", f"rollout.max_num_seqs={PLACES}"]
    options += [f"data.max_response_length={MOST_TOKENS}", "trainer.micro_tokens=32768", "rollout.engines=lent"]
    if variant.staleness:
        options += [f"rollout.staleness={variant.staleness}", "rollout.partial=true", "algorithm.tis_cap=2"]
    config = compose("ppo", options)
    assert isinstance(config, PpoConfig)
    return config


def variants_of(engines: int) -> Iterator[Variant]:
    """Yield the runs with so many lent engines; more of them with 32 and 128, which are enough to see differences."""
    for staleness in (0, 1):
        for life in LIVES:
            yield Variant(engines, staleness=staleness, life=life)
            if engines == 32:
                yield Variant(engines, own=8, staleness=staleness, life=life)
        if engines == 32:
            yield Variant(engines, staleness=staleness, life="5 min", moves=True)
        if engines == 128:
            yield from (Variant(engines, staleness=staleness, life=life, fixed=True) for life in ("stay", "5 min"))
        if engines >= 128 and not staleness:
            yield Variant(engines, staleness=staleness, life="stay", one_source=True)


def simulate(variant: Variant) -> Outcome:
    """Run a variant. Nothing is random but lengths and departures, which are the same each time."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        return Simulation(variant, Path(folder)).run()


def rows_of(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the table.

    Args:
        results: outcomes by the name of the variant.
    """
    rows = []
    for name, found in results.items():
        outcome = Outcome(**found)
        kind = name.rpartition(", ")[0].replace(", moves", "")
        kept = "" if name.endswith("stay") else f"{outcome.efficiency / results[f'{kind}, stay']['efficiency']:.2f}"
        first_request = f"{outcome.first_request_s:.0f}" if outcome.first_request_s else ""
        rows.append(
            [
                name,
                f"{outcome.step_s:.0f}",
                f"{outcome.efficiency:.2f}",
                kept,
                f"{outcome.lost:.1%}".replace("%", " %"),
                f"{outcome.loading:.0%}".replace("%", " %"),
                first_request,
                f"{outcome.weights_s:.0f}",
                f"{outcome.last_weights_s:.0f}",
                f"{outcome.driver_share:.1%}".replace("%", " %"),
            ]
        )
    return rows


HEADERS = [
    "",
    "s per step",
    "efficiency",
    "kept",
    "lost",
    "loading",
    "first request, s",
    "weights, s",
    "last, s",
    "driver",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 32, 128, 512])
    arguments = parser.parse_args()
    gc.disable()  # there are no cycles, and looking for them takes much of the time
    results = {}
    for variant in (variant for engines in arguments.engines for variant in variants_of(engines)):
        results[variant.name] = asdict(simulate(variant))
        print(f"# {variant.name}: {results[variant.name]['efficiency']:.2f}", file=sys.stderr, flush=True)
    publish("lenders", table(HEADERS, rows_of(results)), results, ["numpy", "ray"])


if __name__ == "__main__":
    main()
