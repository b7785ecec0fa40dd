"""Checkpoints that are scored while a run trains: the scores of `submit eval`, each once, whatever the run removes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.generate import EvalConfig
from hpc_rl.data.arithmetic import generate
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.rl.actors.pools import release_pools
from hpc_rl.rl.generation import follow
from hpc_rl.rl.generation.responses import Parts
from hpc_rl.rl.generation.run import run_generation
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.run_dir import TOKENIZED, RunDir
from hpc_rl.system.files import LineFile, read_json
from hpc_rl.tracking.points import read_points
from hpc_rl.training.checkpoints.export import export
from tests.finetune.jobs import run_here
from tests.helpers import make_tiny_model
from tests.rl.runs.jobs import Hosts, Runs, metrics

SHARED = ["data.max_prompt_length=40", "data.max_response_length=6", "rollout.n=2", "rollout.max_num_seqs=4"]
REWARD = """\
import zlib

def score(response: str, answer: str) -> float:
    return zlib.crc32(response.encode()) % 1000 / 1000
"""


class Followed:
    """A run of 3 steps with a checkpoint of each, and jobs that score them."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        generate(folder, n_train=16, n_val=5)
        self._hosts = hosts
        self._options = [
            *(f"data.files={folder}/val.jsonl", f"reward.function={folder}/reward.py:score", "trainer.device=cpu"),
            *SHARED,
        ]
        (folder / "reward.py").write_text(REWARD)
        self.model, self.trained = make_tiny_model(folder / "model"), RunDir(folder / "trained")
        self.trained.path.mkdir()
        sft = [
            *(f"model.path={self.model}", f"data.train_files={folder}/train.jsonl", "trainer.device=cpu"),
            *("data.max_length=64", "data.train_batch_size=4", "trainer.micro_tokens=256", "optim.lr=0.05"),
            *("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=9"),
        ]
        assert run_here(sft, self.trained.path, "trainer.export=false", "trainer.logger=[]") == 0
        self.trained.job.write_text('{"kind": "sft", "job_id": "7"}')
        self.state(self.trained, "COMPLETED")

    def state(self, run: RunDir, state: str) -> None:
        run.status.write_text(json.dumps({"job_id": "7", "attempt": 1, "state": state, "exit_code": None}))

    def copy(self, folder: Path) -> RunDir:
        """Return a run of one's own that has ended."""
        shutil.copytree(self.trained.path, folder / "run")
        return RunDir(folder / "run")

    def score(self, run: RunDir, job: Path, *overrides: str) -> int:
        """Score the checkpoints of a run."""
        return self._call(follow.follow_run, job, f"model.path={self.model}", f"eval.follow={run.path}", *overrides)

    def evaluate(self, model: Path, job: Path) -> float:
        """Return the score of a model by `submit eval`."""
        assert self._call(run_generation, job, f"model.path={model}") == 0
        return metrics(job)[-1]["eval/score"]

    def _call(self, program: Callable[[EvalConfig, RunDir, Path], int], job: Path, *overrides: str) -> int:
        config = compose("eval", [*self._options, *overrides])
        assert isinstance(config, EvalConfig)
        logs = job / f"attempt-{len(list(job.glob('attempt-*'))) + 1}"
        logs.mkdir(parents=True)
        self._hosts.all_free()
        with pytest.MonkeyPatch.context() as patch:
            self._hosts.stand_in(patch)
            try:
                return program(config, RunDir(job), logs)
            finally:
                release_pools(str(logs))


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory, hosts: Hosts) -> Followed:
    return Followed(tmp_path_factory.mktemp("followed"), hosts)


def scores(run: RunDir) -> dict[int, float]:
    return {step: values["eval/score"] for step, values in read_points(run.path).items()}


@pytest.fixture(scope="module")
def expected(followed: Followed, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The score of each checkpoint's model, exported and evaluated by itself."""
    folder, found = tmp_path_factory.mktemp("expected"), {}
    for step in (1, 2, 3):
        export(followed.trained.checkpoints / f"step-{step:08d}", folder / f"model-{step}")
        found[step] = followed.evaluate(folder / f"model-{step}", folder / f"eval-{step}")
    assert len(set(found.values())) == 3
    return found


def test_scores_are_those_of_evaluations_and_are_not_repeated(
    followed: Followed, expected: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, job = followed.copy(tmp_path), tmp_path / "job"
    assert followed.score(run, job) == 0
    assert scores(run) == expected == {step["step"]: step["eval/score"] for step in metrics(job)}
    said = capsys.readouterr().out
    assert f"step 2: score of val {expected[2]:.4g} (in 0:0" in said and "has ended (COMPLETED)" in said
    evaluation = read_json(job / "step-00000002/eval.json")
    assert evaluation["model"] == str(run.checkpoints / "step-00000002") and not (job / "held").exists()
    assert RunDir(job).tokenized.is_dir() and not (job / TOKENIZED).exists()
    files = {path: path.read_text() for path in run.path.glob("metrics-eval-*")}
    assert followed.score(run, job) == followed.score(run, tmp_path / "other") == 0
    assert {path: path.read_text() for path in run.path.glob("metrics-eval-*")} == files and len(files) == 1
    assert "step 2" not in capsys.readouterr().out


def test_what_the_run_removes_meanwhile_has_no_score(
    followed: Followed,
    expected: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, hold = followed.copy(tmp_path), follow.hold

    def late(saved: follow.Saved, folder: Path) -> Path | None:
        if saved.step == 1:
            shutil.rmtree(saved.path)
        held = hold(saved, folder)
        if saved.step == 2:
            shutil.rmtree(saved.path)
        return held

    monkeypatch.setattr(follow, "hold", late)
    (run.checkpoints / "step-00000003/model/checksums.json").write_text("{")
    assert followed.score(run, tmp_path / "job") == 0
    assert scores(run) == {2: expected[2]}
    said = capsys.readouterr().out
    assert "step 1: the checkpoint has no score: the run has removed it\n" in said
    assert "step 3: the checkpoint has no score: model/checksums.json has 1 of" in said


def test_a_job_that_is_stopped_goes_on_with_what_it_has(
    followed: Followed, expected: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, job = followed.copy(tmp_path), tmp_path / "job"
    write, written = Parts.write, list[int]()

    def write_and_stop(self: Parts, number: int, *rest: object) -> None:
        write(self, number, *rest)  # type: ignore[arg-type]
        written.append(number)
        if len(written) == 1:
            (job / "stop").write_text("preemption\n")

    monkeypatch.setattr(Parts, "write", write_and_stop)
    assert followed.score(run, job) == EXIT_STOPPED and not scores(run)
    (job / "stop").unlink()
    shutil.rmtree(run.checkpoints / "step-00000001")
    before = len(written)
    assert followed.score(run, job) == 0
    assert scores(run) == expected and len(written) == 3 * 3 and before >= 1


def test_scores_are_kept_while_the_disk_is_full(
    followed: Followed,
    expected: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, append = followed.copy(tmp_path), LineFile._append
    is_full = iter([True])

    def append_later(self: LineFile) -> None:
        if self.path.name.startswith("metrics-eval-") and next(is_full, False):
            raise OSError(28, "No space left on device")
        append(self)

    monkeypatch.setattr(LineFile, "_append", append_later)
    assert followed.score(run, tmp_path / "job") == 0
    assert scores(run) == expected
    said = capsys.readouterr()
    assert said.out.count("step 1: score of") == 1 and "No space left on device" in said.err


def test_a_repeated_step_is_scored_again(followed: Followed, expected: dict[int, float], tmp_path: Path) -> None:
    run = followed.copy(tmp_path)
    assert followed.score(run, tmp_path / "job") == 0
    for step in (2, 3):
        shutil.rmtree(run.checkpoints / f"step-0000000{step}")
    shutil.copytree(followed.trained.checkpoints / "step-00000001", run.checkpoints / "step-00000002")
    (run.checkpoints / "step-00000002/trainer.json").touch()
    assert followed.score(run, tmp_path / "job") == 0
    assert scores(run) == {1: expected[1], 2: expected[1]}


@pytest.mark.parametrize(("state", "said"), [("RUNNING", "did not train within 0 s"), ("REQUEUED", "did not train")])
def test_a_run_that_does_not_come_back_is_left(
    followed: Followed, tmp_path: Path, state: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = followed.copy(tmp_path)
    shutil.rmtree(run.checkpoints)
    followed.state(run, state)
    assert followed.score(run, tmp_path / "job", "lend.wait_s=0") == 0
    assert said in capsys.readouterr().out


def test_a_run_whose_lock_other_nodes_do_not_see_trains_while_its_files_grow(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    usage = run.next_attempt() / "node0-usage.jsonl"
    usage.parent.mkdir()
    usage.touch()
    found = []
    for state in ("RUNNING", "REQUEUED"):
        run.write_status("7", 1, state, None)
        found.append(follow.trains(run))
    run.write_status("7", 1, "RUNNING", None)
    os.utime(usage, (time.time() - 600,) * 2)
    assert [*found, follow.trains(run)] == [True, False, False]
    with run.take_lock("7"):
        assert follow.trains(run)


def test_an_engine_in_the_place_of_a_dead_one_has_the_weights(
    followed: Followed, expected: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one dies when it has the weights of a checkpoint, another one when it should take them."""
    run, give, tell = followed.copy(tmp_path), follow.CheckpointScorer._give_weights, RequestQueue.tell

    def tell_and_kill(self: RequestQueue, method: str, least_s: float = 0.0) -> bool:
        told = tell(self, method, least_s)
        if self.version == 3:
            monkeypatch.setattr(RequestQueue, "tell", tell)
            ray.kill(self._engines.actors[0])
        return told

    monkeypatch.setattr(RequestQueue, "tell", tell_and_kill)

    def give_and_kill(self: follow.CheckpointScorer) -> None:
        give(self)
        if self._queue.version == 2 and not self._queue.repeated:
            monkeypatch.setattr(follow.CheckpointScorer, "_give_weights", give)
            ray.kill(self._workers.fleet.engines.actors[0])

    monkeypatch.setattr(follow.CheckpointScorer, "_give_weights", give_and_kill)
    assert followed.score(run, tmp_path / "job") == 0
    assert scores(run) == expected


def test_the_policy_of_reinforcement_learning_is_scored(followed: Followed, run: Runs, tmp_path: Path) -> None:
    trained = RunDir(tmp_path / "run")
    trained.path.mkdir()
    assert run(trained.path, "trainer.save_freq=1", "trainer.save_async=false") == 0
    trained.job.write_text('{"kind": "ppo", "job_id": "7"}')
    followed.state(trained, "STOPPED")
    model = next(option for option in run.base if option.startswith("model.path="))
    assert followed.score(trained, tmp_path / "job", model) == 0
    export(trained.checkpoints / "step-00000001", tmp_path / "model")
    found = scores(trained)
    assert found.keys() == {1, 2} and found[1] == followed.evaluate(tmp_path / "model", tmp_path / "eval") != found[2]
