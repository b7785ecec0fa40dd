"""The lines and the report of the training checks, and their place in the site profile."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.doctor.checks import has_problem
from hpc_rl.doctor.job import TRAIN_TIME, doctor_job, read_findings
from hpc_rl.doctor.training import anonymous, layouts, report, training_checks, write_page
from hpc_rl.errors import UserError
from hpc_rl.formats.acceptance import Line, append, read, results_file
from hpc_rl.formats.layouts import WITHOUT_CHECK, Covered
from hpc_rl.formats.node_report import report_path
from hpc_rl.run_dir import RunDir
from hpc_rl.sites.profile import read as read_profile
from hpc_rl.sites.record import split, with_record, write_record
from hpc_rl.submission.script.render import render
from tests.doctor.test_doctor import GOOD
from tests.helpers import hpc_rl

HOME = Path("/home/somebody")
PLANNED = Line("packing", "torchrun", "planned", "packed samples differ", "trainer.packing=false")


def test_each_state_is_a_line() -> None:
    passed = replace(PLANNED, name="attention").ended("passed", "error 1e-3", 2.4)
    skipped = replace(PLANNED, name="compile").ended("skipped", "applies to GPUs only")
    failed = replace(PLANNED, name="resume").ended("failed", "differs")
    started = replace(PLANNED, name="speed", state="started")
    checks = training_checks([passed, skipped, failed, started, PLANNED])
    assert [check.level for check in checks] == ["ok", "skipped", "problem", "problem", "problem"]
    assert checks[0].found == "error 1e-3 (2 s)" and checks[1].found == "applies to GPUs only"
    assert checks[2].found == "differs. Meaning: packed samples differ"
    assert checks[2].remedy == "avoid it with trainer.packing=false"
    assert checks[3].found == "the job ended during this check" and "--time" in checks[4].remedy
    assert not has_problem(checks[:2]) and has_problem(checks)
    assert training_checks([])[0].level == "problem"


def test_the_report_begins_with_versions_and_hardware() -> None:
    checks = training_checks([PLANNED.ended("failed", f"no file in {HOME}/data")])
    text = report([GOOD, replace(GOOD, node="node2", rank=1)], checks, [], "2026-01-31", HOME, "somebody")
    lines = text.splitlines()
    assert lines[0] == "hpc-rl doctor --train, 2026-01-31: 1 problem"
    assert lines[1].startswith("Python 3.11.7 on x86_64, hpc-rl 0.4, torch 2.13.0") and "CUDA 13.0" in lines[1]
    assert lines[2] == "2 nodes x 8 processes on cuda, interface ib0 of lo, eth0, ib0"
    assert lines[3] == "8 x NVIDIA H200, driver 580.95.05, 32 CPUs, 500 GiB memory"
    assert lines[4].startswith("problem  packing  no file in ~/data. Meaning: ")
    assert lines[5].startswith("layouts that need other nodes") and len(lines) == 7 + len(Covered)
    linked = replace(GOOD, gpu_links="28 x NV18")
    text = report([linked], checks, [], "2026-01-31", HOME, "somebody")
    assert "driver 580.95.05, links between GPUs: 28 x NV18, 32 CPUs" in text


def test_the_report_names_the_layouts_that_were_covered_and_the_others() -> None:
    covering = replace(PLANNED, name="sharding", covers=(Covered.SHARDED,))
    other = replace(PLANNED, name="tensor parallel", covers=(Covered.IPC_TP2, Covered.SHARDED))
    found = layouts([covering.ended("passed", "fine"), other.ended("failed", "no"), PLANNED.ended("passed", "fine")])
    assert found[:2] == ["layouts that were covered:", f"  {Covered.SHARDED}"]
    assert found[2:4] == ["layouts whose check did not pass:", f"  {Covered.IPC_TP2}"]
    assert found[4].startswith("layouts that need other nodes, GPUs or packages") and f"  {Covered.NCCL_3}" in found[5:]
    without = found.index("layouts that no check covers:")
    assert found[without + 1 :] == [f"  {layout}" for layout in WITHOUT_CHECK]
    assert len(found) == 4 + len(Covered)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file /scratch/somebody/run/a.json in ~/x", "no file a.json in ~/x"),
        ("File /opt/lib/python3.11/site-packages/vllm/engine.py, line 3", "File engine.py, line 3"),
        ("~/runs/doctor-1/log of node1", "log of node0"),
        ("gpu07 cannot reach gpu07.cluster.example.org at 10.1.2.3:2345", "node1 cannot reach node1 at ADDRESS:2345"),
        ("gpu070 is no node of the job, and node-1 neither", "gpu070 is no node of the job, and node-1 neither"),
        ("user somebody has no quota", "user USER has no quota"),
        ("token hf_abcdefghijklmnop is refused", "token KEY is refused"),
        ("3.2 GB/s, driver 580.95.05, vllm 0.32.0", "3.2 GB/s, driver 580.95.05, vllm 0.32.0"),
        ("see https://github.com/pytorch/pytorch/issues/1", "see https://github.com/pytorch/pytorch/issues/1"),
    ],
)
def test_the_page_names_no_person_machine_or_folder(text: str, shown: str) -> None:
    assert anonymous(text, ["node1", "gpu07.cluster.example.org"], HOME, "somebody") == shown


def test_the_page_is_beside_the_run_which_may_be_removed(tmp_path: Path) -> None:
    page = write_page("1 ok\nok  packing", tmp_path / "doctor-1")
    assert page == tmp_path / "doctor-1.md" and page.read_text() == "```text\n1 ok\nok  packing\n```\n"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/doctor-1\.md cannot be written"):
        write_page("1 ok", tmp_path / "file" / "doctor-1")


def test_a_job_that_was_cut_off_has_a_complete_report(tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-1"
    (attempt / "train").mkdir(parents=True)
    for rank in range(2):
        replace(GOOD, rank=rank).write(report_path(attempt, rank))
    append(results_file(attempt), [PLANNED, replace(PLANNED, name="attention")])
    append(results_file(attempt), [PLANNED.ended("passed", "fine")])
    found = read_findings(RunDir(tmp_path), trains=True)
    assert [check.level for check in found.training] == ["ok", "problem"]
    assert "1 ok, 1 problem" in found.report and found.everything == [*found.checks, *found.training]
    assert read_findings(RunDir(tmp_path), trains=False).training == []


SETTINGS = "slurm:\n  partition: gpu    # the only one\n"


def test_the_profile_keeps_its_settings_and_one_result(tmp_path: Path) -> None:
    profile = tmp_path / "config" / "site.yaml"
    assert write_record("first\n  line", profile) == profile
    assert read_profile(profile) == []
    once = with_record(SETTINGS, "1 ok\nok  packing")
    assert once.startswith(SETTINGS) and "#   ok  packing" in once
    twice = with_record(once + "trainer:\n  device: cpu\n", "2 ok")
    assert "1 ok" not in twice and twice.count("# begin:") == 1
    profile.write_text(twice)
    assert [(key, value) for key, value, _ in read_profile(profile)] == [
        ("slurm.partition", "gpu"),
        ("trainer.device", "cpu"),
    ]
    assert split(SETTINGS) == (SETTINGS, "")


def test_a_profile_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"site profile .*file/site\.yaml"):
        write_record("text", tmp_path / "file" / "site.yaml")


def test_the_job_runs_the_training_checks_and_has_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    job = doctor_job(2, ["trainer.device=cpu"], {}, None, None, local=True, trains=True)
    assert job.program == ("train",) and job.config.slurm.time == TRAIN_TIME
    assert render(job).count(" -- train &\n") == 1
    plain = doctor_job(2, ["trainer.device=cpu"], {}, None, None, local=True)
    assert "train &" not in render(plain)
    assert plain.program == () and plain.config.slurm.time == "10:00"


def test_train_needs_nodes(tmp_path: Path) -> None:
    done = hpc_rl("doctor", "--train", folder=tmp_path)
    assert done.returncode == 2 and "add --on-nodes N" in done.stderr


def test_results_are_plain_json(tmp_path: Path) -> None:
    append(tmp_path / "results.jsonl", [PLANNED.ended("passed", "two\nlines  here")])
    assert json.loads((tmp_path / "results.jsonl").read_text())["found"] == "two lines here"


def test_layouts_come_back_from_the_results(tmp_path: Path) -> None:
    line = replace(PLANNED, covers=(str(Covered.SHARDED),))
    append(tmp_path / "results.jsonl", [line])
    assert read(tmp_path / "results.jsonl") == [line]
