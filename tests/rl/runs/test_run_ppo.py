"""Runs in processes of their own, from start to end, and what is left of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import ray

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import EXIT_STOPPED, RunError, UserError
from hpc_rl.rl.main_ppo import TaskRunner, run_ppo
from hpc_rl.run_dir import RunDir
from tests.marks import long
from tests.rl.runs.jobs import TIMEOUT_S, Runs, ppo, same_metrics, series, stop_after

WORKER, DRIVER = "node0-global_pool-rank{}.log", "driver.log"


class StoppedRunner(TaskRunner):
    """A run that is asked to stop during its second step."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, 1)
            return super().run(config, run, logs)


class TellingRunner(TaskRunner):
    """A driver as a user may write it."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        code = super().run(config, run, logs)
        level = ray.get(ray.remote(num_cpus=0)(lambda: os.environ["VLLM_LOGGING_LEVEL"]).remote())
        (run.path / "result").write_text(f"{run.name} ended with {code}, vLLM logs {level}")
        return code


def pids(log: Path) -> list[int]:
    """Processes that write to a log."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd" / "1").readlink() == log:
                found.append(int(process.name))
        except OSError:
            continue  # it ended, or is none of ours
    return found


def eldest(processes: Sequence[int]) -> int:
    """The one that started the others."""
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in processes}
    (first,) = [pid for pid, parent in parents.items() if parent not in parents]
    return first


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def nothing_is_left(run_dir: Path) -> None:
    """Processes have ended, and the cluster is free for the next run."""
    logs = list(run_dir.glob("attempt-*/*.log"))
    wait_for("the end of all processes", lambda: not any(map(pids, logs)))
    wait_for("all CPUs to be free", lambda: ray.available_resources().get("CPU") == 4)


@pytest.mark.long
def test_stopped_and_continued_in_other_processes(
    base: list[str], run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("trainer.total_training_steps=3", "algorithm.kl={where: reward, coef: 0.1, target: 5, horizon: 100}")
    assert run(tmp_path / "whole", *options) == 0

    given = RunDir(tmp_path / "run")
    assert run_ppo(ppo(*base, *options, "trainer.n_gpus_per_node=2"), StoppedRunner, given) == EXIT_STOPPED
    assert "stopped after step 1 of 3: checkpoint saved" in capsys.readouterr().out
    nothing_is_left(given.path)
    assert run_ppo(ppo(*base, *options), TellingRunner, given) == 0
    assert "resuming after step 1" in capsys.readouterr().out
    assert (given.path / "result").read_text() == "run ended with 0, vLLM logs WARN"
    assert run_ppo(ppo(*base, *options), run=given) == 0
    assert "resuming after step 3, the last of 3: only the export remains" in capsys.readouterr().out
    assert [path.name for path in given.attempts()] == ["attempt-1", "attempt-2", "attempt-3"]
    nothing_is_left(given.path)
    same_metrics(given.path, tmp_path / "whole")


def test_the_users_mistake_comes_out_of_the_cluster(base: list[str], cluster: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^pool global_pool needs 1 node x 8 CPUs; the cluster has 1 x 4 CPUs$"):
        run_ppo(ppo(*base, "trainer.n_gpus_per_node=8"), run=RunDir(tmp_path))
    nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    "workers, log, message",
    [
        (2, WORKER.format(1), r"^rank 1 of pool global_pool on .* \(log in .*attempt-1\) died: killed \(signal 9\)"),
        long(
            1, DRIVER, r"^the driver \(log in .*attempt-1\) died: killed \(signal 9\) .* if it was memory, lower data"
        ),
    ],
)
def test_a_killed_process_ends_the_run(
    base: list[str], cluster: None, tmp_path: Path, workers: int, log: str, message: str
) -> None:
    killed_at: list[float] = []
    run = RunDir(tmp_path)

    def kill() -> None:
        try:
            wait_for("the second step", lambda: len(series(tmp_path, "actor/pg_loss")) >= 2, TIMEOUT_S)
            killed_at.append(time.monotonic())
            os.kill(eldest(pids(tmp_path / "attempt-1" / log)), signal.SIGKILL)
        finally:
            run.stop.touch()  # so that the run ends even if nothing could be killed

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RunError, match=message) as found:
        endless = ("trainer.total_training_steps=1000000", f"trainer.n_gpus_per_node={workers}")
        run_ppo(ppo(*base, *endless), run=run)
    killer.join()
    assert found.value.exit_code == 137
    assert time.monotonic() - killed_at[0] < 300
    nothing_is_left(tmp_path)


def test_fewer_prompts_than_a_batch(run: Runs, tmp_path: Path) -> None:
    message = r"^data\.train_batch_size is 24, but the training data has only 23 prompts: lower .*, or add data$"
    with pytest.raises(UserError, match=message):
        run(tmp_path, "data.train_batch_size=24")
