"""Runs with agents: programs of their own, which talk to the policy over a socket."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from hpc_rl.errors import EXIT_STOPPED, RunError
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.main_ppo import run_ppo
from hpc_rl.run_dir import RunDir
from tests.helpers import make_tiny_model
from tests.marks import long
from tests.rl.runs.jobs import TIMEOUT_S, Runs, metrics, ppo, same_metrics, samples, series, stop_after
from tests.rl.runs.test_run_ppo import eldest, nothing_is_left, pids, wait_for
from tests.rl.runs.test_staleness import STALE
from tests.test_docs import ROOT, code_blocks

AGENT = """
# Answers each turn with its length, three times. If there is a file "hold", it goes on when the file is gone.
import json, os, pathlib, sys, time
from openai import BadRequestError, OpenAI

folder = pathlib.Path(sys.argv[1])
while not (folder / "endpoint.json").exists() and "OPENAI_API_KEY" not in os.environ:
    time.sleep(0.05)
if "OPENAI_API_KEY" not in os.environ:
    found = json.loads((folder / "endpoint.json").read_text())
    os.environ |= {"OPENAI_BASE_URL": found["base_url"], "OPENAI_API_KEY": found["api_key"]}
run = OpenAI()
while True:
    session = run.post("/sessions", cast_to=object)
    if session is None:
        continue
    policy, messages, letters = OpenAI(base_url=session["base_url"]), session["messages"], 0
    end = {"error": "seven"} if int(session["row"]["answer"]) % 7 == 0 else None
    for number in range(3):
        while (folder / "hold").exists():
            time.sleep(0.05)
        try:
            answer = policy.chat.completions.create(model="policy", messages=messages, max_tokens=16)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            break
        turn = answer.choices[0].message
        letters += len(turn.content)
        messages = [*messages, turn.model_dump(), {"role": "user", "content": f"{len(turn.content)} letters"}]
    end = end or {"reward": {"score": letters % 5, "turns": 3}}
    run.post(f"/sessions/{session['id']}/reward", cast_to=object, body=end)
"""


def model_that_ends_turns(folder: Path) -> Path:
    """A model of which every third token ends a turn."""
    model = make_tiny_model(folder)
    ends = list(range(2, 320, 3))
    assert AutoTokenizer.from_pretrained(model).eos_token_id in ends
    GenerationConfig(eos_token_id=ends).save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "agent.py"
    file.write_text(AGENT)
    return file


@pytest.fixture(scope="module")
def served(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs with an endpoint, and no agent yet."""
    model = model_that_ends_turns(tmp_path_factory.mktemp("model") / "model")
    runs = run.without("reward.").without("model.path").without("data.max_response_length")
    own = (f"model.path={model}", "agent.endpoint=loopback", "data.max_response_length=120", "trainer.micro_tokens=512")
    return Runs([*runs.base, *own], runs._hosts)


def command(agent: Path, folder: Path, processes: int = 2) -> tuple[str, ...]:
    return f"agent.command=[{sys.executable},{agent},{folder}]", f"agent.processes={processes}"


@contextmanager
def own_agent(agent: Path, run_dir: Path) -> Iterator[None]:
    """An agent that the run does not start."""
    run_dir.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    child = os.posix_spawn(sys.executable, [sys.executable, str(agent), str(run_dir)], environ)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.slow
@pytest.mark.long
def test_the_example_of_the_docs_learns(run: Runs, tmp_path: Path) -> None:
    """To write one letter, in its first turn or in the second one."""
    (example,) = [
        block for block in code_blocks(ROOT / "docs" / "conversations.md", "python") if "# my/agent.py" in block
    ]
    (tmp_path / "agent.py").write_text(example)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": f"Write it, {n}.", "answer": "a"}) + "\n" for n in range(32)))
    model = model_that_ends_turns(tmp_path / "model")
    runs = run.without("reward.").without("model.path").without("data.").without("actor.mini_batch_size")
    assert (
        runs.without("trainer.total")(
            tmp_path / "run",
            *(f"model.path={model}", f"data.train_files={rows}", "data.max_prompt_length=60", "rollout.n=8"),
            *("data.train_batch_size=8", "data.max_response_length=60", "trainer.micro_tokens=1000"),
            *("algorithm.advantage=grpo", "actor.mini_batch_size=32", "actor.optim.lr=3e-3"),
            *("agent.endpoint=loopback", f"agent.command=[{sys.executable},{tmp_path}/agent.py]", "agent.processes=2"),
            "trainer.total_training_steps=25",
        )
        == 0
    )
    scores, turns = (series(tmp_path / "run", name) for name in ("critic/score/mean", "environment/turns/mean"))
    print([round(score, 3) for score in scores], [round(each, 3) for each in turns])
    assert series(tmp_path / "run", "environment/errors") == [0] * 25
    assert sum(scores[:3]) / 3 < 0.2
    assert sum(scores[-3:]) / 3 > 0.6
    assert turns[0] > 1.7 > turns[-1], "in the end, the first turn is right more often"


def test_engine_and_trainer_agree_about_sessions(served: Runs, agent: Path, tmp_path: Path) -> None:
    """The log-probabilities of all turns are those of the whole conversation; a mask that is off would change them."""
    options = ("rollout.calculate_log_probs=true", "algorithm.advantage=remax")
    with own_agent(agent, tmp_path), served.state(tmp_path, *options) as state:
        batch = state.batches.draw(0, lambda: False)
        assert batch is not None and batch.greedy is not None
        completions = [*batch.completions, *batch.greedy.completions]
        assert all(isinstance(one, Conversed) for one in completions)
        assert any(one.mask is not None for one in batch.completions)
        assert trainer.train(state) == 0
    for step in metrics(tmp_path):
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert step["environment/turns/max"] == 3 and step["environment/observation_length"] > 10
        assert step["environment/errors"] <= step["critic/reward_errors"] and step["reward/turns"] == 3
    last = metrics(tmp_path)[-1]
    assert last["val/environment/turns/mean"] > 2 and "val/score" in last
    assert any("letters" in sample["response"] for sample in samples(tmp_path))
    assert not (tmp_path / "endpoint.json").exists()


@pytest.mark.long
def test_a_stopped_run_goes_on_with_the_same_sessions(served: Runs, agent: Path, tmp_path: Path) -> None:
    options = ("algorithm.advantage=grpo", "rollout.temperature=0.9", "trainer.total_training_steps=3")
    assert served(tmp_path / "whole", *options, *command(agent, tmp_path)) == 0
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        assert served(tmp_path / "run", *options, *command(agent, tmp_path)) == EXIT_STOPPED
    (tmp_path / "run" / "stop").unlink()
    assert served(tmp_path / "run", *options, *command(agent, tmp_path, 1)) == 0
    same_metrics(tmp_path / "run", tmp_path / "whole")
    errors = series(tmp_path / "run", "environment/errors")
    assert len(errors) == 3 and all(each % 4 == 0 for each in errors), "those of a prompt fail together"


@pytest.mark.parametrize("partial", [long("rollout.partial=false"), long("rollout.partial=true")])
def test_agents_go_on_while_others_are_trained(served: Runs, agent: Path, tmp_path: Path, partial: str) -> None:
    runs = served.without("data.train_batch_size").without("actor.mini_batch_size")
    stale = [option for option in STALE if not option.startswith("data.max_response_length")]
    options = ("rollout.staleness=2", "algorithm.tis_cap=2", partial, *command(agent, tmp_path))
    assert runs(tmp_path / "run", *stale, *options) == 0
    steps = [step for step in metrics(tmp_path / "run") if "rollout/staleness/max" in step]
    assert len(steps) == 5 and 0 < max(step["rollout/staleness/max"] for step in steps) <= 2
    assert all(step["environment/turns/mean"] > 1 for step in steps)


@pytest.mark.long
def test_a_killed_run_takes_its_agents_along_and_is_resumed(
    served: Runs, agent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("algorithm.advantage=grpo", "trainer.save_freq=1", "trainer.total_training_steps=6")
    own = (*options, *command(agent, tmp_path))
    assert served(tmp_path / "whole", *own) == 0
    run = RunDir(tmp_path / "run")
    logs, first = run.path / "attempt-1", run.checkpoints / "step-00000001"

    def kill() -> None:
        wait_for("the first checkpoint", first.exists, TIMEOUT_S)
        (tmp_path / "hold").touch()
        os.kill(eldest(pids(logs / "driver.log")), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RunError, match=r"^the driver .* died: killed \(signal 9\)"):
        run_ppo(ppo(*served.base, *own), run=run)
    killer.join()
    assert (logs / "node0-agent1.log").exists()
    nothing_is_left(run.path)
    assert len(series(run.path, "actor/pg_loss")) < 6
    (tmp_path / "hold").unlink()
    capsys.readouterr()
    assert run_ppo(ppo(*served.base, *own), run=run) == 0
    assert "resuming after step" in capsys.readouterr().out
    nothing_is_left(run.path)
    latest = {step["step"]: step["critic/score/mean"] for step in metrics(run.path) if "critic/score/mean" in step}
    whole = {step["step"]: step["critic/score/mean"] for step in metrics(tmp_path / "whole") if step["step"] in latest}
    assert latest == pytest.approx(whole, abs=1e-3) and len(latest) == 6


def test_the_rewards_of_agent_and_function_are_added(served: Runs, agent: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def short(response, answer):\n    return {'score': 0.5, 'short': 1}\n")
    function = (f"reward.function={tmp_path}/own.py:short", "reward.workers=1", "reward.clip=[0,3]")
    options = (*function, "algorithm.advantage=grpo", "trainer.total_training_steps=1", *command(agent, tmp_path))
    assert served(tmp_path / "run", *options) == 0
    for step in metrics(tmp_path / "run"):
        assert step["critic/score/min"] >= 0.5 and step["critic/score/max"] <= 3
        assert step["reward/short"] == 1 and 0 <= step["reward/environment"] <= 4


def test_a_run_whose_agents_fail_ends_with_their_output(served: Runs, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"agent.command failed 3 times in a row.*:(\n    no module){3}$"):
        served(tmp_path, "agent.command=[sh,-c,'echo no module; exit 1']")
    assert not (tmp_path / "endpoint.json").exists()
