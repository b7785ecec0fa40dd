"""From a configuration to a run that is ready to generate: workers, data, rewards, and the blocks that are left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl.config.rl.generate import EvalConfig, GenerateConfig
from hpc_rl.config.rl.pools import pool_of, pool_spec
from hpc_rl.config.rl.rollout import engine_name
from hpc_rl.data.lazy import Subsequence
from hpc_rl.data.templates.chat import chat_template, template_remarks
from hpc_rl.errors import RunError
from hpc_rl.rewards.scorer import open_scorer
from hpc_rl.rl.actors.calls import MODEL_LIMIT, wait_for_all
from hpc_rl.rl.actors.pools import create_pools
from hpc_rl.rl.converse.conversations import Conversations
from hpc_rl.rl.converse.environment import Environment
from hpc_rl.rl.converse.environment_hosts import open_environments
from hpc_rl.rl.generation.generate import Generation
from hpc_rl.rl.generation.measures import combined
from hpc_rl.rl.generation.plan import GenerationPlan, PromptFile, blocks_of, make_plan
from hpc_rl.rl.generation.responses import COLUMNS, Parts
from hpc_rl.rl.loop.prompt_data import PromptLoader
from hpc_rl.rl.loop.rows import decide_rows
from hpc_rl.rl.loop.scoring import EnvironmentScoring, FunctionScoring, ModelScoring, Scoring
from hpc_rl.rl.rollout.engine import Placement, Sampling
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.rollout.rollout import CLOSE_TIMEOUT_S, Fleet
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.models.causal_lm import load_tokenizer
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_sources(
    config: GenerateConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] | None,
    run: RunDir,
    stopping: Stopping,
) -> list[PromptFile]:
    """Load the prompts of each data file, and print their counts.

    Args:
        tools: see PromptLoader.

    Raises:
        UserError: the data is not valid.
        Stopped: the run stops before the data is tokenized.
    """
    loader = PromptLoader(config, tokenizer, tools, run, stopping)
    sources, split = [], "test" if isinstance(config, EvalConfig) else "train"
    for name in config.data.files:
        prompts, counts = loader.load([name], split)
        kept = Subsequence(prompts, 0, config.data.max_prompts)
        limit = f"; the first {len(kept):,} are used" if len(kept) < len(prompts) else ""
        print(f"{name}: {counts}{limit}", flush=True)
        replaced = sorted(COLUMNS & kept[0].row.keys() - {config.data.prompt_key, config.data.answer_key})
        if replaced:
            print(
                f"warning: {name}: these columns of the data are left out, because responses.jsonl has columns of the "
                f"same name: {', '.join(replaced)}",
                flush=True,
            )
        sources.append(PromptFile(name, kept))
    return sources


@dataclass(frozen=True)
class Workers:
    """The processes of a run."""

    fleet: Fleet
    """The engines."""
    judges: WorkerGroup | None
    """The ranks of the reward model, if there is one."""


def start_workers(config: GenerateConfig, logs: Path) -> Workers:
    """Start the engines and the reward model in their pools, and wait until they have loaded their models.

    Raises:
        UserError: the cluster is too small, an engine refuses the configuration, or the reward model does not fit.
        RunError: a process did not start in time, or died.
    """
    device, limit_s = config.trainer.computes_on, config.trainer.model_timeout_s
    pools = create_pools(pool_spec(config), device, config.ray.start_timeout_s, str(logs), config.pools.strategy)
    pool, judging = pool_of(config, "rollout"), pool_of(config, "reward") if "reward" in config.roles else None
    share = 0.5 if pool == judging else 1.0
    fleet = Fleet(config, pools[pool], Placement(device, gpu_share=share), logs)
    starting = [fleet.engines.call("start")]
    if pool == judging:  # vLLM measures the free memory of the GPU, which has to stay constant meanwhile
        wait_for_all(starting, "engines", MODEL_LIMIT, limit_s)
    judges = None
    if judging is not None:
        judges = WorkerGroup(config, pools[judging], frozenset({"reward"}), share, logs)
        starting.append(judges.start())
    wait_for_all(starting, "models", MODEL_LIMIT, limit_s)
    if judges is not None:
        decide_rows(config, [judges])
    return Workers(fleet, judges)


@dataclass(frozen=True)
class Prepared:
    """The prompts of a run, and what earlier attempts have finished."""

    tokenizer: PreTrainedTokenizerBase
    environment: Environment | None
    sources: list[PromptFile]
    plan: GenerationPlan
    parts: Parts
    stopping: Stopping


def prepare(
    config: GenerateConfig,
    run: RunDir,
    stopping: Stopping,
    logs: Path,
    closing: ExitStack,
    own: RunDir | None = None,
) -> Prepared:
    """Load the prompts, and find out what earlier attempts have finished.

    Args:
        run: the one of this job.
        logs: folder of the environments' logs.
        closing: closes the environment in the end.
        own: its files are those of the responses, if they are not those of `run`.

    Raises:
        UserError: the environment or the data is not valid, or the run directory has responses of another plan.
        Stopped: the run stops before the data is tokenized.
    """
    tokenizer = load_tokenizer(config.model)
    tokenizer.chat_template = chat_template(tokenizer, config.data)
    for line in template_remarks(tokenizer, learns=False):
        print(line, flush=True)
    environment = None
    if config.environment.is_used:
        environment = Environment(config, tokenizer, open_environments(config, logs))
        closing.callback(environment.close)
    sources = load_sources(config, tokenizer, environment.schemas if environment else None, run, stopping)
    plan = make_plan(config, sources, described_engine(config))
    return Prepared(tokenizer, environment, sources, plan, Parts(own or run, plan), stopping)


def described_engine(config: GenerateConfig) -> str:
    """Return on which program the responses of a run depend. A server may move to another address."""
    name, server = engine_name(config.rollout, config.trainer.computes_on), config.rollout.openai
    return name if server.base_url is None else f"{name}: {server.model or config.model.path}"


def open_queue(config: GenerateConfig, fleet: Fleet, revive: Callable[[], None] | None = None) -> RequestQueue:
    """Return the queue of engines that have started.

    Args:
        revive: see RequestQueue.
    """
    rollout, start_s = config.rollout, config.trainer.model_timeout_s
    return RequestQueue(fleet.engines, rollout.max_num_seqs, rollout.stall_s, start_s, fleet.replace, revive)


def close_engines(fleet: Fleet, queue: RequestQueue) -> None:
    """End the engines after a generation that has succeeded."""
    try:
        fleet.engines.subset(queue.loaded).call("close").wait(CLOSE_TIMEOUT_S)  # one that still loads would not answer
    except RunError as error:
        print(f"warning: {error}", flush=True)


def open_generation(
    config: GenerateConfig, prepared: Prepared, workers: Workers, queue: RequestQueue, tracker: Tracker
) -> Generation:
    """Return what the loop works with.

    Raises:
        UserError: the reward function cannot be loaded.
    """
    plan, finished = prepared.plan, prepared.parts.finished()
    if finished:
        print(f"resuming: {len(finished):,} of {plan.blocks:,} blocks of responses are finished", flush=True)
    rollout, environment = config.rollout, prepared.environment
    return Generation(
        config=config,
        tokenizer=prepared.tokenizer,
        plan=plan,
        blocks=[block for block in blocks_of(plan, prepared.sources) if block.number not in finished],
        parts=prepared.parts,
        queue=queue,
        respondent=Conversations(queue, environment, config) if environment else queue,
        engines=len(workers.fleet.engines.actors),
        sampling=Sampling(config.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k),
        scoring=open_scoring(config, workers.judges, prepared.tokenizer, environment),
        tracker=tracker,
        stopping=prepared.stopping,
        done=len(finished),
        measures=combined(prepared.parts.measured()),
    )


def open_scoring(
    config: GenerateConfig,
    judges: WorkerGroup | None,
    tokenizer: PreTrainedTokenizerBase,
    environment: Environment | None = None,
) -> Scoring | None:
    """Open the configured source of rewards; None if there is none."""
    if environment is not None:
        if not config.scores:
            return None
        alone = config.updated("reward.clip", None).updated("reward.on_error", None)
        other = open_scoring(alone, judges, tokenizer) if config.reward.sources else None
        missing = None if config.needs_scores else math.nan  # no score, which is no failure
        return EnvironmentScoring(environment, other, config.reward, tokenizer, missing)
    if judges is not None:
        return ModelScoring(judges, config.reward)
    return FunctionScoring(open_scorer(config.reward), tokenizer) if config.reward.sources else None
