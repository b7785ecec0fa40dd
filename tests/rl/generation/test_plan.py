"""The plan of a generation, its blocks, and the files of finished blocks."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.environments.protocol import EpisodeResult
from hpc_rl.errors import RunError, UserError
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.generation.plan import Block, PromptFile, blocks_of, make_plan, seeds_of
from hpc_rl.rl.generation.responses import Parts, finish_of, read_responses, response_rows
from hpc_rl.rl.generation.setup import described_engine
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.run_dir import RunDir

REQUIRED = ("model.path=/model", "data.files=a.jsonl", "trainer.device=cpu", "data.prompt_key=q", "data.answer_key=a")


def config(*overrides: str) -> GenerateConfig:
    found = compose("generate", [*REQUIRED, *overrides])
    assert isinstance(found, GenerateConfig)
    return found


BASE = config()


def prompt(number: int, **row: Any) -> Prompt:
    ids = np.array([number, 1], np.int32)
    return Prompt(ids, str(number), {"q": f"{number}?", "a": str(number), "more": number, **row}, f"<{number}?>")


def sources(*sizes: int) -> list[PromptFile]:
    return [PromptFile(f"{c}.jsonl", [prompt(i) for i in range(size)]) for c, size in zip("abc", sizes, strict=False)]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 12))
def test_blocks_hold_every_prompt_once_and_in_order(sizes: list[int], n: int, seqs: int) -> None:
    given_sources = sources(*sizes)
    plan = make_plan(BASE.updated("rollout.n", n).updated("rollout.max_num_seqs", seqs), given_sources, "hf")
    blocks = blocks_of(plan, given_sources)
    assert [block.number for block in blocks] == list(range(plan.blocks))
    places = [(asked.source, asked.index) for block in blocks for asked in block.prompts]
    assert places == [(source.name, i) for source in given_sources for i in range(len(source.prompts))]
    assert {len(block.prompts) for block in blocks[:-1]} <= {plan.block_prompts}
    assert n * (plan.block_prompts - 1) < seqs <= n * plan.block_prompts


def test_seeds_belong_to_prompts_and_not_to_blocks() -> None:
    found = []
    for seqs in (4, 8):
        plan = make_plan(config("rollout.n=2", f"rollout.max_num_seqs={seqs}"), sources(6), "hf")
        found.append([seed for block in blocks_of(plan, sources(6)) for seed in seeds_of(block, plan)])
    assert found[0] == found[1] and len(set(found[0])) == 12
    other = make_plan(config("rollout.n=2", "trainer.seed=2"), sources(6), "hf")
    assert seeds_of(blocks_of(other, sources(6))[0], other)[:2] != found[0][:2]


def completions(count: int) -> list[Completion]:
    return [
        Completion(np.array([5, 7], np.int32), np.array([-0.5, -1.25 - i], np.float32), finished=i % 2 == 0)
        for i in range(count)
    ]


def test_rows_have_fixed_names_and_the_other_columns_of_the_data() -> None:
    given_config = config("rollout.n=2", "rollout.logprobs=true")
    given_sources = [PromptFile("a.jsonl", [prompt(4, score="theirs")])]
    (block,) = blocks_of(make_plan(given_config, given_sources, "hf"), given_sources)
    scores = Scores(np.array([0.5, np.nan], np.float32), [(1, "failed")])
    first, second = response_rows(block, completions(2), ["x", "y"], scores, given_config.data, logprobs=True)
    assert first == {
        "more": 4,
        "data": "a.jsonl",
        "index": 0,
        "prompt": "4?",
        "answer": "4",
        "sample": 0,
        "response": "x",
        "tokens": 2,
        "logprob": -1.75,
        "finish": "stopped",
        "logprobs": first["logprobs"],
        "score": 0.5,
    }
    assert np.frombuffer(base64.b64decode(first["logprobs"]), "<f4").tolist() == [-0.5, -1.25]
    assert (second["sample"], second["finish"], second["score"]) == (1, "truncated", None)
    (plain, _) = response_rows(block, completions(2), ["x", "y"], None, given_config.data, logprobs=False)
    assert not {"logprobs", "score"} & plain.keys(), "a score of the data is not one of the response"


def test_rows_of_conversations_have_the_messages_and_what_the_model_sampled() -> None:
    given_config = config("rollout.logprobs=true", "environment.tools=[python]")
    given_sources = [PromptFile("a.jsonl", [prompt(4)])]
    (block,) = blocks_of(make_plan(given_config, given_sources, "hf"), given_sources)
    mask = np.array([True, False, False, True])
    logprobs = np.array([-0.5, -9, -9, -1.25], np.float32)
    messages = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": Path("x")}]
    talk = Conversed(np.arange(4), logprobs, True, mask=mask, outcome=EpisodeResult(1.0), messages=messages, turns=2)
    (row,) = response_rows(block, [talk], ["the last turn"], None, given_config.data, logprobs=True)
    assert (row["response"], row["tokens"], row["logprob"], row["finish"]) == ("the last turn", 2, -1.75, "stopped")
    assert row["conversation"] == [messages[0], {"role": "assistant", "content": "x"}]
    for finished, error, finish in ((False, "no disk", "failed"), (False, None, "truncated"), (True, "no", "stopped")):
        assert finish_of(replace(talk, finished=finished, outcome=EpisodeResult(None, error=error))) == finish
    assert np.frombuffer(base64.b64decode(row["logprobs"]), "<f4").tolist() == [-0.5, -1.25]


def test_a_response_without_logprobs_has_no_sum() -> None:
    (block, *_) = blocks_of(make_plan(BASE, sources(1), "openai"), sources(1))
    without = Completion(np.array([1, 2], np.int32), np.full(2, np.nan, np.float32), True)
    (row,) = response_rows(block, [without], ["x"], None, BASE.data, logprobs=False)
    assert row["logprob"] is None and row["tokens"] == 2


def test_responses_depend_on_the_server_of_others() -> None:
    server = ("rollout.name=openai", "rollout.openai.base_url=http://a/v1", "rollout.openai.timeout_s=5")
    assert described_engine(config(*server)) == "openai: /model"
    assert described_engine(config(*server, "rollout.openai.model=large")) == "openai: large"
    assert described_engine(BASE) == "hf"


def rows(block: Block) -> list[dict[str, Any]]:
    return [{"index": asked.index} for asked in block.prompts]


def test_blocks_are_joined_in_the_order_of_the_data(tmp_path: Path) -> None:
    run, given_sources = RunDir(tmp_path), sources(5)
    plan = make_plan(config("rollout.max_num_seqs=2"), given_sources, "hf")
    blocks = blocks_of(plan, given_sources)
    for number in (2, 0):
        Parts(run, plan).write(number, rows(blocks[number]), {})
    parts = Parts(run, plan)
    assert parts.finished() == {0, 2} and not parts.is_joined
    parts.discard([2])
    assert parts.finished() == {0}
    for number in (2, 1):
        parts.write(number, rows(blocks[number]), {})
    parts.join()
    assert [row["index"] for row in read_responses(run.responses)] == list(range(5))
    assert not list(run.response_parts.glob("*.jsonl"))
    again = Parts(run, plan)
    assert again.is_joined and again.finished() == {0, 1, 2}
    again.join()


@pytest.mark.parametrize(
    "override, changed",
    [
        ("model.path=/other", "model"),
        ("rollout.n=3", "n"),
        ("trainer.seed=2", "seed"),
        ("rollout.temperature=0.5", "sampling"),
        ("reward.function=exact", "columns"),
        ("data.answer_key=more", "columns"),
        ("rollout.max_num_seqs=3", "block_prompts"),
    ],
)
def test_blocks_of_another_plan_are_refused(tmp_path: Path, override: str, changed: str) -> None:
    run, settings = RunDir(tmp_path), ("rollout.n=2", "rollout.max_num_seqs=8")
    Parts(run, make_plan(config(*settings), sources(5), "hf")).write(0, [], {})
    Parts(run, make_plan(config(*settings), sources(5), "hf"))
    with pytest.raises(UserError, match=rf"generated with other settings \(.*{changed}.* changed\)"):
        Parts(run, make_plan(config(*settings, override), sources(5), "hf"))
    with pytest.raises(UserError, match="digest"):
        Parts(run, make_plan(config(*settings), [PromptFile("a.jsonl", [prompt(i + 1) for i in range(5)])], "hf"))
    with pytest.raises(UserError, match="digest"):
        Parts(run, make_plan(config(*settings), [PromptFile("a.jsonl", [prompt(i, a="0") for i in range(5)])], "hf"))
    assert json.loads((run.response_parts / "plan.json").read_text())["n"] == 2


def test_another_plan_replaces_one_of_which_nothing_is_finished(tmp_path: Path) -> None:
    """A mistake in the reward, or too many sequences for the memory, is repaired in the same run."""
    run = RunDir(tmp_path)
    for n in (2, 3):
        parts = Parts(run, make_plan(config(f"rollout.n={n}"), sources(5), "hf"))
        assert json.loads((run.response_parts / "plan.json").read_text())["n"] == n
    parts.write(0, [], {})
    with pytest.raises(UserError, match="generated with other settings"):
        Parts(run, make_plan(config("rollout.n=2"), sources(5), "hf"))


@pytest.mark.parametrize("option, changed", [("model.path", "model_files"), ("reward.model", "columns")])
def test_blocks_of_a_model_that_was_written_again_are_refused(tmp_path: Path, option: str, changed: str) -> None:
    run, weights = RunDir(tmp_path / "run"), tmp_path / "model" / "model.safetensors"
    for folder in (run.path, weights.parent):
        folder.mkdir()
    weights.write_text("old")
    settings = config(f"{option}={weights.parent}")
    Parts(run, make_plan(settings, sources(5), "hf")).write(0, [], {})
    (weights.parent / ".nfs1").touch()
    Parts(run, make_plan(settings, sources(5), "hf"))
    weights.write_text("new")
    os.utime(weights, ns=(0, 0))
    with pytest.raises(UserError, match=rf"other settings \({changed} changed\)"):
        Parts(run, make_plan(settings, sources(5), "hf"))


def test_a_full_disk_is_explained_when_blocks_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, given_sources = RunDir(tmp_path), sources(1)
    parts = Parts(run, make_plan(BASE, given_sources, "hf"))
    parts.write(0, [{"index": 0}], {})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(
            RunError, match=r"responses.jsonl could not be written: No space left .*; free space or raise"
        ):
            parts.join()
    assert not parts.is_joined and parts.finished() == {0}
    parts.join()
    assert parts.is_joined


@pytest.mark.parametrize(
    "override", ["reward.functions=[exact,format]", "reward.weights=[1,5]", "reward.kwargs={format: {a: 1}}"]
)
def test_a_plan_depends_on_several_rewards(override: str) -> None:
    several = ("reward.functions=[gsm8k,format]", "reward.weights=[1,0.1]")
    assert make_plan(config(*several), sources(5), "hf") != make_plan(config(*several, override), sources(5), "hf")


@pytest.mark.parametrize(
    "override", ["reward.workers=9", "reward.timeout_s=9", "environment.workers=9", "environment.timeout_s=9"]
)
def test_a_plan_does_not_depend_on_the_speed_of_the_reward(override: str) -> None:
    own = ("reward.function=exact", "environment.name=my/env.py:Own")
    assert make_plan(config(*own), sources(5), "hf") == make_plan(config(*own, override), sources(5), "hf")


@pytest.mark.parametrize(
    "override", ["environment.max_turns=9", "environment.tools=[python]", "environment.kwargs.a=1"]
)
def test_a_plan_depends_on_the_environment(override: str) -> None:
    plan, own = make_plan(config(), sources(5), "hf"), "environment.name=my/env.py:Own"
    assert "environment" not in plan.columns
    assert plan != make_plan(config(own), sources(5), "hf") != make_plan(config(own, override), sources(5), "hf")
