"""What scores a run's responses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.loop import trainer
from hpc_rl.rl.loop.draws import greedy_sampling
from tests.finetune.jobs import run_here
from tests.helpers import make_tiny_model, make_tokenizer
from tests.http_server import serving
from tests.rl.runs.jobs import Runs, metrics, same_metrics

OWN = """
import os

def score(response, answer, row, prompt, scale=1.0):
    assert answer == row["answer"] and prompt.endswith("assistant\\n")
    if len(response) % 3 == 0:
        raise ValueError("a length that I do not like")
    return scale * len(response)

def broken(response, answer):
    return undefined_name

def narrow(response):
    return 1.0

def outage(response, answer, switch):
    if os.path.exists(switch):
        raise OSError("the service does not answer")
    return len(response)

def flat(response, answer):
    return {"score": 0.25, "letters": sum(map(str.isalpha, response)), "constant": 3, "text": response}
"""


@pytest.fixture(scope="module")
def plain(run: Runs) -> Runs:
    """Without a reward."""
    return run.without("reward.")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "mine.py"
    file.write_text(OWN)
    return file


def test_a_function_of_your_own(plain: Runs, tmp_path: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = ("reward.workers=2", f"reward.function={own}:score", "reward.kwargs={scale: 0.1}", "reward.on_error=-5")
    assert plain(tmp_path, *function) == 0
    for step in metrics(tmp_path):
        assert 0 < step["critic/reward_errors"] < 16
        assert step["critic/score/min"] == -5 and step["critic/score/max"] > 0
    said = capsys.readouterr().err
    assert "warning: scoring failed, the score is -5: ValueError: a length that I do not like; response:" in said


def test_failures_are_left_out(plain: Runs, tmp_path: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plain(tmp_path, "reward.workers=2", f"reward.function={own}:score", "reward.clip=[0,4]") == 0
    for step in metrics(tmp_path):
        assert 0 < step["critic/reward_errors"] < 16
        assert step["critic/score/min"] > 0 and step["critic/score/max"] <= 4  # a failure would be a score of 0
    assert "warning: scoring failed, the response is left out: ValueError: a length" in capsys.readouterr().err
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {sample["score"] is None for sample in samples} == {True, False}


def test_a_function_that_never_works_ends_the_run(plain: Runs, tmp_path: Path, own: Path) -> None:
    message = r"step 1: none of 16 responses could be scored; the first error: NameError: .*undefined_name"
    with pytest.raises(RunError, match=message):
        plain(tmp_path, "reward.workers=1", f"reward.function={own}:broken")


def test_a_step_without_any_score_ends_the_run_after_it_has_saved(
    plain: Runs, tmp_path: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward fails in step 3, and works again in the next attempt."""
    options = ("reward.workers=1", "trainer.total_training_steps=4", f"reward.function={own}:outage")
    switch = tmp_path / "outage"
    run_dir = tmp_path / "run"
    assert plain(tmp_path / "whole", *options, "reward.kwargs={switch: /nowhere}") == 0
    message = r"step 3: none of 16 responses could be scored; .*; saved after step 2: repair the reward and start"
    with (
        plain.state(run_dir, *options, f"reward.kwargs={{switch: '{switch}'}}") as state,
        pytest.MonkeyPatch.context() as patch,
    ):
        note = state.stopping.note_step
        fail = lambda done: (note(done), switch.touch() if state.step == 2 else None)  # noqa: E731
        patch.setattr(state.stopping, "note_step", fail)
        with pytest.raises(RunError, match=message):
            trainer.train(state)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000002"]
    switch.unlink()
    capsys.readouterr()
    assert plain(run_dir, *options, f"reward.kwargs={{switch: '{switch}'}}") == 0
    assert "resuming after step 2" in capsys.readouterr().out
    same_metrics(run_dir, tmp_path / "whole")


def test_a_function_of_the_wrong_signature_is_refused(plain: Runs, tmp_path: Path, own: Path) -> None:
    with pytest.raises(UserError, match=r"has the parameters \(response\), but is called with \(response, answer\)"):
        plain(tmp_path, "reward.workers=1", f"reward.function={own}:narrow")


def test_components_and_steps_without_signal(
    plain: Runs, tmp_path: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All responses score the same, so three steps teach nothing, and the components of the score differ."""
    options = ("algorithm.advantage=grpo", "trainer.total_training_steps=3", "reward.workers=1")
    assert plain(tmp_path, *options, f"reward.function={own}:flat") == 0
    steps = metrics(tmp_path)
    for step in steps:
        assert (step["reward_std"], step["frac_reward_zero_std"], step["critic/score/mean"]) == (0, 1, 0.25)
        assert step["reward/constant"] == 3 and step["reward/letters"] > 0 and "reward/text" not in step
    assert steps[-1]["val/reward/constant"] == 3
    out = capsys.readouterr().out
    assert out.count("gave no learning signal") == 1
    assert (
        "warning: the last 3 steps gave no learning signal: all advantages are 0, because every response scored 0.25"
        in out
    )


class Server(BaseHTTPRequestHandler):
    """Scores by the length of the response."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"score": len(asked["response"]) / 10}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Server) as address:
        yield f"{address}/score"


def test_an_endpoint(plain: Runs, tmp_path: Path, url: str) -> None:
    assert plain(tmp_path, f"reward.url={url}") == 0
    for step in metrics(tmp_path):
        assert step["critic/reward_errors"] == 0 and step["critic/score/max"] > 0


def make_reward_model(folder: Path, vocab: int = 320, outputs: int = 1) -> Path:
    """A sequence classifier whose head is not that of a new one."""
    from transformers import AutoModelForSequenceClassification

    make_tiny_model(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=outputs)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(outputs, 32, generator=torch.Generator().manual_seed(3)))
    model.save_pretrained(folder)
    make_tokenizer(vocab).save_pretrained(folder)
    return folder


def train_reward_model(folder: Path, model: Path, *overrides: str) -> Path:
    """Train one as `submit rm` does, and return the folder that it exports."""
    rows = [{"prompt": f"{n} + 1?", "response": f"{n + 1}, " * (n % 4), "long": n % 4, "odd": n % 2} for n in range(16)]
    (folder / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *("--kind", "rm", f"model.path={model}", f"data.train_files={folder / 'rated.jsonl'}", "optim.lr=2e-2"),
        *("data.label_keys=[long,odd]", "data.train_batch_size=4", "data.max_length=256", "trainer.device=cpu"),
        *("trainer.total_training_steps=4", "trainer.export=true", *overrides),
    ]
    assert run_here(words, folder / "rm") == 0
    return folder / "rm" / "model"


def test_a_reward_model_on_the_same_pool_and_on_its_own(plain: Runs, tmp_path: Path) -> None:
    model = f"reward.model={make_reward_model(tmp_path / 'reward')}"
    assert plain(tmp_path / "shared", model) == 0
    found = metrics(tmp_path / "shared")
    assert all(step["critic/score/min"] < step["critic/score/max"] for step in found)

    pools = "pools={spec: {train: [1], judge: [2]}, roles: {reward: judge}}"
    assert plain(tmp_path / "own", model, "trainer.n_gpus_per_node=3", pools) == 0
    same_metrics(tmp_path / "own", tmp_path / "shared")


def test_a_reward_model_scores_as_transformers_does(plain: Runs, tmp_path: Path) -> None:
    """Greedy responses, scored again one by one by the result of `submit rm`: the weighted sum of its two outputs."""
    from transformers import AutoModelForSequenceClassification

    folder = train_reward_model(tmp_path, make_tiny_model(tmp_path / "model"))
    with plain.state(tmp_path / "run", f"reward.model={folder}", "reward.weights=[2,-0.5]") as state:
        prompts = state.val
        greedy = greedy_sampling(state.config)
        asked = [state.rollout.queue.ask(prompt, [(0, greedy)]) for prompt in prompts]
        state.rollout.queue.wait(asked)
        completions = [completion for one in asked for completion in one.completions()]
        scores = state.scoring.start(prompts, completions).wait().values
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    for prompt, completion, score in zip(prompts, completions, scores, strict=True):
        ids = torch.tensor([[*prompt.token_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            first, second = model.score(model.base_model(ids).last_hidden_state[0, -1]).tolist()
        expected = 2 * first - 0.5 * second
        assert score == pytest.approx(float(expected), abs=1e-4) and abs(score) > 1e-3


def test_another_vocabulary_is_refused(plain: Runs, tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "reward", vocab=290)
    with pytest.raises(
        UserError, match=r"reward\.model .* and model\.path .* have different vocabularies: .* tokens differ"
    ):
        plain(tmp_path / "run", f"reward.model={folder}")


def test_a_model_without_a_trained_head_is_refused(plain: Runs, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "reward")
    with pytest.raises(
        UserError, match=r"reward\.model .* has no trained head 'score': it is not a sequence classifier"
    ):
        plain(tmp_path / "run", f"reward.model={folder}")
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        plain(tmp_path / "run", f"reward.model={folder}")
