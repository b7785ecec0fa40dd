"""Submission from end to end, with programs that stand in for Slurm's."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hpc_rl
from hpc_rl import api
from hpc_rl.config.compose import compose, dump
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.launch import as_test, prepare, resumed
from hpc_rl.submission.queue import prepare as fill_run_dir
from hpc_rl.submission.request import JobRequest, plan, reserve
from tests import helpers
from tests.fake_slurm import calls, fake_slurm

PROGRAM = ("train.py",)
REQUIRED = ["model.path=/m", "data.train_files=t.jsonl", "trainer.device=cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    fake_slurm(tmp_path, monkeypatch)
    return tmp_path


def test_the_python_api_submits_what_the_command_line_submits(folder: Path) -> None:
    notes: list[str] = []
    run = hpc_rl.submit(
        "torchrun", ["trainer.device=cpu"], nodes=2, time="1:00:00", program=PROGRAM, job_name="mine", note=notes.append
    )
    assert run.path == folder / "runs" / "mine" and run.name == "mine"
    script = (run.path / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --time=1:00:00\n" in script
    assert json.loads((run.path / "job.json").read_text())["command"][:2] == ["hpc_rl.submit", "torchrun"]
    assert hpc_rl.find_run("mine") == run
    words = ("submit", "torchrun", "--nodes", "2", "--time", "1:00:00", "trainer.device=cpu", "--job-name", "twin")
    helpers.hpc_rl(*words, "--", *PROGRAM, check=True)
    other = (folder / "runs" / "twin" / "job.sbatch").read_text()
    assert other.replace("twin", "mine") == script
    assert [call.split()[0] for call in calls(folder)].count("sbatch") == 2


def test_notebooks_show_tables_and_complete_names() -> None:
    rows = api.Rows({"step": number, "<b>": None if number else 0.125} for number in range(100))
    shown = rows._repr_html_()
    assert "<th>&lt;b&gt;</th>" in shown and "<td>0.125</td>" in shown and "60 rows are not shown" in shown
    assert shown.count("<tr>") == 1 + 2 * api.SHOWN_ROWS + 1
    names = subprocess.run(
        [sys.executable, "-c", "import hpc_rl; print(*dir(hpc_rl))"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(hpc_rl.__all__) <= set(names)


def test_what_a_run_can_be_asked(folder: Path) -> None:
    run = hpc_rl.submit("torchrun", ["trainer.device=cpu"], program=PROGRAM, note=print)
    record = {"step": 1, "total_steps": 2, "time": 1.0, "train/loss": 0.5}
    (run.path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run.path / "job-7.log").write_text("a line\n")
    assert run.metrics() == [record]
    assert run.logs() == "a line\n"
    status = {"job_id": "7", "attempt": 1, "state": "COMPLETED", "exit_code": 0}
    (run.path / "status.json").write_text(json.dumps(status))
    lines: list[str] = []
    assert run.wait(timeout_s=600, note=lines.append).state == "COMPLETED"
    assert lines == [f"{run.name}: COMPLETED, step 1 of 2"]
    assert hpc_rl.Run(run.name) == hpc_rl.Run(run.path) == run and repr(run) == f"Run('{run.name}')"
    assert "<td>train/loss</td><td>0.5</td>" in run._repr_html_() and "COMPLETED" in run._repr_html_()
    (row,) = hpc_rl.find_runs()
    assert (row["run"], row["state"], row["metric"]) == (run.name, "COMPLETED", 0.5)
    with pytest.raises(hpc_rl.UserError, match="nothing"):
        hpc_rl.Run("nothing")
    with pytest.raises(hpc_rl.UserError, match=r"has not exported .*: its state is COMPLETED"):
        _ = run.model
    (run.path / "model").mkdir()
    assert run.model == run.path / "model"
    assert "no job to cancel" in run.cancel() and "no job to stop" in run.stop()


def test_a_run_keeps_its_kind(folder: Path) -> None:
    named = {"job_name": "mine", "note": print}
    run = hpc_rl.submit("torchrun", ["trainer.device=cpu"], program=PROGRAM, **named)
    before = (run.path / "job.json").read_text()
    with pytest.raises(
        hpc_rl.UserError, match=r"/runs/mine is a run of the kind torchrun, and ray was requested: choose"
    ):
        hpc_rl.submit("ray", ["trainer.device=cpu"], program=("python", *PROGRAM), **named)
    assert (run.path / "job.json").read_text() == before


def test_a_wait_has_a_deadline(folder: Path) -> None:
    run = hpc_rl.submit("torchrun", ["trainer.device=cpu"], program=PROGRAM, note=print)
    (folder / "slurm" / "squeue.text").write_text("7|RUNNING|node1|None|\n")
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.1 s"):
        run.wait(timeout_s=0.1)


def test_an_unknown_kind_lists_the_kinds() -> None:
    kinds = "sft, dpo, rm, distill, ppo, generate, eval, select, torchrun, ray"
    for kind in ("grpo", "doctor"):
        with pytest.raises(hpc_rl.UserError, match=f"job kind '{kind}': choose one of {kinds}$"):
            hpc_rl.submit(kind)
    with pytest.raises(hpc_rl.UserError, match=r"overrides and program are lists of words"):
        hpc_rl.submit("torchrun", program="train.py")
    with pytest.raises(hpc_rl.UserError, match="sft runs hpc-rl's own trainer; only torchrun and ray accept"):
        hpc_rl.submit("sft", REQUIRED, program=PROGRAM)


def test_the_api_needs_no_torch() -> None:
    code = (
        "import sys, hpc_rl; hpc_rl.submit; hpc_rl.Run; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_trial_is_short_and_has_a_name_of_its_own(folder: Path) -> None:
    request = JobRequest(
        "torchrun", ("slurm.test_partition=debug", "slurm.partition=gpu", "trainer.device=cpu"), PROGRAM
    )
    job, script = prepare(as_test(request), print)
    assert job.run_dir.name == "torchrun-test-1"
    assert "--partition=debug\n" in script and "--time=10:00\n" in script and "--no-requeue\n" in script
    named = JobRequest("torchrun", ("slurm.job_name=mine", "trainer.device=cpu"), PROGRAM, {"slurm.partition": "gpu"})
    job, script = prepare(as_test(named), print)
    assert job.run_dir.name == "mine-test-1" and "--partition=gpu\n" in script and "--job-name=mine-test-1\n" in script
    with pytest.raises(hpc_rl.UserError, match="leave out --run-dir"):
        prepare(as_test(replace(named, run_dir=folder / "mine")), print)
    trial = as_test(request)
    made = [reserve(prepare(trial, print)[0]).run_dir.name for _ in range(2)]
    assert made == ["torchrun-test-1", "torchrun-test-2"]
    assert as_test(JobRequest("sft")).settings["trainer.total_training_steps"] == 2
    assert "trainer.total_training_steps" not in as_test(request).settings


@pytest.mark.parametrize("word", ["slurm=5", "slurm=[1]", "trainer=7"])
def test_a_section_that_is_a_value_is_refused(word: str) -> None:
    request = JobRequest("torchrun", (word,), PROGRAM, {"trainer.nnodes": 1, "slurm.time": "1:00:00"})
    with pytest.raises(hpc_rl.UserError, match=f"{word.partition('=')[0]} is a section with keys such as"):
        prepare(as_test(request), print)


def test_what_is_resumed_and_what_has_changed_is_told(folder: Path) -> None:
    run = RunDir(folder / "runs" / "sft-1")
    run.path.mkdir(parents=True)
    job = Job("sft", compose("sft", [*REQUIRED, "optim.lr=1e-4"]), run, folder)
    assert resumed(job) == []
    (run.path / "attempt-1").mkdir()
    earlier = run.path / "attempt-1" / "config.yaml"
    earlier.write_text(dump(compose("sft", [*REQUIRED, "optim.lr=3e-5", "data.val_files=v.jsonl"])))
    assert resumed(job) == [
        "run sft-1 starts from the beginning: it has no checkpoint, with settings that differ from its last attempt:",
        '  data.val_files: ["v.jsonl"] -> []',
        "  optim.lr: 3e-05 -> 0.0001",
    ]
    (run.checkpoints / "step-00000040").mkdir(parents=True)
    earlier.write_text(dump(job.config))
    assert resumed(job) == ["run sft-1 resumes from step-00000040, with the same settings as its last attempt"]
    run.written.write_text(dump(job.config.updated("trainer.seed", 3).updated("optim.eps", 0.5)))
    run.config.write_text(dump(job.config.updated("optim.eps", 0.25)))
    assert resumed(job) == [
        f"{run.config} was edited, and the job has these edits: trainer.seed",
        "run sft-1 resumes from step-00000040, with the same settings as its last attempt",
    ]


def test_an_edit_of_the_settings_counts_when_the_run_is_submitted_again(folder: Path) -> None:
    run = RunDir(folder / "runs" / "mine")
    words = (*REQUIRED, "trainer.device=cpu", "slurm.time=1:00:00", "slurm.job_name=mine")
    first = compose("sft", words)
    fill_run_dir(Job("sft", first, run, folder), "#!/bin/bash\n", "")
    edited = first.updated("optim.lr", 0.25).updated("trainer.seed", 7).updated("data.chat_template_kwargs", {"a.b": 1})
    run.config.write_text(dump(edited))
    for _ in range(2):  # an edit stays one after an attempt, and after a submission
        again = plan(JobRequest("sft", (*words, "trainer.seed=9")))
        assert again.config == edited.updated("trainer.seed", 9), "what is typed comes first"
        fill_run_dir(again, "#!/bin/bash\n", "")
        run.next_attempt().mkdir()
        (run.attempts()[-1] / "config.yaml").write_text(run.config.read_text())
    assert plan(JobRequest("sft", words)).config == edited.updated("trainer.seed", 1), "a typed value is no edit"
    fill_run_dir(plan(JobRequest("sft", (*words, "slurm.partition=wrong"))), "#!/bin/bash\n", "")
    assert plan(JobRequest("sft", words)).config.slurm.partition is None, "nor is that of a submission that was refused"
    run.config.write_text(dump(first.updated("optim.lr", "fast")))
    with pytest.raises(hpc_rl.UserError, match=r"optim\.lr"):
        plan(JobRequest("sft", words))


def test_settings_that_another_user_may_have_written_are_not_read(folder: Path) -> None:
    run = RunDir(folder / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.path.chmod(0o777)
    run.written.write_text("{}")
    run.config.write_text("slurm: {python: /tmp/theirs}")
    with pytest.raises(hpc_rl.UserError, match="other users could run code as you"):
        plan(JobRequest("sft", (*REQUIRED, "slurm.job_name=mine")))


@pytest.mark.parametrize("name", ["-x", ".x", "a b", "a/b", "ü", "", "a;b", "$(x)"])
def test_a_job_name_has_a_plain_alphabet(name: str) -> None:
    with pytest.raises(hpc_rl.UserError):
        hpc_rl.submit("torchrun", ["trainer.device=cpu"], program=PROGRAM, job_name=name)
    assert not Path("runs").exists()


def test_an_image_that_srun_starts_is_refused_without_slurm() -> None:
    words = ("container.image=ubuntu", "container.runtime=pyxis", "trainer.device=cpu")
    with pytest.raises(hpc_rl.UserError, match="pyxis"):
        prepare(JobRequest("torchrun", words, PROGRAM, local=True), print)


def test_an_old_configuration_with_a_dollar_is_no_obstacle(folder: Path) -> None:
    run = RunDir(folder / "runs" / "sft-1")
    run.path.mkdir(parents=True)
    config = compose("sft", REQUIRED, {"slurm.setup": ["export X=${PATH%%:*}"]})
    (run.path / "attempt-1").mkdir()
    settings = run.path / "attempt-1" / "config.yaml"
    settings.write_text(dump(config))
    assert resumed(Job("sft", config, run, folder)) == [
        "run sft-1 starts from the beginning: it has no checkpoint, with the same settings as its last attempt"
    ]
    settings.write_text("{")
    assert "cannot be read" in resumed(Job("sft", config, run, folder))[0]
