"""Generation with a reward model, in the engines' pool or its own, and with conversations; and after a stop."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.data.arithmetic import generate
from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.actors.pools import release_pools
from hpc_rl.rl.generation import generate as loop
from hpc_rl.rl.generation.responses import Parts, read_responses
from hpc_rl.rl.generation.run import run_generation
from hpc_rl.rl.loop.scoring import ModelScoring
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.run_dir import RunDir
from tests.helpers import make_tiny_model
from tests.rl.runs.jobs import Hosts, metrics, stop_after
from tests.rl.runs.test_rewards import make_reward_model
from tests.tracking.runs import plot_titles

PROMPTS, N = 7, 2
DIVIDED = ("trainer.n_gpus_per_node=3", "pools={spec: {gen: [1], judges: [2]}, roles: {reward: judges}}")


class Generations:
    """Generations one after the other, which share options."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        generate(folder, n_train=PROMPTS, n_val=1)
        self.model = make_tiny_model(folder / "model")
        self.reward = make_reward_model(folder / "reward")
        self._options = [
            *(f"model.path={self.model}", f"data.files={folder}/train.jsonl", "trainer.device=cpu"),
            *("data.max_prompt_length=40", "data.max_response_length=6", f"rollout.n={N}", "rollout.max_num_seqs=4"),
            *(f"reward.model={self.reward}", "trainer.micro_tokens=64", "trainer.logger=[]"),
        ]
        self._hosts = hosts

    def __call__(self, run_dir: Path, *overrides: str, attempt: int = 1, kind: str = "generate") -> int:
        """Run to the end and return the exit code."""
        config = compose(kind, [*self._options, *overrides])
        assert isinstance(config, GenerateConfig)
        logs = run_dir / f"attempt-{attempt}"
        logs.mkdir(parents=True)
        self._hosts.all_free()
        with pytest.MonkeyPatch.context() as patch:
            self._hosts.stand_in(patch)
            try:
                return run_generation(config, RunDir(run_dir), logs)
            finally:
                release_pools(str(logs))


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory, hosts: Hosts) -> Generations:
    return Generations(tmp_path_factory.mktemp("generation"), hosts)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return list(read_responses(run_dir / "responses.jsonl"))


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    """The tokens of prompt and response that the reward model of `shared` has scored, in this order."""
    return []


@pytest.fixture(scope="module")
def shared(generation: Generations, asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose reward model is in the engines' pool."""
    run_dir = tmp_path_factory.mktemp("shared")
    start = ModelScoring.start

    def noted(
        self: ModelScoring, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str]
    ) -> Pending[Scores]:
        both = zip(prompts, completions, strict=True)
        asked.extend([*one.token_ids.tolist(), *other.token_ids.tolist()] for one, other in both)
        return start(self, prompts, completions, texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelScoring, "start", noted)
        assert generation(run_dir) == 0
    return run_dir


def test_scores_are_those_of_transformers(generation: Generations, shared: Path, asked: list[list[int]]) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(generation.reward)
    rows = rows_of(shared)
    assert len(rows) == PROMPTS * N and len({row["score"] for row in rows}) > N
    for row, ids in zip(rows, asked, strict=True):
        with torch.no_grad():
            expected = model.score(model.base_model(torch.tensor([ids])).last_hidden_state[0, -1])
        assert row["score"] == pytest.approx(float(expected), abs=1e-4)
    means = [step["generate/score"] for step in metrics(shared)]
    assert means[-1] == pytest.approx(sum(row["score"] for row in rows) / len(rows), abs=1e-4)
    assert plot_titles(shared) >= {"Score", "Response length"}
    assert len(means) == 4 and means[0] == pytest.approx(sum(row["score"] for row in rows[:4]) / 4, abs=1e-4)


def test_ranks_of_its_own_score_the_same(generation: Generations, shared: Path, tmp_path: Path) -> None:
    assert generation(tmp_path, *DIVIDED) == 0
    for own, other in zip(rows_of(tmp_path), rows_of(shared), strict=True):
        assert own["score"] == pytest.approx(other["score"], abs=1e-4)
        assert {**own, "score": 0} == {**other, "score": 0, "logprob": own["logprob"]}


def test_a_restart_scores_only_what_is_left(
    generation: Generations, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "MOST_SCORING", 1)
        stop_after(patch, 1)
        assert generation(tmp_path) == EXIT_STOPPED
    (tmp_path / "stop").unlink()
    finished = {path.name for path in (tmp_path / "response-parts").glob("*.jsonl")}
    assert finished and len(finished) < 4
    written: list[str] = []
    write = Parts.write
    monkeypatch.setattr(
        Parts, "write", lambda self, number, *rest: (written.append(f"{number:06d}.jsonl"), write(self, number, *rest))
    )
    assert generation(tmp_path, attempt=2) == 0
    assert {*written} | finished == {f"{number:06d}.jsonl" for number in range(4)} and not {*written} & finished
    assert [row["response"] for row in rows_of(tmp_path)] == [row["response"] for row in rows_of(shared)]
    with pytest.raises(UserError, match=r"has responses that were generated with other settings \(columns changed\)"):
        generation(tmp_path, f"reward.model={generation.model}", attempt=3)


ECHO = '''
import os, time
from pathlib import Path

class Echo:
    """Answers a turn with its length. It writes down what it hears."""

    def __init__(self, rewards=True):
        self.rewards = rewards

    def reset(self, answer, **row):
        if int(answer) % 7 == 0:
            raise OSError("seven")
        self.answer, self.turns = answer, 0

    def step(self, text):
        self.turns += 1
        with Path(__file__).with_name("heard.txt").open("a") as log:
            log.write(f"{self.answer}\\n")
        found = f"{len(text)} letters", self.turns == 2
        return (found[0], float(len(text) % 3), found[1], {}) if self.rewards else found
'''


@pytest.fixture(scope="module")
def talks(generation: Generations, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of conversations with a model of which every third token ends a turn."""
    folder = tmp_path_factory.mktemp("talks")
    (folder / "echo.py").write_text(ECHO)
    GenerationConfig(eos_token_id=[*range(2, 320, 3)]).save_pretrained(make_tiny_model(folder / "model"))
    own = ("reward.model=null", f"model.path={folder}/model", f"environment.name={folder}/echo.py:Echo")
    return [*own, "environment.workers=2", "data.max_prompt_length=64", "data.max_response_length=120"]


def test_conversations_are_written_and_a_restart_repeats_none(
    generation: Generations, talks: list[str], tmp_path: Path
) -> None:
    heard = Path(talks[1].removeprefix("model.path=")).with_name("heard.txt")
    assert generation(tmp_path / "whole", *talks, "rollout.logprobs=true") == 0
    rows, turns = rows_of(tmp_path / "whole"), len(heard.read_text().split())
    assert len(rows) == PROMPTS * N and {row["finish"] for row in rows} >= {"stopped"}
    for row in rows:
        roles = [message["role"] for message in row["conversation"]]
        if int(row["answer"]) % 7 == 0:
            assert roles == ["user", "assistant"] and row["score"] is None and row["tokens"] == 1
            continue
        assert roles[:2] == ["user", "assistant"] and row["conversation"][-1]["role"] == "assistant"
        assert set(roles[2::2]) <= {"user"} and row["score"] in range(5)
        assert row["conversation"][0]["content"] == row["prompt"][0]["content"]
        assert len(base64.b64decode(row["logprobs"])) == 4 * row["tokens"]
    assert any(len(row["conversation"]) == 4 for row in rows)
    blocks = [line for line in metrics(tmp_path / "whole") if "environment/turns/max" in line]
    assert max(block["environment/turns/max"] for block in blocks) == 2
    assert max(block["environment/observation_length"] for block in blocks) > 0
    heard.unlink()
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        patch.setattr(loop, "MOST_SCORING", 1)
        assert generation(tmp_path / "run", *talks, "rollout.logprobs=true") == EXIT_STOPPED
    (tmp_path / "run" / "stop").unlink()
    finished = [*(tmp_path / "run" / "response-parts").glob("*.jsonl")]
    assert finished and len(finished) < 4
    written = {row["answer"] for path in finished for row in read_responses(path)}
    heard.unlink()
    assert generation(tmp_path / "run", *talks, "rollout.logprobs=true", attempt=2) == 0
    assert [row["conversation"] for row in rows_of(tmp_path / "run")] == [row["conversation"] for row in rows]
    assert [row["score"] for row in rows_of(tmp_path / "run")] == [row["score"] for row in rows]
    again = heard.read_text().split()
    assert again and written and not written & {*again} and len(again) < turns


def test_environments_without_a_reward_and_functions(generation: Generations, talks: list[str], tmp_path: Path) -> None:
    silent = (*talks, "environment.kwargs.rewards=false")
    assert generation(tmp_path / "none", *silent) == 0
    assert {row["score"] for row in rows_of(tmp_path / "none")} == {None}
    scored = (*silent, "reward.function=format", "reward.kwargs={pattern: '(?s).*'}", "reward.workers=1")
    assert generation(tmp_path / "function", *scored) == 0
    for row in rows_of(tmp_path / "function"):
        assert row["score"] == (None if int(row["answer"]) % 7 == 0 else 1.0)


def test_an_evaluation_of_conversations(generation: Generations, talks: list[str], tmp_path: Path) -> None:
    assert generation(tmp_path, *talks, "eval.correct=2", kind="eval") == 0
    found = json.loads((tmp_path / "eval.json").read_text())
    (data,) = found["data"]
    values = [row["score"] for row in rows_of(tmp_path) if row["score"] is not None]
    assert found["reward"].endswith("echo.py:Echo") and data["failed"] == PROMPTS * N - len(values)
    assert data["metrics"]["score"]["value"] == pytest.approx(sum(values) / len(values))
    with pytest.raises(UserError, match=r"Echo has no method `reward`, and no reward is set"):
        only = Path(talks[1].removeprefix("model.path=")).with_name("only.py")
        only.write_text("class Echo:\n    def say(self, x: int) -> int:\n        '''Say.'''\n        return x\n")
        generation(tmp_path / "no", *talks, f"environment.name={only}:Echo", kind="eval")


def test_several_outputs_need_weights(generation: Generations, tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "two", outputs=2)
    with pytest.raises(UserError, match=r"^reward\.model .* has 2 outputs, not 1: set reward\.weights to one number"):
        generation(tmp_path / "without", f"reward.model={folder}")
    with pytest.raises(UserError, match=r"^reward\.model .* has 1 output, not 2: set reward\.weights"):
        generation(tmp_path / "with", "reward.weights=[1,0.5]")


def test_a_model_without_a_trained_head_is_refused(generation: Generations, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.model .* has no trained head 'score'"):
        generation(tmp_path, f"reward.model={generation.model}")
