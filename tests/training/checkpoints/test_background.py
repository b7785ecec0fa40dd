"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from hpc_rl.config.training.common import ModelConfig, OptimConfig
from hpc_rl.errors import RunError
from hpc_rl.training.checkpoints import background, checkpoint, folders, model_state
from hpc_rl.training.checkpoints.background import BackgroundWriter
from hpc_rl.training.checkpoints.folders import Progress
from hpc_rl.training.checkpoints.saver import OneModel, Saver
from hpc_rl.training.models.causal_lm import PackedModel, load_model, load_tokenizer
from hpc_rl.training.optim import build_optimizer
from hpc_rl.training.parallel.distributed import World
from tests.finetune.jobs import spawn
from tests.helpers import make_tiny_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
SOON_S = 600
"""Limit of waits that end as soon as something happens."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(make_tiny_model(tmp_path_factory.mktemp("model"))))


class Training:
    """A model that learns, and its checkpoints."""

    def __init__(self, config: ModelConfig, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.model: PackedModel = load_model(config)
        self.optimizer = build_optimizer(self.model, OptimConfig(lr=0.1))
        self.tokenizer = load_tokenizer(config)
        self.parts = OneModel(self.model, self.optimizer, self.tokenizer, ALONE)
        self.saver = Saver(folder, self.parts, ALONE, keep=2, **options)

    def learn(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def save(self, step: int) -> None:
        self.saver.save(Progress(samples=1, dtype="float32", step=step))

    def state(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def training(config: ModelConfig, tmp_path: Path) -> Training:
    return Training(config, tmp_path)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes begin only when this is set."""
    event, write = threading.Event(), model_state.write

    def held_back(*arguments: Any) -> None:
        assert event.wait(SOON_S)
        write(*arguments)

    monkeypatch.setattr(model_state, "write", held_back)
    return event


def fails_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_a_checkpoint_has_the_state_of_its_step(training: Training, config: ModelConfig, release: Any) -> None:
    training.learn()
    wanted = training.state()
    training.save(1)
    training.learn()  # before anything is written
    assert training.names() == ["step-00000001.tmp"]
    assert checkpoint.newest(training.folder) is None
    release.set()
    training.saver.wait()
    assert training.names() == ["step-00000001"]
    seconds = training.saver.take_seconds()
    assert seconds is not None and seconds > 0 and training.saver.take_seconds() is None
    other = Training(config, training.folder)
    assert checkpoint.load_latest(training.folder, other.parts, ALONE) is not None
    for found, value in zip(other.state(), wanted, strict=True):
        assert torch.equal(found, value)


def test_one_write_at_a_time(training: Training, release: threading.Event) -> None:
    training.save(1)
    second = threading.Thread(target=lambda: training.save(2))
    second.start()
    second.join(0.2)  # enough for it to begin, if nothing stopped it
    assert training.names() == ["step-00000001.tmp"]
    release.set()
    second.join(SOON_S)
    training.saver.wait()
    assert training.names() == ["step-00000001", "step-00000002"]


def test_the_oldest_go(training: Training) -> None:
    with training.saver:
        for step in (1, 2, 3):
            training.save(step)
    assert training.names() == ["step-00000002", "step-00000003"]


def test_a_checkpoint_is_complete_although_old_ones_are_removed_slowly(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(folders, "remove_old", lambda *_: goes_on.wait(SOON_S))
    monkeypatch.setattr(background, "REMOVAL_S", 0.01)
    training.save(1)
    training.saver.wait()
    assert training.names() == ["step-00000001"] and training.saver.take_seconds() is not None
    goes_on.set()


def test_a_run_waits_for_the_removal_of_old_ones(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(folders, "remove_old", lambda *how: time.sleep(0.2) or removed.append(how))
    with training.saver:
        training.save(1)
    assert removed == [(training.folder, 2)]


def test_without_a_copy(config: ModelConfig, tmp_path: Path) -> None:
    training = Training(config, tmp_path, wait=True)
    training.save(1)
    assert training.names() == ["step-00000001"]


def test_a_wait_has_a_limit(training: Training, release: threading.Event) -> None:
    training.save(1)
    with pytest.raises(RunError, match=r"checkpoint .*step-00000001 was not written within 0 s"):
        training.saver.wait(0.01)
    release.set()


FULL = CheckpointException("save", {0: (OSError(28, "No space left on device"), None)})  # type: ignore[dict-item]


@pytest.mark.parametrize("later", ["save", "end", "wait"])
def test_a_failure_is_reported_with_its_cause(training: Training, monkeypatch: pytest.MonkeyPatch, later: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(model_state.dcp, "save", fails_with(FULL))
        training.save(1)
        with pytest.raises(RunError, match=r"step-00000001.tmp/model could not be written: .*No space left on device"):
            if later == "save":
                training.save(2)
            elif later == "end":
                with training.saver:
                    pass
            else:
                training.saver.wait()
    training.save(2)  # the failure has been reported; the next one starts afresh
    training.saver.wait()
    assert training.names() == ["step-00000002"]


def test_a_name_that_cannot_be_given(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step-00000001.tmp":
            raise OSError(30, "Read-only file system")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    training.save(1)
    with pytest.raises(RunError, match=r"step-00000001 could not be written: .*Read-only file system"):
        training.saver.wait()


def test_an_error_in_training_is_not_replaced(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_state.dcp, "save", fails_with(FULL))
    with pytest.raises(ZeroDivisionError), training.saver:
        training.save(1)
        raise ZeroDivisionError
    assert "warning: " in (errors := capsys.readouterr().err) and "No space left on device" in errors


def test_an_error_in_training_leaves_the_checkpoint_complete(training: Training) -> None:
    with pytest.raises(ZeroDivisionError), training.saver:
        training.save(1)
        raise ZeroDivisionError
    assert training.names() == ["step-00000001"]


def test_a_folder_that_cannot_be_made(config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    training = Training(config, tmp_path / "file")
    with pytest.raises(RunError, match=r"file/step-00000001.tmp could not be written: .*Not a directory"):
        training.save(1)


def test_all_ranks_fail_if_one_does() -> None:
    for code, out, errors in spawn(["-m", __name__], ranks=2):
        assert code == 0, errors
        found = json.loads(out.rpartition("found ")[2])
        assert found == ["rank 1: disk full", 1, "written"]


def test_the_thread_ends_with_the_writer() -> None:
    """And the process group of the thread, which the work refers to."""
    writer, threads = BackgroundWriter(ALONE), []
    writer.start("a part", lambda _: threads.append(threading.current_thread()))
    writer.wait()
    (thread,) = threads
    assert thread.is_alive()
    del writer
    gc.collect()
    thread.join(SOON_S)
    assert not thread.is_alive()


def main() -> None:
    """Write twice on each of two ranks: rank 1 fails at first. Meanwhile the main threads exchange something else."""
    from hpc_rl.training.parallel import distributed

    world = distributed.start("cpu", start_timeout_s=600)
    writer = BackgroundWriter(world)
    found: list[Any] = []

    def fail(own: World) -> None:
        if own.rank == 1:
            raise RunError("disk full")

    writer.start("first", fail)
    world.gather_rows([1.0])
    try:
        writer.wait()
    except RunError as error:
        found += [str(error), error.exit_code]
    writer.start("second", lambda own: found.append("written") if own.gather_rows([2.0]).sum() == 4 else None)
    world.gather_rows([1.0])
    writer.wait()
    print("found", json.dumps(found))
    distributed.finish()


if __name__ == "__main__":
    main()
