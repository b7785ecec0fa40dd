"""What is left of a submission that was broken off, and when a run may be submitted again."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose, dump
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.launch import prepare
from hpc_rl.submission.preflight.checks import partition
from hpc_rl.submission.request import JobRequest
from hpc_rl.submission.requeue import requeue
from hpc_rl.submission.series import chain
from tests.fake_slurm import calls, fake_slurm
from tests.helpers import hpc_rl, make_tiny_model
from tests.marks import long
from tests.small_disk import needs_root, small_disk

PROGRAM = ("trainer.device=cpu", "--", "train.py")


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return fake_slurm(tmp_path, monkeypatch)


def run(folder: Path, **files: object) -> RunDir:
    """A run directory with these JSON files and a script that can be queued again by itself."""
    found = RunDir(folder / "runs" / "mine")
    found.path.mkdir(parents=True, exist_ok=True)
    found.script.write_text("scontrol requeue\n")
    for name, facts in files.items():
        (found.path / f"{name}.json").write_text(json.dumps(facts))
    return found


@pytest.mark.parametrize("command", [("submit", "torchrun"), ("sweep", "torchrun", "slurm.env.LR=1,2")])
def test_ctrl_c_during_a_submission_leaves_neither_job_nor_folder(
    tmp_path: Path, slurm: Path, command: Sequence[str]
) -> None:
    hold = slurm / "sbatch.hold"
    hold.touch()
    process = subprocess.Popen([sys.executable, "-m", "hpc_rl.cli", *command, *PROGRAM])
    deadline = time.monotonic() + 600
    try:
        while not any(call.startswith("sbatch ") for call in calls(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    finally:
        hold.unlink()
    assert process.wait(600) == 130
    assert calls(tmp_path)[-1] == "scancel 7"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [("submit", "torchrun", "--job-name", "mine", *PROGRAM), ("requeue", "mine")])
def test_of_four_submissions_of_a_run_at_the_same_time_one_is_accepted(
    tmp_path: Path, slurm: Path, command: Sequence[str]
) -> None:
    if command[0] == "requeue":
        run(tmp_path, job={"job_id": "5"}, status={"job_id": "5", "attempt": 1, "state": "FAILED", "exit_code": 1})
    stop = tmp_path / "runs" / "mine" / "stop"
    hold = slurm / "sbatch.hold"
    hold.touch()
    started = [
        subprocess.Popen([sys.executable, "-m", "hpc_rl.cli", *command], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    deadline = time.monotonic() + 600
    try:
        while time.monotonic() < deadline:
            refused = sum(one.poll() is not None for one in started)
            if refused == 3 and any(call.startswith("sbatch ") for call in calls(tmp_path)):
                break
            time.sleep(0.02)
        stop.write_text("user\n")  # written while the first one still submits: the refused ones leave it
    finally:
        hold.unlink()
    codes = [one.wait(600) for one in started]
    said = [one.stderr.read() for one in started if one.stderr]
    assert sorted(codes) == [0, 2, 2, 2], said
    refusals = [text.splitlines()[-1] for code, text in zip(codes, said, strict=True) if code == 2]
    assert all(text.startswith("hpc-rl: run mine is ") for text in refusals), refusals
    assert sum(call.startswith("sbatch ") for call in calls(tmp_path)) == 1
    assert stop.read_text() == "user\n"


def test_a_run_that_has_started_waits_no_longer(tmp_path: Path) -> None:
    job = {"job_id": "5", "after": "3", "working_dir": str(tmp_path)}
    mine = run(tmp_path, job=job, status={"job_id": "5", "attempt": 1, "state": "FAILED", "exit_code": 1})
    assert requeue(mine) == (
        "submitted job 7: run mine starts from the beginning: it has no checkpoint (previous state: FAILED)"
    )
    assert not any("--dependency" in call for call in calls(tmp_path))


def started(folder: Path, kind: str, state: str, *words: str) -> RunDir:
    """A run whose last attempt has ended, and its data."""
    (folder / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    words = ("model.path=model", "trainer.device=cpu", "data.prompt_key=question", *words)
    config = compose(kind, words)
    job = {
        "job_id": "5",
        "kind": kind,
        "working_dir": str(folder),
        "data": Job(kind, config, RunDir(folder), folder).data_state,
    }
    found = run(folder, job=job, status={"job_id": "5", "attempt": 1, "state": state, "exit_code": 1})
    found.config.write_text(dump(config))
    return found


SFT = ("data.train_files=train.jsonl", "data.response_key=answer", "data.train_batch_size=1")
EVAL = ("data.files=train.jsonl", "reward.function=score.py:score")


def test_a_requeued_run_is_checked_as_when_it_was_submitted(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "score.py").write_text("def score(response, answer):\n    return 1.0\n")
    mine = started(tmp_path, "eval", "FAILED", *EVAL)
    assert "run mine starts from the beginning" in requeue(mine)
    (mine.path / "job-7.log").touch()
    for text, said in {
        "import no_such_package\ndef score(response, answer):\n    return 1.0\n": "score needs no_such_package",
        "def other(response, answer):\n    return 1.0\n": "no 'score' in score.py",
    }.items():
        (tmp_path / "score.py").write_text(text)
        with pytest.raises(UserError, match=said):
            requeue(mine)
    assert sum(call.startswith("sbatch ") for call in calls(tmp_path)) == 1


def test_a_run_does_not_resume_in_the_middle_of_other_data(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    mine, data = started(tmp_path, "sft", "FAILED", *SFT), tmp_path / "train.jsonl"
    data.write_text(data.read_text() * 2)
    assert "starts from the beginning" in requeue(mine), "nothing is resumed"
    (mine.path / "job-7.log").touch()
    (mine.checkpoints / "step-00000040").mkdir(parents=True)
    with pytest.raises(UserError, match=r"train.jsonl has \d+ bytes, and had \d+ when run mine was submitted"):
        requeue(mine)
    data.write_text(data.read_text()[: data.stat().st_size // 2])
    submitted, note = requeue(mine).splitlines()
    assert submitted == "submitted job 7: run mine resumes from step-00000040 (previous state: FAILED)"
    assert note.startswith("train.jsonl was written again after run mine was submitted")


def test_finished_blocks_are_what_a_generation_resumes_from(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    mine = started(tmp_path, "generate", "CANCELLED", "data.files=train.jsonl")
    mine.response_parts.mkdir()
    (mine.response_parts / "000000.jsonl").touch()
    assert "run mine resumes from 1 finished block (" in requeue(mine)


@pytest.mark.parametrize(("word", "accepted"), [("slurm.time=10:00", False), ("trainer.total_epochs=9", True)])
def test_a_completed_run_is_not_queued_again_for_nothing(tmp_path: Path, word: str, accepted: bool) -> None:
    make_tiny_model(tmp_path / "model")
    started(tmp_path, "sft", "COMPLETED", *SFT)
    words = ("model.path=model", "trainer.device=cpu", "data.prompt_key=question", *SFT, word)
    request = JobRequest("sft", words, settings={"slurm.job_name": "mine"})
    if accepted:
        assert prepare(request, print)
    else:
        with pytest.raises(UserError, match="run mine has completed, and the job would have nothing to do"):
            prepare(request, print)


def test_a_run_that_never_started_still_waits(tmp_path: Path) -> None:
    job = {"job_id": "5", "after": "3", "working_dir": str(tmp_path)}
    mine = run(tmp_path, job=job, status={"job_id": "5", "attempt": 0, "state": "CANCELLED", "exit_code": None})
    with pytest.raises(UserError, match="--after 3: Slurm has no record of this job"):
        requeue(mine)


def test_a_script_that_never_queues_itself_again_is_not_asked_to(tmp_path: Path, slurm: Path) -> None:
    mine = run(tmp_path, job={"job_id": "5"}, status={"job_id": "5", "attempt": 1, "state": "RUNNING"})
    (slurm / "squeue.text").write_text("5|RUNNING|node1|None|\n")
    assert "will save as soon as it can" in requeue(mine)
    mine.stop.unlink()
    mine.script.write_text("srun true\n")
    with pytest.raises(UserError, match="was submitted with slurm"):
        requeue(mine)
    assert not mine.stop.exists()


@pytest.mark.parametrize(("in_slurm", "recorded"), [("COMPLETING", "RUNNING"), ("RUNNING", "FAILED")])
def test_a_job_that_is_ending_is_not_asked_to_save(tmp_path: Path, slurm: Path, in_slurm: str, recorded: str) -> None:
    mine = run(tmp_path, job={"job_id": "5"}, status={"job_id": "5", "attempt": 1, "state": recorded})
    (slurm / "squeue.text").write_text(f"5|{in_slurm}|node1|None|\n")
    with pytest.raises(UserError, match="job 5 of run mine is ending: wait until it has ended"):
        requeue(mine)
    assert not mine.stop.exists()
    mine.status.write_text(json.dumps({"job_id": "5", "attempt": 1, "state": "REQUEUED"}))
    (slurm / "squeue.text").write_text("5|RUNNING|node1|None|\n")
    assert "will save as soon as it can" in requeue(mine)


def edited_run(tmp_path: Path, state: str = "FAILED", **edited: Any) -> RunDir:
    """Return a run of the kind sft, with edited options."""
    (tmp_path / "t.jsonl").write_text('{"messages": []}')
    config = compose("sft", ["model.path=m", "data.train_files=t.jsonl", "trainer.device=cpu"])
    about = {"job_id": "5", "working_dir": str(tmp_path), "kind": "sft"}
    mine = run(tmp_path, job=about, status={"job_id": "5", "attempt": 1, "state": state, "exit_code": 1})
    mine.written.write_text(dump(config))
    for key, value in edited.items():
        config = config.updated(key.replace("__", "."), value)
    mine.config.write_text(dump(config))
    return mine


def test_the_edited_settings_of_a_run_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_rl.submission.requeue.check_again", lambda runs: [])
    mine = edited_run(tmp_path, optim__lr=0.5, data__train_files=["u.jsonl"])
    submitted, head, *lines = requeue(mine).splitlines()
    assert submitted.startswith("submitted job 7") and head == f"{mine.config} was edited:"
    assert lines == ['  data.train_files: ["t.jsonl"] -> ["u.jsonl"]', "  optim.lr: 1e-05 -> 0.5"]


def test_the_edits_of_a_running_job_are_checked_before_it_is_asked_to_stop(tmp_path: Path, slurm: Path) -> None:
    (slurm / "squeue.text").write_text("5|RUNNING|node1|None|\n")
    mine = edited_run(tmp_path, "RUNNING", optim__lr="fast")
    mine.script.write_text("hpc_rl_requeue='yes'\n")
    with pytest.raises(UserError, match=r"config\.yaml, line \d+: optim\.lr"):
        requeue(mine)
    assert not mine.stop.exists()
    mine = edited_run(tmp_path, "RUNNING", optim__lr=0.5)
    assert requeue(mine).splitlines()[1:] == [f"{mine.config} was edited:", "  optim.lr: 1e-05 -> 0.5"]


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        ({"optim__lr": "fast"}, r"config\.yaml, line \d+: optim\.lr"),
        ({"trainer__nnodes": 2}, r"job\.sbatch contains trainer\.nnodes too: submit .* with --job-name mine"),
    ],
)
def test_edits_that_a_requeued_job_cannot_have_are_refused(tmp_path: Path, edited: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        requeue(edited_run(tmp_path, **edited))
    assert not any(call.startswith("sbatch") for call in calls(tmp_path))


def test_an_edit_that_the_script_of_an_earlier_version_would_replace_is_refused(tmp_path: Path) -> None:
    mine = edited_run(tmp_path, optim__lr=0.5)
    (mine.path / "attempt-1").mkdir()
    (mine.path / "attempt-1" / "config.yaml").write_text(mine.written.read_text())
    mine.script.write_text("#!/bin/bash\nwrite_config <<'END'\nEND\n")
    with pytest.raises(UserError, match="of an earlier version of hpc-rl would replace it"):
        requeue(mine)


@needs_root
@pytest.mark.parametrize("outage", ["full", "no inodes", "read-only"])
@pytest.mark.parametrize("command", [("submit", "torchrun"), ("sweep", "torchrun", "slurm.env.LR=1,2")])
def test_a_submission_to_a_full_disk_is_one_message(tmp_path: Path, command: Sequence[str], outage: str) -> None:
    with small_disk(tmp_path / "disk") as disk:
        (disk.path / "train.py").touch()
        {"full": disk.fill, "no inodes": disk.use_all_inodes, "read-only": disk.read_only}[outage]()
        done = hpc_rl(*command, *PROGRAM, folder=disk.path)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert f"{disk.path} (tmpfs)" in done.stderr and len(done.stderr.splitlines()) <= 3, done.stderr
        assert not any(call.startswith("sbatch") for call in calls(tmp_path))


@needs_root
def test_a_full_disk_is_shown_afterwards(tmp_path: Path) -> None:
    """The job could not write a log."""
    with small_disk(tmp_path / "disk") as disk:
        status = {"job_id": "5", "attempt": 0, "state": "FAILED", "exit_code": 2}
        mine = run(disk.path, job={"job_id": "5"}, status=status)
        disk.fill()
        for command in ("status", "explain"):
            done = hpc_rl(command, str(mine.path), folder=tmp_path)
            assert "No space left on device" in done.stdout, (command, done.stdout, done.stderr)
            assert f"file system {disk.path} (tmpfs) has 0 bytes" in done.stdout, (command, done.stdout)


@pytest.fixture
def listing(slurm: Path) -> Path:
    """The programs' folder, with a sinfo that lists nodes of one partition."""
    nodes = "gpu*|up|1-00:00:00|01:00:00|2|64|500000|gpu:a100:4|(null)|NO|idle"
    (slurm / "sinfo").write_text(f'#!/bin/sh\necho "sinfo $*" >> "{slurm}/calls"\necho "{nodes}"\n')
    return slurm


@pytest.mark.parametrize("command", [long(("submit", "torchrun")), ("sweep", "torchrun", "slurm.env.LR=1,2,3")])
def test_the_nodes_are_listed_once(tmp_path: Path, listing: Path, command: Sequence[str]) -> None:
    hpc_rl(*command, "--", "train.py", check=True)
    assert [call.split()[0] for call in calls(tmp_path)].count("sinfo") == 1
    assert "#SBATCH --gpus-per-node=4\n" in next(tmp_path.glob("runs/**/job.sbatch")).read_text()


@pytest.mark.usefixtures("listing")
def test_the_nodes_are_listed_once_for_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes_on(jobs: Sequence[Job], _local: bool) -> list[str]:
        return [str(check(*arguments)) for job in jobs for check, *arguments in partition(job)]

    monkeypatch.setattr(chain, "notes_on", notes_on)
    first = JobRequest("sft", ("model.path=model", "data.train_files=x", "slurm.job_name=a"))
    planned, _ = chain.plan([first, JobRequest("sft", ("data.train_files=x", "slurm.job_name=b"))])
    assert [job.config.slurm.node.gpus for job, _ in planned] == [4, 4]
    assert [call.split()[0] for call in calls(tmp_path)].count("sinfo") == 1
