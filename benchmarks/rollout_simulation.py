"""Asynchronous training on many GPUs, simulated on a virtual clock: `python -m benchmarks.rollout_simulation`.

`Dispatch`, `Draws` and the bound on staleness (`batches_ahead`) are the real code; engines, trainer and weight syncs
are replaced by the times that they take. The work is that of verl's published experiment, whose phases set the times:
512 prompts with 16 responses per step, a 7B model on H20 GPUs
(https://verl.readthedocs.io/en/latest/advance/fully_async.html). Assumptions:

- Lengths are log-normal: on average 3,000 tokens, the standard deviation of the logarithm 1, cut at 20,480. Their
  distribution does not change during training, and scores take no time.
- An engine is one GPU with at most 256 responses. A step of r responses takes 7 + 0.17 r milliseconds: reading the
  weights at 2 TB/s, and 14 GFLOP per token at 80 TFLOP/s. Prompts take no time.
- An update takes 40 s + 4300 s / T on T GPUs of its own, and 60 s + 6700 s / T on GPUs that have engines too; old
  log-probabilities take 36 s + 2300 s / T. These lines are fitted to the published phases of each. Staleness 1 does not
  need old log-probabilities, because its ratios are those to the policy that sampled.
- A weight sync takes 5 s, in which engines and trainer wait. With rollout.partial, the tokens so far are computed again
  in 0.14 ms each; without it, the engines complete their responses before the sync.
- The driver looks at the engines once per second.

Asynchronous variants have E engines and E training GPUs, as verl's. The synchronous ones use all 2 E GPUs for both in
turns. The result is that of 8 steps after 4 others. Nothing is random but the lengths, which are the same in every run.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.common import publish, table
from benchmarks.virtual_engines import VirtualQueue
from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop.draws import Batch, Draws, prompt_order
from hpc_rl.rl.loop.staleness import batches_ahead
from hpc_rl.rl.rollout.engine import Completion

PROMPTS, N = 512, 16
MEAN_TOKENS, SPREAD, MOST_TOKENS = 3000, 1.0, 20_480
PLACES = 256
STEP_S, ROW_S, RECOMPUTE_S = 7e-3, 0.17e-3, 0.14e-3
OWN_UPDATE, SHARED_UPDATE, OLD_LOGPROBS = (40.0, 4300.0), (60.0, 6700.0), (36.0, 2300.0)
"""Seconds of each pass, and seconds of a GPU that all GPUs share: on GPUs of the trainer, on those of engines too."""
SYNC_S, TICK_S = 5.0, 1.0
WARM_UP, STEPS = 4, 8
WITHOUT_END = 10**9
PUBLISHED = {16: "1.70 to 2.66", 32: "1.83 to 2.09", 64: "2.35 to 2.67"}
"""verl's speed-ups on as many GPUs for the engines, after 100 to 400 steps."""


@dataclass(frozen=True)
class Variant:
    """One way to run the same work."""

    name: str
    staleness: int = 0
    partial: bool = False
    equal_parts: bool = False

    @property
    def is_colocated(self) -> bool:
        return self.staleness == 0

    @property
    def computes_old_logprobs(self) -> bool:
        """See hpc_rl.rl.loop.setup.old_logprobs: staleness 1 runs without a correction, and 4 with one."""
        return self.staleness != 1


BASE = "synchronous, equal parts"
VARIANTS = (
    Variant(BASE, equal_parts=True),
    Variant("synchronous"),
    Variant("staleness 1", 1),
    Variant("staleness 1, partial", 1, partial=True),
    Variant("staleness 4", 4),
    Variant("staleness 4, partial", 4, partial=True),
)


@dataclass(frozen=True)
class Outcome:
    """What a run took, per step."""

    step_s: float
    generation_s: float
    """Seconds that the trainer waited for the batch."""
    engines_idle: float
    """Fraction of the time in which an engine did not generate."""
    trainer_idle: float
    """Fraction of the time in which the trainer did not compute."""
    mean_staleness: float
    max_staleness: int


class NoScoring:
    """Scores that are there at once."""

    at_once = True

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        return Pending(lambda _: Scores(np.zeros(len(completions), np.float32), []))


class Simulation:
    """One run. `turn` does what the loop and its thread do until the next event."""

    def __init__(self, config: PpoConfig, variant: Variant, engines: int, lengths: Sequence[int]) -> None:
        gpus = 2 * engines if variant.is_colocated else engines
        self._variant = variant
        self._queue = VirtualQueue(gpus, PLACES, step_seconds, lengths, variant.equal_parts)
        prompts = [Prompt(np.zeros(1, np.int32), "", {}, "")] * (PROMPTS * 4)
        order = prompt_order(config, len(prompts), Position())
        self._draws = Draws(config, prompts, self._queue, NoScoring(), order)  # type: ignore[arg-type]
        self._train_s = train_seconds(gpus, variant)
        self._taken = self._trained = 0
        self._drawn_at = (-1, -1)
        """What `_trained` and `_taken` were when prompts were last drawn."""
        self._now = 0.0
        self._state = "wait"
        self._until = math.inf
        """When the update or the weight sync ends."""
        self._waited_s = 0.0
        self._ages: list[list[tuple[int, int]]] = []
        """Of each batch: age and number of tokens."""

    def run(self) -> Outcome:
        self._until_trained(WARM_UP)
        began, busy_s, waited_s = self._now, self._queue.busy_s, self._waited_s
        self._until_trained(WARM_UP + STEPS)
        wall_s = self._now - began
        ages = [pair for batch in self._ages[WARM_UP : WARM_UP + STEPS] for pair in batch]
        tokens = sum(count for _, count in ages)
        return Outcome(
            wall_s / STEPS,
            (self._waited_s - waited_s) / STEPS,
            1 - (self._queue.busy_s - busy_s) / wall_s,
            1 - STEPS * self._train_s / wall_s,
            sum(age * count for age, count in ages) / tokens,
            max(age for age, _ in ages),
        )

    def _until_trained(self, steps: int) -> None:
        while self._trained < steps:
            self._turn()
        self._queue.finish(self._now)

    def _turn(self) -> None:
        # The looks at `Draws` are those that can change something: the others would take most of the time.
        if self._state == "wait" and self._queue.complete_groups >= (self._taken + 1) * PROMPTS:
            self._draws.judge()
            if (found := self._draws.take()) is not None:
                self._take(found[0])
        if self._state == "train" and self._now >= self._until:
            self._state = "drain"
        if self._state == "drain" and (self._variant.partial or not self._queue.running):
            self._queue.change_weights(self._now, SYNC_S, self._trained + 1, RECOMPUTE_S)
            self._state, self._until = "sync", self._now + SYNC_S
        if self._state == "sync" and self._now >= self._until:
            self._trained += 1
            self._state, self._until = "wait", math.inf
        if self._state in ("wait", "train"):
            ahead = batches_ahead(self._trained, self._taken, self._variant.staleness, WITHOUT_END)
            if (self._trained, self._taken) != self._drawn_at:
                self._draws.ask(self._taken, ahead)
                self._drawn_at = self._trained, self._taken
            self._queue.assign(self._now)
        self._pass_time()

    def _take(self, batch: Batch) -> None:
        version = self._trained
        ages = [(version - span.version, span.tokens) for each in batch.completions for span in each.spans]
        assert all(0 <= age <= self._variant.staleness for age, _ in ages), "a token is older than rollout.staleness"
        self._ages.append(ages)
        self._taken += 1
        self._state, self._until = "train", self._now + self._train_s

    def _pass_time(self) -> None:
        """Go to the next look of the driver at which something has happened."""
        event = min(self._queue.due, self._until)
        assert math.isfinite(event), "nothing happens any more"
        # Rounding may leave an event a little after the look that it was rounded to.
        look = max(math.ceil(event / TICK_S), math.floor(self._now / TICK_S) + 1) * TICK_S
        if self._until <= look and self._state in ("train", "sync"):
            look = max(self._until, self._now)
        self._waited_s += look - self._now if self._state == "wait" else 0.0
        self._now = look
        self._queue.collect(look)


def step_seconds(rows: int) -> float:
    """Return the seconds in which an engine computes the next token of so many responses."""
    return STEP_S + ROW_S * rows


def train_seconds(gpus: int, variant: Variant) -> float:
    """Return the seconds in which so many GPUs train a step."""
    passes = [SHARED_UPDATE if variant.is_colocated else OWN_UPDATE]
    passes += [OLD_LOGPROBS] if variant.computes_old_logprobs else []
    return sum(fixed_s + shared_s / gpus for fixed_s, shared_s in passes)


def draw_lengths(count: int) -> list[int]:
    """Draw the tokens of responses, whose mean is MEAN_TOKENS before they are cut."""
    drawn = np.random.default_rng(0).lognormal(math.log(MEAN_TOKENS) - SPREAD**2 / 2, SPREAD, count)
    lengths: list[int] = np.clip(drawn, 1, MOST_TOKENS).astype(int).tolist()
    return lengths


def configuration(staleness: int) -> PpoConfig:
    """Return a configuration whose files need not exist, as far as `Draws` reads it."""
    options = ["model.path=/model", "data.train_files=train.jsonl", "reward.function=exact", "trainer.device=cpu"]
    options += [
        f"data.train_batch_size={PROMPTS}",
        f"rollout.n={N}",
        f"data.max_response_length={MOST_TOKENS}",
        "trainer.micro_tokens=32768",
    ]
    if staleness:
        options += ["pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout", "trainer.n_gpus_per_node=2"]
        options += [f"rollout.staleness={staleness}", "algorithm.tis_cap=2"]
    config = compose("ppo", options)
    assert isinstance(config, PpoConfig)
    return config


def rows_of(engines: int, outcomes: dict[str, Outcome]) -> list[list[str]]:
    """Return the rows of the table for one number of engines."""
    base = outcomes[BASE].step_s
    return [
        [
            f"{engines} engines, {name}",
            f"{outcome.step_s:.0f}",
            f"{base / outcome.step_s:.2f}",
            f"{outcome.engines_idle:.0%}".replace("%", " %"),
            f"{outcome.trainer_idle:.0%}".replace("%", " %"),
            f"{outcome.mean_staleness:.2f}",
            f"{outcome.max_staleness}",
            PUBLISHED.get(engines, "") if name == "staleness 1, partial" else "",
        ]
        for name, outcome in outcomes.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 16, 32, 64, 512])
    arguments = parser.parse_args()
    gc.disable()  # there are no cycles, and looking for them among millions of requests takes most of the time
    lengths = draw_lengths(PROMPTS * N * (WARM_UP + STEPS))
    configs = {staleness: configuration(staleness) for staleness in {variant.staleness for variant in VARIANTS}}
    rows: list[list[str]] = []
    results: dict[str, Any] = {}
    for engines in arguments.engines:
        outcomes = {
            variant.name: Simulation(configs[variant.staleness], variant, engines, lengths).run()
            for variant in VARIANTS
        }
        results[str(engines)] = {name: asdict(outcome) for name, outcome in outcomes.items()}
        rows += rows_of(engines, outcomes)
    headers = ["", "s per step", "speed-up", "engines idle", "trainer idle", "staleness", "max", "published"]
    publish("rollout_simulation", table(headers, rows), results, ["numpy"])


if __name__ == "__main__":
    main()
