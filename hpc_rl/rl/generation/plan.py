"""What a run generates: all prompts in the order of the data, cut into blocks that are generated and written as one."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.data.lazy import LazyRows, Subsequence
from hpc_rl.data.prompts import Prompt
from hpc_rl.system.files import folder_state

_OF_SPEED = {"workers", "timeout_s"}
"""The options of the sections `reward` and `environment` that may change while a run is stopped."""


@dataclass(frozen=True)
class PromptFile:
    """The prompts of one data file."""

    name: str
    """As in data.files."""
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt with its place in the data."""

    source: str
    index: int
    """Number of the prompt in its file, from 0, without those that were left out."""
    position: int
    """Number of the prompt in the run, from 0."""
    prompt: Prompt


class PlacedPrompts(LazyRows[PlacedPrompt]):
    """The prompts of all sources, each with its place."""

    def __init__(self, sources: Sequence[PromptFile]) -> None:
        self._sources = sources
        self._ends = list(accumulate(len(source.prompts) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> PlacedPrompt:
        number = bisect_right(self._ends, index)
        source, place = self._sources[number], index - self._ends[number] + len(self._sources[number].prompts)
        return PlacedPrompt(source.name, place, index, source.prompts[place])


@dataclass(frozen=True)
class Block:
    """Neighbouring prompts whose responses are generated, scored and written together. Prompts are read when needed."""

    number: int
    prompts: Sequence[PlacedPrompt]


@dataclass(frozen=True)
class GenerationPlan:
    """Everything on which the responses depend. Finished blocks are used again only if it is the same."""

    model: str
    model_files: list[tuple[str, int, int]]
    """Of the model's folder, as `folder_state` returns them; none for a name on the hub."""
    prompts: int
    digest: str
    """Of the tokens of all prompts, and of their rows, which rewards and responses.jsonl depend on."""
    n: int
    seed: int
    engine: str
    sampling: dict[str, float]
    columns: dict[str, object]
    """What the rows contain besides the responses, and how scores come about."""
    block_prompts: int
    """Prompts of a block. It does not depend on the nodes, so that a run may continue on others."""

    @property
    def blocks(self) -> int:
        return -(-self.prompts // self.block_prompts)

    def as_dict(self) -> dict[str, object]:
        # As JSON has it, so that it can be compared with what is read.
        found: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return found


def make_plan(config: GenerateConfig, sources: Sequence[PromptFile], engine: str) -> GenerationPlan:
    """Return the plan of a run. A block has about rollout.max_num_seqs responses."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        for prompt in source.prompts:
            digest.update(prompt.token_ids.tobytes() + b"|" + json.dumps(prompt.row, default=str).encode() + b"|")
    environment, rollout = config.environment, config.rollout
    reward = config.reward.model_dump(mode="json", exclude=_OF_SPEED)
    return GenerationPlan(
        model=config.model.path,
        model_files=folder_state(Path(config.model.path)),
        prompts=sum(len(source.prompts) for source in sources),
        digest=digest.hexdigest(),
        n=rollout.n,
        seed=config.trainer.seed,
        engine=engine,
        sampling={
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_response_length": config.data.max_response_length,
        },
        columns={
            "logprobs": rollout.logprobs,
            "answer_key": config.data.answer_key,
            "reward": reward,
            "reward_model_files": folder_state(Path(config.reward.model)) if config.reward.model else [],
            **({"environment": environment.model_dump(mode="json", exclude=_OF_SPEED)} if environment.is_used else {}),
        },
        block_prompts=-(-rollout.max_num_seqs // rollout.n),
    )


def blocks_of(plan: GenerationPlan, sources: Sequence[PromptFile]) -> list[Block]:
    """Return all blocks, in the order of the data."""
    placed = PlacedPrompts(sources)
    edges = [*range(0, plan.prompts, plan.block_prompts), plan.prompts]
    return [Block(number, Subsequence(placed, start, end)) for number, (start, end) in enumerate(pairwise(edges))]


def seeds_of(block: Block, plan: GenerationPlan) -> list[int]:
    """Return the seed of each response of a block: it depends on the prompt's position, and not on the block."""
    return [
        seed
        for asked in block.prompts
        for seed in np.random.default_rng([plan.seed, asked.position]).integers(2**62, size=plan.n).tolist()
    ]
