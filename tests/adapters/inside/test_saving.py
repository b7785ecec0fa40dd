"""Hooks of programs that save when the stop file is there, with stand-ins for the programs' classes."""

import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from hpc_rl.adapters.inside import nemo_rl, openrlhf, skyrl, verl_ppo
from hpc_rl.adapters.inside.asked import SaveOnce
from hpc_rl.adapters.inside.run import AdaptedRun, metrics_of
from hpc_rl.adapters.saved import Checkpoint, record_saved
from hpc_rl.adapters.verl import ENV_CALLBACK
from hpc_rl.run_dir import ENV_ATTEMPT_DIR, RunDir
from hpc_rl.tracking.metrics import read_metrics


@pytest.fixture
def stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_RL_RUN_DIR", str(tmp_path))
    return tmp_path / "stop"


def module_with(**members: Any) -> ModuleType:
    module = ModuleType("library")
    vars(module).update(members)
    return module


def test_what_is_measured_before_the_first_step_of_a_resume_removes_nothing(
    stop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an evaluation, or a checkpoint that is saved before the step has ended."""
    monkeypatch.setenv(ENV_ATTEMPT_DIR, str(stop.parent / "attempt-1"))
    first, later = AdaptedRun(), AdaptedRun()
    first.end_step(1, 10)
    first.note_saved(Checkpoint(1, str(stop.parent)), 0.1)
    metrics_of.cache_clear()
    later._metrics = metrics_of(later._run)
    assert later.newest(None, "") == Checkpoint(1, str(stop.parent))
    later.note_tested(1.0)
    later.end_step(2, 10)
    assert [record["step"] for record in read_metrics(stop.parent / "metrics.jsonl")] == [1, 2]


class Own:
    """A user's own callback of verl."""

    steps: ClassVar[list[int]] = []

    def __init__(self, config: Any) -> None:
        self.config = config

    def on_save(self, trainer: Any, global_step: int, async_save: bool = False, **_: Any) -> None:
        self.steps.append(global_step)


def test_verl_v1_saves_the_next_step_and_makes_it_the_last(stop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_ppo, "LOOK_S", 0.01)
    monkeypatch.setenv(ENV_CALLBACK, f"{__name__}.Own")
    config = SimpleNamespace(trainer=SimpleNamespace(save_freq=100))
    callback, trainer = verl_ppo.StopCallback(config=config), SimpleNamespace(total_training_steps=50)
    callback.on_save(trainer=trainer, global_step=3, checkpoint_dir="x")
    assert (trainer.total_training_steps, config.trainer.save_freq) == (50, 100)
    stop.touch()
    deadline = time.monotonic() + 10
    while config.trainer.save_freq != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    callback.on_save(trainer=trainer, global_step=4, checkpoint_dir="x", async_save=True)
    assert (trainer.total_training_steps, config.trainer.save_freq) == (50, 1)  # its files are not complete yet
    callback.on_save(trainer=trainer, global_step=5, checkpoint_dir="x", async_save=False)
    assert trainer.total_training_steps == 5 and Own.steps == [3, 4, 5]


def test_verl_v0_asks_for_its_time_and_for_the_stop_file(stop: Path) -> None:
    module = module_with(should_save_ckpt_esi=lambda max_steps_duration: max_steps_duration > 5)
    verl_ppo.attach(module)
    assert [module.should_save_ckpt_esi(max_steps_duration=s) for s in (1, 9)] == [False, True]
    stop.touch()
    assert module.should_save_ckpt_esi(max_steps_duration=1)
    verl_ppo.attach(module_with())  # a version without it


@pytest.mark.parametrize("is_dotted", [True, False])
@pytest.mark.parametrize("is_argument", [True, False])
def test_openrlhf_saves_this_step_and_no_later_one(
    stop: Path, is_dotted: bool, is_argument: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openrlhf, "_once", SaveOnce())
    options = SimpleNamespace(save_steps=7)
    args = SimpleNamespace(ckpt=options) if is_dotted else options

    class Trainer:
        def __init__(self) -> None:
            self.args = args

        def save_logs_and_checkpoints(self, *arguments: Any) -> bool:
            return int(arguments[-1]) % options.save_steps == 0

    openrlhf.attach(module_with(Trainer=Trainer, number=1))
    call = [*([args] if is_argument else []), 3]
    assert not Trainer().save_logs_and_checkpoints(*call)
    stop.touch()
    assert Trainer().save_logs_and_checkpoints(*call) and options.save_steps == 7
    assert not Trainer().save_logs_and_checkpoints(*call)


def test_nemo_rl_counts_from_its_start_and_looks_at_the_stop_file(
    stop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class TimeoutChecker:
        def __init__(self, timeout: str) -> None:
            self.start_time, self.last_saved = 0.0, timeout == "late"

        def check_save(self) -> bool:
            return self.start_time == 0.0

    nemo_rl.attach(module_with(TimeoutChecker=TimeoutChecker))
    checker = TimeoutChecker("early")
    assert checker.start_time == nemo_rl._BEGAN and not checker.check_save()
    stop.touch()
    assert [checker.check_save(), checker.check_save()] == [True, False]  # once

    class Logger:
        def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str = "") -> int:
            return step

    nemo_rl.attach(module_with(Logger=Logger))
    assert Logger().log_metrics({"loss": 0.5}, 3, prefix="train") == 3
    Logger().log_metrics({"x": 0.5}, 3, prefix="ray")
    assert capsys.readouterr().out == 'hpc-rl: step 3: {"train/loss": 0.5}\n'


def test_skyrl_saves_this_step_and_makes_it_the_last(stop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class RayPPOTrainer:
        def __init__(self, cfg: Any) -> None:
            self.cfg, self.callbacks = cfg, list[Any]()

        def add_callback(self, callback: Any) -> None:
            self.callbacks.append(callback)

    skyrl.attach(module_with(TrainingCallback=object, RayPPOTrainer=RayPPOTrainer))
    settings = SimpleNamespace(max_training_steps=None)
    trainer = RayPPOTrainer(SimpleNamespace(trainer=settings))
    (callback,) = trainer.callbacks
    step, control = SimpleNamespace(global_step=4, total_steps=9, logs={"loss": 1}), SimpleNamespace(should_save=False)
    callback.on_step_end(trainer, step, control)
    callback.on_save(trainer, step, control)
    assert (control.should_save, settings.max_training_steps) == (False, None)
    stop.touch()
    callback.on_step_end(trainer, step, control)
    callback.on_save(trainer, step, control)
    assert (control.should_save, settings.max_training_steps) == (True, 4)
    callback.on_log(trainer, step, control)
    assert capsys.readouterr().out == 'hpc-rl: step 4 of 9: {"loss": 1.0}\n'


def test_a_checkpoint_that_this_node_does_not_have_is_named(stop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_saved(RunDir(stop.parent), Checkpoint(7, "/local/of/another/node/checkpoint-7", 1, "train-0"))
    assert AdaptedRun().newest(None, "train-1") is None and not capsys.readouterr().out
    assert AdaptedRun().newest(None, "train-0") is None
    assert "this run, /local/of/another/node/checkpoint-7, is not on this node" in capsys.readouterr().out
