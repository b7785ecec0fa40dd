import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.adapters.adapter import Adapter, ProgramPlace, ReportedStep
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.table import GENERIC
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.node import adapted
from hpc_rl.node.adapted import AdaptedProgram
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.metrics import MetricsFile, read_metrics
from hpc_rl.training import stopping


def newest(_program: Program, place: ProgramPlace) -> Checkpoint | None:
    """The program writes the step of its newest checkpoint into a file."""
    file = place.run.path / "newest"
    return Checkpoint(int(file.read_text()), str(file)) if file.exists() else None


def progress(line: str) -> ReportedStep | None:
    word, _, step = line.partition(" ")
    return ReportedStep(int(step), 10, {"train/loss": 1 / int(step)}) if word == "step" else None


SAVES = Adapter(
    name="saves",
    title="a program",
    kinds=("torchrun",),
    newest=newest,
    progress=progress,
    arguments=lambda _, place: ["--resume"] if place.is_later else [],
    environment=lambda _program, _place: {"A": "adapter", "B": "adapter"},
)


class Job:
    """A program in a run directory, which nothing runs."""

    def __init__(self, folder: Path, row: Adapter = SAVES, left_s: float | None = None, is_later: bool = False) -> None:
        self.run, self.log = RunDir(folder), folder / "log"
        place = ProgramPlace(self.run, is_later=is_later)
        end = None if left_s is None else time.time() + left_s
        self.program = AdaptedProgram(row, Program(("train.py",)), place, lambda: end, self.log)

    def save(self, step: int) -> None:
        (self.run.path / "newest").write_text(str(step))

    def must_end(self) -> bool:
        self.program._next_look = 0.0
        return self.program.must_end()


def test_the_command_and_the_environment_of_an_attempt(tmp_path: Path) -> None:
    assert Job(tmp_path).program.words == ["train.py"]
    later = Job(tmp_path, is_later=True).program
    assert later.words == ["train.py", "--resume"]
    own = {"B": "user", "PYTHONPATH": "/mine", "WANDB_RESUME": "never"}
    assert later.environment(own) == {"A": "adapter", **own}
    hooked = Job(tmp_path, replace(SAVES, hook="trainer")).program
    first, *rest = hooked.environment({"PYTHONPATH": "/mine"})["PYTHONPATH"].split(":")
    assert rest == ["/mine"] and Path(first, "sitecustomize.py").is_file()
    assert hooked.environment({})["PYTHONPATH"] == first


def test_all_attempts_are_one_run_of_wandb(tmp_path: Path) -> None:
    names = ("WANDB_RUN_ID", "WANDB_RESUME")
    first, later = (Job(tmp_path, is_later=is_later).program.environment({}) for is_later in (False, True))
    assert [first[name] for name in names] == [later[name] for name in names] == [first["WANDB_RUN_ID"], "allow"]
    (tmp_path / "other").mkdir()
    of_other = Job(tmp_path / "other").program.environment(first)  # the first one has submitted it
    assert of_other["WANDB_RUN_ID"] == (tmp_path / "other/.wandb-id").read_text() != first["WANDB_RUN_ID"]
    assert Job(tmp_path).program.environment({"WANDB_RUN_ID": "mine"})["WANDB_RUN_ID"] == "mine"
    assert Job(tmp_path, GENERIC).program.environment({}) == {}


def test_a_program_that_is_asked_to_stop_ends_after_its_next_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.save(3)
    assert not job.must_end()
    job.run.stop.touch()
    assert not job.must_end()  # step 3 was saved before
    job.save(4)
    assert job.must_end() and job.program.has_saved


def test_what_was_saved_before_counts_if_the_walltime_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = Job(tmp_path, left_s=20)
    late.run.stop.touch()
    assert not late.must_end() and not late.must_end()
    (line,) = capsys.readouterr().out.splitlines()  # of a program that ignores the stop
    assert "a program was asked to save, and has not saved before" in line and "attempt has saved nothing" in line
    late.save(3)
    assert late.must_end() and "a program has saved step 3" in capsys.readouterr().out
    again = Job(tmp_path, left_s=20, is_later=True)
    assert not again.must_end()  # this attempt has saved nothing: it would be queued again forever
    (tmp_path / "early").mkdir()
    early = Job(tmp_path / "early", left_s=2000)
    early.save(5)
    assert not early.must_end()
    early.run.stop.touch()
    assert not early.must_end()
    hooked = Job(tmp_path, replace(SAVES, ends_itself=True), left_s=20)
    hooked.save(6)
    assert hooked.must_end()
    assert not Job(tmp_path, GENERIC, left_s=20).must_end()


def test_lines_become_metrics(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.log.write_text("start\nstep 1\nnoise\nstep 2\nstep ")
    assert not job.must_end()
    first, second = read_metrics(job.run.metrics)
    assert (first["step"], first["total_steps"], first["train/loss"]) == (1, 10, 1.0)
    assert second["step"] == 2 and second["timing_s/step"] >= 0


def test_exit_codes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.log.write_text("step 4\n")
    assert [job.program.exit_code(code) for code in (0, 1, 3)] == [0, 1, 3]
    job.run.stop.touch()
    assert job.program.exit_code(0) == 0  # nothing is saved
    job.save(4)
    assert [job.program.exit_code(code) for code in (0, 1, 3, 75)] == [EXIT_STOPPED, EXIT_STOPPED, 3, 75]
    with job.log.open("a") as log:
        log.write("step 10\n")
    assert job.program.exit_code(0) == 0  # it was the last step
    assert adapted.LOOK_S > 0


def test_a_loop_of_the_users_own_is_ended_though_its_total_is_unknown(tmp_path: Path) -> None:
    job = Job(tmp_path, replace(SAVES, progress=GENERIC.progress))
    MetricsFile(job.run.metrics).write(4, 4, {"train/loss": 1.0})
    job.run.stop.touch()
    job.save(4)
    assert job.must_end()
    assert [job.program.exit_code(code) for code in (0, 1)] == [0, EXIT_STOPPED]


def test_a_line_of_the_program_about_its_time_stops_the_run(tmp_path: Path) -> None:
    job = Job(tmp_path, replace(SAVES, stops=lambda line: line == "time is over"))
    job.save(3)
    assert not job.must_end()
    job.log.write_text("step 4\ntime is over\n")
    assert not job.must_end() and job.run.stop.read_text() == "walltime\n"
    job.save(4)
    assert job.must_end() and job.program.exit_code(0) == EXIT_STOPPED


def test_a_stop_before_a_step_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "SETTLE_S", 0.0)
    timed = replace(
        SAVES, saves_when_asked=True, progress=lambda line: ReportedStep(int(line), 9, {"timing_s/step": 100.0})
    )
    job = Job(tmp_path, timed, left_s=120)
    job.log.write_text("1\n")
    assert not job.must_end() and not job.run.stop.exists()  # of the first step, the time is not known
    job.log.write_text("1\n2\n")
    assert not job.must_end() and job.run.stop.read_text() == "walltime\n"
    plenty = Job(tmp_path / "plenty", timed, left_s=1000)
    plenty.run.path.mkdir(exist_ok=True)
    plenty.log.write_text("1\n2\n3\n")
    assert not plenty.must_end() and not plenty.run.stop.exists()


def test_a_program_that_saves_at_its_own_times_ends_at_the_last_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "SETTLE_S", 0.0)
    job = Job(tmp_path, left_s=120)
    job.program._last_saved_at -= 100
    job.save(1)
    assert not job.must_end() and not job.run.stop.exists()
    assert not job.must_end() and job.run.stop.exists()  # another 100 s would be too long
    job.save(2)
    assert job.must_end()


def test_a_program_with_hooks_has_time_to_end_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, replace(SAVES, ends_itself=True))
    assert not job.must_end()
    job.run.stop.touch()
    job.save(3)
    assert not job.must_end()
    monkeypatch.setattr(job.program, "_ends_at", 0.0)
    assert job.must_end()


def test_a_line_with_only_the_total(tmp_path: Path) -> None:
    job = Job(tmp_path, replace(SAVES, progress=lambda line: ReportedStep(0, 7) if line == "7" else ReportedStep(7)))
    job.log.write_text("7\nend\n")
    job.run.stop.touch()
    job.save(7)
    assert job.program.exit_code(0) == 0  # it is complete
    assert read_metrics(job.run.metrics)[0]["total_steps"] == 7


def test_the_last_step_of_a_program_with_hooks_is_no_early_end(tmp_path: Path) -> None:
    job = Job(tmp_path, replace(SAVES, saves_when_asked=True, progress=GENERIC.progress))
    job.run.stop.touch()
    job.save(9)
    metrics = MetricsFile(job.run.metrics)  # of the adapter inside it
    metrics.write(9, 10, {"train/loss": 1.0})
    assert job.program.exit_code(0) == EXIT_STOPPED
    metrics.write(10, 10, {"train/loss": 1.0})
    assert job.program.exit_code(0) == 0
