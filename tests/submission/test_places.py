"""The cluster that has a job is asked by every later command, whatever the shell says meanwhile."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from hpc_rl import cli
from hpc_rl.errors import UnclearError, UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import status_of
from hpc_rl.slurm.place import Place
from hpc_rl.submission import queue
from hpc_rl.submission.executor import submitted
from hpc_rl.submission.request import JobRequest
from hpc_rl.submission.script.directives import clusters_of, environment_notes
from hpc_rl.submission.series import sweep
from hpc_rl.submission.series.after import After
from tests.fake_slurm import calls, environment, fake_slurm

PROGRAM = ("trainer.device=cpu", "--", "train.py")
HpcRl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for name in ("here.conf", "there.conf"):
        (tmp_path / name).write_text(f"ClusterName={name}\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "here.conf"))
    return fake_slurm(tmp_path, monkeypatch)


def hpc_rl(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: its imports would take longer than all that it does."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["hpc-rl", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert isinstance(left.value.code, int)
    return subprocess.CompletedProcess(words, left.value.code, out.getvalue(), errors.getvalue())


def asked(folder: Path, since: int) -> dict[str, list[str]]:
    """The programs that were called since a number of calls -> the clusters that they were given."""
    found: dict[str, list[str]] = {}
    for line in calls(folder)[since:]:
        words = line.split()
        found.setdefault(words[0], []).extend(word for word in words if word.startswith("--clusters"))
    return found


@pytest.mark.parametrize("variable", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_the_cluster_of_a_variable_is_that_of_the_job_for_ever(tmp_path: Path, slurm: Path, variable: str) -> None:
    (slurm / "sbatch.text").write_text("7;foo\n")
    done = hpc_rl("submit", "torchrun", "--job-name", "mine", *PROGRAM, **{variable: "foo", "SLURM_JWT": "token"})
    assert done.returncode == 0, done.stderr
    assert asked(tmp_path, 0)["sinfo"] == ["--clusters=foo"] and asked(tmp_path, 0)["sbatch"] == ["--clusters=foo"]
    of_sbatch = environment(slurm, "sbatch")
    assert of_sbatch["SLURM_JWT"] == "token" and variable not in of_sbatch
    assert "#SBATCH --clusters=foo\n" in (tmp_path / "runs/mine/job.sbatch").read_text()
    (slurm / "squeue.text").write_text("7 |RUNNING |node1 |None |N/A |\n")
    begun = len(calls(tmp_path))
    later = {"SLURM_CLUSTERS": "bar", "SLURM_CONF": str(tmp_path / "there.conf"), "SQUEUE_FORMAT": "%i"}
    assert "RUNNING" in hpc_rl("status", "mine", **later).stdout
    assert "cancelled job 7" in hpc_rl("cancel", "mine", **later).stdout
    for program, clusters in asked(tmp_path, begun).items():
        assert clusters and set(clusters) == {"--clusters=foo"}, program
        found = environment(slurm, program)
        assert found["SLURM_CONF"] == str(tmp_path / "here.conf") and "SQUEUE_FORMAT" not in found
    assert {"squeue", "sacct", "scancel"} <= asked(tmp_path, begun).keys()


@pytest.mark.parametrize("where", ["foo", ""])
def test_a_run_is_requeued_where_it_was(tmp_path: Path, slurm: Path, where: str) -> None:
    (slurm / "sbatch.text").write_text(f"7;{where}\n" if where else "7\n")
    named = {"SLURM_CLUSTERS": where} if where else {}
    assert hpc_rl("submit", "torchrun", "--job-name", "mine", *PROGRAM, **named).returncode == 0
    run = RunDir(tmp_path / "runs/mine")
    run.write_status("7", 1, "FAILED", 1)
    begun = len(calls(tmp_path))
    done = hpc_rl("requeue", "mine", SLURM_CLUSTERS="bar", SBATCH_CLUSTERS="bar")
    assert done.returncode == 0, done.stderr
    assert asked(tmp_path, begun)["sbatch"] == ([f"--clusters={where}"] if where else [])
    assert "SBATCH_CLUSTERS" not in environment(slurm, "sbatch")
    run.script.write_text(run.script.read_text().replace("#!/bin/bash\n", "#!/bin/bash\n#SBATCH -M other\n", 1))
    if not where:
        refused = hpc_rl("requeue", "mine")
        assert refused.returncode == 2 and "--clusters=other, but its run" in refused.stderr


def test_a_run_is_requeued_with_the_functions_of_its_script(tmp_path: Path, slurm: Path) -> None:
    assert hpc_rl("submit", "torchrun", "--job-name", "mine", *PROGRAM).returncode == 0
    run = RunDir(tmp_path / "runs/mine")
    run.write_status("7", 1, "FAILED", 1)
    run.support.unlink()
    assert hpc_rl("requeue", "mine").returncode == 0 and run.support.is_file()
    run.write_status("7", 1, "FAILED", 1)
    run.script.write_text(re.sub("'[0-9a-f]{64}  -'", f"'{'0' * 64}  -'", run.script.read_text()))
    begun = len(calls(tmp_path))
    refused = hpc_rl("requeue", "mine")
    assert refused.returncode == 2 and "rendered by another version of hpc-rl" in refused.stderr
    assert "sbatch" not in asked(tmp_path, begun)


def test_the_points_of_a_sweep_are_where_the_array_is(tmp_path: Path, slurm: Path) -> None:
    (slurm / "sbatch.text").write_text("7;foo\n")
    command = ("sweep", "torchrun", "--job-name", "many", "slurm.env.LR=1,2", *PROGRAM)
    assert hpc_rl(*command, SLURM_CLUSTERS="foo").returncode == 0
    begun = len(calls(tmp_path))
    hpc_rl("runs", "many", SLURM_CLUSTERS="bar")
    assert set(asked(tmp_path, begun)["squeue"]) == set(asked(tmp_path, begun)["sacct"]) == {"--clusters=foo"}
    assert json.loads((tmp_path / "runs/many/many_2/job.json").read_text())["place"]["cluster"] == "foo"
    begun = len(calls(tmp_path))
    for number in (1, 2):
        RunDir(tmp_path / f"runs/many/many_{number}").write_status(f"7_{number}", 1, "FAILED", 1)
    assert hpc_rl("requeue", "many", SLURM_CLUSTERS="bar").returncode == 0
    assert asked(tmp_path, begun)["sbatch"] == ["--clusters=foo"]


def test_the_stages_of_a_chain_follow_the_first_one(tmp_path: Path, slurm: Path) -> None:
    (slurm / "sbatch.text").write_text("7;b\n")
    script = "#!/bin/bash\n#SBATCH --clusters=a,b\nscontrol requeue\n"
    first = queue.queue(script)
    assert first.job_id == "7" and first.place.cluster == "b"
    queue.queue(script, After("first", ("7",), place=first.place))
    assert calls(tmp_path)[-1].startswith("sbatch --clusters=b --parsable --dependency=afterok:7")
    with pytest.raises(UserError, match="has --clusters=c, but its run, or the job that it waits for, is in cluster b"):
        queue.queue(script.replace("a,b", "c"), After("first", ("7",), place=first.place))
    local = queue.queue("#!/bin/bash\n", place=first.place).place
    with pytest.raises(UserError, match="a job can wait for jobs of its own cluster only"):
        queue.queue("#!/bin/bash\n", After("x", ("7",), place=local), place=queue.Place())


def test_runs_of_two_clusters_with_one_id_are_told_apart(tmp_path: Path, slurm: Path) -> None:
    for name in ("a", "b"):
        run = RunDir(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        run.script.touch()
        run.job.write_text(json.dumps({"job_id": "7", "place": {"cluster": name}}))
    done = hpc_rl("status", "7")
    assert done.returncode == 2 and "job 7 belongs to several runs: name one of" in done.stderr


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("12\n", ("12", "")),
        ("12;foo\n", ("12", "foo")),
        ("Submitted batch job 12\n", ("12", "")),
        ("Submitted batch job 12 on cluster foo\n", ("12", "foo")),
        ("Welcome: job 99 of the maintenance starts at 8\n12;foo\n", ("12", "foo")),
        ("Your last job 99 failed\nSubmitted batch job 12\nsee job 98\n", ("12", "")),
        ("12\nSubmitted batch job 12\n", ("12", "")),
    ],
)
def test_the_id_is_that_of_the_line_in_which_sbatch_states_it(printed: str, expected: tuple[str, str]) -> None:
    assert submitted(printed) == expected


@pytest.mark.parametrize("printed", ["", "all jobs 99 fine\n", "99\n12\n", "Submitted batch job 12 times\n"])
def test_without_one_answer_nothing_is_cancelled(tmp_path: Path, slurm: Path, printed: str) -> None:
    (slurm / "sbatch.text").write_text(printed)
    done = hpc_rl("submit", "torchrun", *PROGRAM)
    assert done.returncode == 2 and "does not state one job id" in done.stderr and "squeue --me" in done.stderr
    assert not any(call.startswith("scancel") for call in calls(tmp_path))
    assert (tmp_path / "runs/torchrun-1/job.sbatch").is_file(), "the job may need it"


@pytest.mark.parametrize(
    ("fails", "is_unclear"),
    [
        (
            "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
            True,
        ),
        ("echo 'error: Unable to contact slurm controller (receive failure)' >&2; exit 1", True),
        ("exit 124", True),
        ("kill -KILL $$", True),
        ("exit 137", True),
        ("echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1", False),
        ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1", False),
        ("exit 126", False),
    ],
)
def test_a_failure_of_sbatch_that_leaves_open_whether_the_job_is_queued(
    slurm: Path, fails: str, is_unclear: bool
) -> None:
    (slurm / "sbatch.fails").write_text(fails)
    with pytest.raises(UserError, match="squeue --me" if is_unclear else "^sbatch") as found:
        queue.queue("#!/bin/bash\n")
    assert isinstance(found.value, UnclearError) == is_unclear


def test_the_files_of_a_job_that_may_be_queued_stay(tmp_path: Path, slurm: Path) -> None:
    run = RunDir(tmp_path / "runs/mine")
    command = ("submit", "torchrun", "--job-name", "mine", "--sbatch", "clusters=foo", *PROGRAM)
    (slurm / "sbatch.fails").write_text("echo 'Invalid account' >&2; exit 1")
    assert hpc_rl(*command).returncode == 2 and not run.path.exists()
    (slurm / "sbatch.fails").write_text("exit 124")
    done = hpc_rl(*command)
    assert done.returncode == 2 and "no answer within 120 s" in done.stderr and "squeue --me" in done.stderr
    assert run.script.is_file() and "job_id" not in run.read_job()
    assert (run.read_job()["kind"], run.read_job()["place"]["cluster"]) == ("torchrun", "foo")
    assert status_of(run).state == "NOT SUBMITTED"
    run.write_status("7", 1, "RUNNING", None)  # as its script does
    (slurm / "squeue.text").write_text("7 |RUNNING |node1 |None |N/A |\n")
    assert status_of(run).state == "RUNNING"
    assert "is RUNNING as job 7" in hpc_rl(*command).stderr


@pytest.mark.parametrize(("fails", "stays"), [("exit 124", True), ("echo no >&2; exit 1", False)])
def test_the_runs_of_a_sweep_that_may_be_queued_stay(tmp_path: Path, slurm: Path, fails: str, stays: bool) -> None:
    (slurm / "sbatch.fails").write_text(fails)
    done = hpc_rl("sweep", "torchrun", "--job-name", "many", "slurm.env.LR=1,2", *PROGRAM)
    assert done.returncode == 2 and ("squeue --me" in done.stderr) == stays
    assert (tmp_path / "runs/many").exists() == stays
    assert RunDir(tmp_path / "runs/many/many_2").read_job().get("kind") == ("torchrun" if stays else None)


def test_a_job_is_waited_for_in_the_cluster_of_the_submission(tmp_path: Path, slurm: Path) -> None:
    (slurm / "squeue.text").write_text("5 |RUNNING |node1 |None |N/A |\n")
    (slurm / "sbatch.text").write_text("7;foo\n")
    command = ("submit", "torchrun", "--job-name", "mine", "--after", "5")
    elsewhere = {"SLURM_CLUSTERS": "bar"}
    done = hpc_rl(*command, "--sbatch", "clusters=a,foo", *PROGRAM, **elsewhere)
    assert done.returncode == 2 and "set slurm.sbatch.clusters to the one that has this job" in done.stderr
    done = hpc_rl(*command, "--sbatch", "clusters=foo", *PROGRAM, **elsewhere)
    assert done.returncode == 0, done.stderr
    for program in ("squeue", "sacct", "sbatch"):
        assert set(asked(tmp_path, 0)[program]) == {"--clusters=foo"}, program
    assert [line for line in calls(tmp_path) if "--dependency=afterok:5" in line and line.startswith("sbatch")]
    RunDir(tmp_path / "runs/mine").write_status("7", 0, "CANCELLED", None)
    (slurm / "squeue.text").write_text("5 |RUNNING |node1 |None |N/A |\n7 |CANCELLED |node1 |None |N/A |\n")
    begun = len(calls(tmp_path))
    done = hpc_rl("requeue", "mine", **elsewhere)
    assert done.returncode == 0, done.stderr
    assert [line for line in calls(tmp_path)[begun:] if "--dependency=afterok:5" in line and line.startswith("sbatch")]
    assert {cluster for clusters in asked(tmp_path, begun).values() for cluster in clusters} == {"--clusters=foo"}


def test_a_large_sweep_has_the_limit_of_its_cluster(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm / "scontrol").write_text(
        '#!/bin/bash\nsize=1001; [[ "$*" != *--clusters=large* ]] || size=1003\n'
        "printf 'Configuration data as of 2026\\nMaxArraySize = %s\\n' $size\n"
    )
    monkeypatch.setenv("SLURM_CLUSTERS", "large")
    words = [f"slurm.env.LR={','.join(map(str, range(1003)))}"]
    for clusters, limit in (("large", 1002), ("large,small", 1000), ("small", 1000)):
        settings = {"trainer.device": "cpu", "slurm.sbatch.clusters": clusters}
        with pytest.raises(UserError, match=f"allows at most {limit} tasks per array"):
            sweep.plan(JobRequest("torchrun", words, ("train.py",), settings), None)


@pytest.mark.parametrize(
    ("place", "clusters", "may"),
    [
        (Place("foo"), "a,foo", True),
        (Place("foo"), "a", False),
        (Place("foo"), "", True),
        (Place("foo"), "all", True),
        (Place(), "a", True),  # the job of an earlier version
        (Place(name="here", is_recorded=True), "HERE", True),
        (Place(name="here", is_recorded=True), "other", False),
        (Place(is_recorded=True), "other", False),
    ],
)
def test_where_a_recorded_job_may_go_again(place: Place, clusters: str, may: bool) -> None:
    assert place.may_be_in(clusters) == may


def test_the_run_of_an_earlier_version_is_requeued_where_its_script_says(tmp_path: Path, slurm: Path) -> None:
    (slurm / "sbatch.text").write_text("7;foo\n")
    command = ("submit", "torchrun", "--job-name", "mine", "--sbatch", "clusters=foo", *PROGRAM)
    assert hpc_rl(*command).returncode == 0
    run = RunDir(tmp_path / "runs/mine")
    run.job.write_text(json.dumps({key: value for key, value in run.read_job().items() if key != "place"}))
    run.write_status("7", 1, "FAILED", 1)
    done = hpc_rl("requeue", "mine")
    assert done.returncode == 0, done.stderr
    assert run.read_job()["place"]["cluster"] == "foo"


@pytest.mark.parametrize(
    ("line", "clusters"),
    [
        ("#SBATCH --clusters=a,b", "a,b"),
        ("#SBATCH --clusters a", "a"),
        ("#SBATCH -M a", "a"),
        ("#SBATCH -Ma", "a"),
        ("#SBATCH -p gpu --clusters='a' # mine", "a"),
        ("#SBATCH --cluster-constraint=x", ""),
        ("# SBATCH --clusters=a", ""),
    ],
)
def test_the_cluster_of_a_script(line: str, clusters: str) -> None:
    assert clusters_of(f"#!/bin/bash\n{line}\n\necho\n#SBATCH --clusters=late\n") == clusters


def test_the_cluster_from_a_variable_is_said() -> None:
    script = "#!/bin/bash\n#SBATCH --clusters=foo\n"
    assert environment_notes({"SLURM_CLUSTERS": "foo"}, script) == [
        "from the environment: --clusters=foo (SLURM_CLUSTERS)"
    ]
    assert "SLURM_CLUSTERS=bar is ignored" in environment_notes({"SLURM_CLUSTERS": "bar"}, script)[0]
