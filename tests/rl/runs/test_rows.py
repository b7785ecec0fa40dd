"""trainer.micro_tokens=auto: the numbers of any fixed value, with memory of GPUs that is pretended, and after a resume.

An update of the policy needs 1.89 MB with rows of 46 tokens, which hold the longest sample, and 4.37 MB with rows that
hold a mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop import rows, trainer
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.training.checkpoints.folders import numbered, read_progress
from hpc_rl.training.perf import Clock
from tests.rl.runs.jobs import Runs, metrics, same_metrics, stop_after

AUTO = "trainer.micro_tokens=auto"
OPTIONS = ("trainer.total_training_steps=3", "algorithm.kl={where: reward, coef: 0.1}")
GPU = 4.5e6
"""Bytes, of which 95 % are not enough for a mini-batch in one row."""


@contextmanager
def memory(peak: float) -> Iterator[None]:
    """Let workers have GPUs of this size, of which they use so many bytes, and engines in other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "memory_bytes", lambda _: Pending.known(int(GPU)))
        patch.setattr(WorkerGroup, "max_memory_gb", lambda _: Pending.known(peak / 1e9))
        patch.setattr(rows, "engine_spec", lambda _: SimpleNamespace(in_process=False))
        yield


@pytest.fixture(scope="module")
def fixed(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("fixed")
    assert run(run_dir, *OPTIONS, "trainer.micro_tokens=100") == 0
    return run_dir


@pytest.fixture(scope="module")
def raised(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that begins with rows of 46 tokens, and goes on with 1,024 because less memory is measured."""
    run_dir = tmp_path_factory.mktemp("raised")
    with memory(1e6):
        assert run(run_dir, *OPTIONS, AUTO) == 0
    return run_dir


def test_auto_on_cpus_agrees_with_a_number(
    run: Runs, tmp_path: Path, fixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *OPTIONS, AUTO) == 0
    assert "\nmicro-batches of at most 4,096 tokens\n" in capsys.readouterr().out
    same_metrics(tmp_path, fixed, 1e-4)


def test_rows_that_are_corrected_agree_with_a_number(raised: Path, fixed: Path) -> None:
    same_metrics(raised, fixed, 1e-4)
    recorded = read_progress(numbered(raised / "checkpoints")[0][1]).micro_tokens
    assert recorded == {"tokens": 1024, "is_corrected": 1, "planned": 46, "ranks": 1, "gpu_bytes": int(GPU)}


def test_a_resumed_run_has_the_same_rows(
    run: Runs, tmp_path: Path, raised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with memory(1e6), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        assert run(tmp_path, *OPTIONS, AUTO) == EXIT_STOPPED
    out = capsys.readouterr().out
    assert "trainer.micro_tokens=auto: 46 tokens in each pass of a rank. The phase `update of the actor`" in out
    assert "trainer.micro_tokens=auto: 1,024 tokens in each pass of a rank from now on, instead of 46, because" in out
    (tmp_path / "stop").unlink()
    with memory(4e6):  # which would not be enough for longer rows
        assert run(tmp_path, *OPTIONS, AUTO) == 0
    assert "trainer.micro_tokens=auto: 1,024 tokens in each pass of a rank, as before" in capsys.readouterr().out
    assert metrics(tmp_path) == metrics(raised)


def test_a_critic_alone_corrects_nothing(run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy's update, which needs the most memory, comes after the warm-up of the critic."""
    warm_up = "critic.warmup_steps=1"
    with memory(1e6), run.state(tmp_path, *OPTIONS, AUTO, warm_up) as state, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "step", lambda *_: {"actor/loss": 1.0})
        assert state.actor.row_tokens == 46
        state.step = 1
        trainer.whole_step(state, Clock())
        assert not state.rows.is_corrected and state.actor.row_tokens == 46
        state.actor.longest_row, state.step = 40, 2
        trainer.whole_step(state, Clock())
        assert state.rows.is_corrected and state.actor.row_tokens == 1024


def test_an_engine_in_the_workers_is_measured_with_them(run: Runs, tmp_path: Path) -> None:
    with memory(1e6), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "engine_spec", lambda _: SimpleNamespace(in_process=True))
        with run.state(tmp_path, *OPTIONS, AUTO) as state:
            assert state.rows.is_corrected and state.actor.row_tokens == 46
