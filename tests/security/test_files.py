"""Attempts of another user by means of files, as a table: ATTEMPTS. None succeeds, and none makes a command wait.

Both users are ordinary ones: what the user does runs in a copy of this process, which is root's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.images.build import _workplace
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control
from hpc_rl.runs.folders import submitting
from hpc_rl.runs.status import status_of
from hpc_rl.software.jit_caches import cache_folder
from hpc_rl.submission.preflight.folders import check_run_dir
from hpc_rl.submission.requeue import _own_script, requeue
from hpc_rl.submission.script.render import support_text
from hpc_rl.system.files import read_json, tail, write_atomically
from hpc_rl.system.scratch import job_folders, job_scratch, local_folder, remove_recorded, remove_scratch
from tests.fake_slurm import calls, fake_slurm
from tests.security.intruder import as_intruder
from tests.security.users import INTRUDER, VICTIM, copy_of_this_process, needs_root

pytestmark = [pytest.mark.security, needs_root, pytest.mark.timeout(120)]
SCRIPT = "#!/bin/bash\nsrun true # scontrol requeue\n"
GOLDEN = Path(__file__).parents[1] / "golden" / "sft.sbatch"


@dataclass(frozen=True)
class Place:
    """A machine with a folder like /tmp and a folder of the user."""

    shared: Path
    """Anybody can create files here (mode 1777)."""
    home: Path
    """The user's own, which anybody can pass through. `precious` in it has mode 0500."""
    private: Path
    """The user's own, closed to others."""

    @property
    def run(self) -> RunDir:
        """A run of the user."""
        return RunDir(self.home / "runs" / "mine")

    @property
    def environ(self) -> dict[str, str]:
        return {"TMPDIR": str(self.shared)}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    base = Path(tempfile.mkdtemp(prefix="hpc-rl-security-", dir="/tmp"))
    base.chmod(0o755)
    found = Place(base / "shared", base / "home", base / "private")
    found.shared.mkdir()
    found.shared.chmod(0o1777)
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    found.home.mkdir(mode=0o755)
    found.private.mkdir(mode=0o700)
    (found.home / "precious").mkdir(mode=0o500)
    (found.home / "precious" / "file").write_text("mine")
    found.run.path.mkdir(parents=True)
    found.run.script.write_text(SCRIPT)
    found.run.job.write_text(json.dumps({"job_id": "5", "working_dir": str(found.home)}))
    found.run.write_status("5", 1, "FAILED", 1)
    fake_slurm(found.private, monkeypatch)
    for path in (found.home, found.private, *found.home.rglob("*"), *found.private.rglob("*")):
        os.chown(path, VICTIM, VICTIM)
    monkeypatch.chdir(found.home)
    yield found
    shutil.rmtree(base)


def refused(what: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        what()
    assert "\n" not in str(error.value)


# What the user does after the intruder has planted something


def works_on_the_node(place: Place) -> None:
    """A job gets its folder and removes it; nothing of the user's is touched."""
    with job_scratch(place.environ, "7", place.private, 0) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == VICTIM
        assert folder.parent == place.shared
    assert not folder.exists()
    assert not [path for path in job_folders(place.environ, "7") if path.parent == place.shared]
    is_untouched(place)


def is_untouched(place: Place) -> None:
    assert (place.home / "precious").stat().st_mode & 0o777 == 0o500
    assert (place.home / "precious" / "file").read_text() == "mine"


def cleans_up(place: Place) -> None:
    """The job script's last block, as it runs on each node."""
    own = place.shared / f"{VICTIM}.7.abc"
    (own / "read-only").mkdir(parents=True)
    (own / "read-only").chmod(0o500)
    block = re.search(r"^      (bash -c '.*?') 2> /dev/null \|\| true$", support_text(), re.DOTALL | re.MULTILINE)
    assert block
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", **place.environ}
    subprocess.run(["bash", "-euc", block[1]], env=environ, check=True, timeout=600)
    assert not own.exists()
    is_untouched(place)


def removes_nothing(place: Place) -> None:
    """What Python removes after a killed entry."""
    planted = next(place.shared.iterdir())
    assert remove_scratch(planted)
    (place.private / ".node0.scratch").write_text(str(planted))
    remove_recorded(place.private, 0)
    assert planted.is_symlink() or planted.exists()
    is_untouched(place)


def keeps_no_cache(place: Place) -> None:
    assert cache_folder(place.shared) is None
    works_on_the_node(place)


def builds_an_image(place: Place) -> None:
    previous = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(place.shared)
    try:
        with _workplace() as (work, cache):
            for folder in (work, cache):
                assert folder.stat().st_uid == VICTIM and folder.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.environ.pop("TMPDIR")
        os.environ.update({} if previous is None else {"TMPDIR": previous})
    assert [path.name for path in place.shared.iterdir()] == [f"{VICTIM}.hpc-rl-images"]


def refuses_the_folder(path: str, said: str) -> Callable[[Place], None]:
    """Neither check nor submission accepts it as a run directory, and nothing is written through it."""

    def refuse(place: Place) -> None:
        run = RunDir(place.shared.parent / path)
        before = sorted(run.path.iterdir()) if run.path.is_dir() else []
        refused(lambda: check_run_dir(run.path), said)
        refused(run.check_owner, said)
        if (run.path / "job.sbatch").exists():
            refused(lambda: requeue(run), said)
        assert (sorted(run.path.iterdir()) if run.path.is_dir() else []) == before
        assert calls(place.private) == []
        is_untouched(place)

    return refuse


def does_not_requeue(said: str) -> Callable[[Place], None]:
    def refuse(place: Place) -> None:
        place.run.path.chmod(0o755)  # the user has noticed that others could write
        refused(lambda: requeue(place.run), said)
        assert not any(call.startswith("sbatch") for call in calls(place.private))
        is_untouched(place)

    return refuse


def refuses_the_planted_script(said: str) -> Callable[[Place], None]:
    """Neither the run nor the script itself is accepted."""

    def refuse(place: Place) -> None:
        does_not_requeue("contains job.sbatch, which belongs to user")(place)
        refused(lambda: _own_script(place.run.script), said)

    return refuse


def the_job_refuses(place: Place, said: str = "another user owns") -> None:
    """The script itself, submitted with plain sbatch: it writes nothing."""
    text = re.sub(r"^(export HPC_RL_RUN_DIR)=.*", rf"\1={place.run.path}", GOLDEN.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^python=\S+", f"python={sys.executable}", text, flags=re.MULTILINE)
    text = re.sub(r"^cd \S+", f"cd {place.home}", text, flags=re.MULTILINE)
    if not place.run.support.exists():
        place.run.support.write_text(support_text())
    before = sorted(path.name for path in place.run.path.iterdir())
    environ = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert sorted(path.name for path in place.run.path.iterdir()) == before
    is_untouched(place)


def the_closed_directory_is_refused(place: Place) -> None:
    """The user has noticed that others could write, and closed the directory. What was planted is still there."""
    place.run.path.chmod(0o700)
    refused(place.run.check_owner, rf"contains \S+, which belongs to user {INTRUDER}: unless you")
    the_job_refuses(place, "which belongs to another user: submit again with")


def reads_without_waiting(place: Place) -> None:
    run = RunDir(place.shared / "evil")
    assert read_json(run.job) == {} and tail(run.path / "job-1.log") == ""
    assert status_of(run).state == "NOT SUBMITTED"


def acts_on_no_run_of_others(place: Place) -> None:
    """job.json names this process of the user as a run on this machine, and the user has the right to end it."""
    run = RunDir(place.shared / "evil")
    assert json.loads(run.job.read_text())["pid"] == os.getpid()
    for act in (control.cancel, control.stop, requeue):
        refused(lambda act=act: act(run), "belongs to")
    assert not (run.path / "stop").exists() and calls(place.private) == []


def writes_no_links_target(place: Place) -> None:
    folder = place.shared / "open"
    write_atomically(folder / "stop", "user\n")
    assert (folder / "stop").read_text() == "user\n" and not (folder / "stop").is_symlink()
    is_untouched(place)


def locks_stay_free(place: Place) -> None:
    """The intruder could not open the locks, and both can be taken."""
    with submitting(place.run.path):
        refused(lambda: requeue(place.run), "is being submitted or removed by another command")
    with submitting(place.run.path):
        assert place.run.holder() is None


def refuses_the_lock(place: Place) -> None:
    place.run.path.chmod(0o755)
    refused(lambda: requeue(place.run), "contains .submission, which belongs to user")
    refused(lambda: submitting(place.run.path).__enter__(), "cannot lock mine")
    is_untouched(place)


def uses_tmp(place: Place) -> None:
    disk = place.shared.parent / "open"  # like a badly configured local disk
    assert local_folder({"TMPDIR": str(disk)}) == Path("/tmp")
    assert cache_folder(disk) is None


@dataclass(frozen=True)
class Attempt:
    plant: str
    """Lines of bash that the intruder runs in the shared folder. HOME is the user's, ME the user's id, PID the process
    id of `then`."""
    then: Callable[[Place], None]
    """What the user or the user's job does afterwards."""
    carelessness: str = ""
    """Lines of bash that the user, who is in the intruder's group too, has run before, in the same folder."""
    succeeds: bool = True
    """Whether the intruder's lines are possible at all."""


OPEN_RUN = "chmod 777 $HOME/runs/mine"
ATTEMPTS = {
    # Folders like /tmp on a node
    "a FIFO where the locks of killed jobs are looked for": Attempt(
        "mkdir $ME.zz; mkfifo $ME.zz/.hpc-rl", works_on_the_node
    ),
    "a link to the user's folder in place of a temporary folder": Attempt(
        "ln -s $HOME/precious $ME.7.abc", works_on_the_node
    ),
    "a link to the user's file in place of a lock": Attempt(
        "mkdir $ME.7.abc; ln -s $HOME/precious/file $ME.7.abc/.hpc-rl", works_on_the_node
    ),
    "a hard link in place of a lock": Attempt(
        "mkdir $ME.7.abc; touch x; ln x $ME.7.abc/.hpc-rl", works_on_the_node
    ),
    "folders of all names that follow from the job's id": Attempt(
        "mkdir $ME.7 $ME.7.{0..9} .$ME.7.{0..9} hpc-rl-7", works_on_the_node
    ),
    "ten thousand folders with names of the user": Attempt(
        "for i in {0..9999}; do echo $ME.7.$i; done | xargs mkdir", works_on_the_node
    ),
    "a link in place of a folder that the job script removes": Attempt(
        "ln -s $HOME/precious $ME.7.xyz", cleans_up
    ),
    "a folder with links that the job script would remove": Attempt(
        "mkdir $ME.7.xyz; ln -s $HOME/precious $ME.7.xyz/a", cleans_up
    ),
    "a file in place of a folder that the job script removes": Attempt("touch $ME.7.xyz", cleans_up),
    "a link in place of a folder that a node entry left": Attempt("ln -s $HOME/precious $ME.7.xyz", removes_nothing),
    "a folder in place of one that a node entry left": Attempt(
        "mkdir $ME.7.xyz; ln -s $HOME/precious $ME.7.xyz/a", removes_nothing
    ),
    "a folder in place of the compiled kernels": Attempt("mkdir -m 777 hpc-rl-cache-$ME", keeps_no_cache),
    "a link in place of the compiled kernels": Attempt("mkdir x; ln -s $PWD/x hpc-rl-cache-$ME", keeps_no_cache),
    "a link to the user's folder in place of the compiled kernels": Attempt(
        "ln -s $HOME/precious hpc-rl-cache-$ME", keeps_no_cache
    ),
    "a file in place of the folder for images": Attempt("touch $ME.hpc-rl-images", builds_an_image),
    "a folder in place of the folder for images": Attempt("mkdir -m 777 $ME.hpc-rl-images", builds_an_image),
    "a link in place of the folder for images": Attempt("ln -s $HOME/precious $ME.hpc-rl-images", builds_an_image),
    "a disk without the sticky bit": Attempt("mkdir -m 777 ../open/$ME.7.abc", uses_tmp),
    # Run directories
    "a run directory": Attempt("mkdir -m 777 run", refuses_the_folder("shared/run", "belongs to user")),
    "a run directory with a script": Attempt(
        "mkdir -m 777 run; echo id > run/job.sbatch", refuses_the_folder("shared/run", "belongs to user")
    ),
    "a link in place of a run directory": Attempt(
        "mkdir x; ln -s x run", refuses_the_folder("shared/run", "belongs to user")
    ),
    "a link to the user's own folder in place of a run directory": Attempt(
        "ln -s $HOME/precious run", refuses_the_folder("shared/run", "belongs to user")
    ),
    "a link that leads nowhere in place of a run directory": Attempt(
        "ln -s none run", refuses_the_folder("shared/run", "belongs to user")
    ),
    "the folder above the run directory": Attempt(
        "mkdir -m 777 above", refuses_the_folder("shared/above/run", "above belongs to user")
    ),
    "a link above the run directory": Attempt(
        "ln -s $HOME/runs above", refuses_the_folder("shared/above/mine", "above belongs to user")
    ),
    "the folder above a run directory of the user": Attempt(
        "mv $HOME/runs/mine $HOME/runs/theirs; mkdir $HOME/runs/mine",
        refuses_the_folder("home/runs/mine", "can be changed by all users"),
        carelessness="chmod 777 $HOME/runs",
    ),
    "the folder above, by a member of its group": Attempt(
        "", refuses_the_folder("home/runs/mine", "can be changed by group"),
        carelessness=f"chgrp {INTRUDER} $HOME/runs; chmod 770 $HOME/runs",
    ),
    "a link in place of config.yaml": Attempt(
        "ln -s $HOME/precious/file $HOME/runs/mine/config.yaml",
        refuses_the_folder("home/runs/mine", "it can be changed by all users"),
        carelessness=OPEN_RUN,
    ),
    "links in place of what the job script writes": Attempt(
        "cd $HOME/runs/mine; rm -f status.json; for name in config.yaml stop .lock status.json .status.json.7.partial; "
        "do ln -s $HOME/precious/file $name; done",
        the_job_refuses,
        carelessness=OPEN_RUN,
    ),
    "links that stay in a directory that was closed": Attempt(
        "cd $HOME/runs/mine; for name in .lock .probe-7 lost-nodes; do ln -s $HOME/precious/file $name; done",
        the_closed_directory_is_refused,
        carelessness=OPEN_RUN,
    ),
    "a FIFO that stays in a directory that was closed": Attempt(
        "mkfifo -m 666 $HOME/runs/mine/.lock", the_closed_directory_is_refused, carelessness=OPEN_RUN
    ),
    "a checkpoint that stays in a directory that was closed": Attempt(
        "mkdir -p $HOME/runs/mine/checkpoints/step-9", the_closed_directory_is_refused, carelessness=OPEN_RUN
    ),
    "a FIFO in place of the job's lock": Attempt(
        "mkfifo -m 666 $HOME/runs/mine/.lock", the_job_refuses, carelessness=OPEN_RUN
    ),
    "a stop file": Attempt("echo requeue > $HOME/runs/mine/stop", the_job_refuses, carelessness=OPEN_RUN),
    "another job script": Attempt(
        "cd $HOME/runs/mine; rm job.sbatch; echo id > job.sbatch",
        refuses_the_planted_script("belongs to another user, and would run as you"),
        carelessness=OPEN_RUN,
    ),
    "a link in place of the job script": Attempt(
        "cd $HOME/runs/mine; rm job.sbatch; ln -s $HOME/precious/file job.sbatch",
        refuses_the_planted_script("Too many levels of symbolic links"),
        carelessness=OPEN_RUN,
    ),
    "a FIFO in place of the job script": Attempt(
        "cd $HOME/runs/mine; rm job.sbatch; mkfifo -m 666 job.sbatch",
        refuses_the_planted_script("is not a regular file"),
        carelessness=OPEN_RUN,
    ),
    "a line at the end of a job script that is open": Attempt(
        "echo id >> $HOME/runs/mine/job.sbatch",
        does_not_requeue("can be changed by other users"),
        carelessness="chmod 666 $HOME/runs/mine/job.sbatch",
    ),
    "a second name of a job script": Attempt(
        "true", does_not_requeue("several names"), carelessness="ln $HOME/runs/mine/job.sbatch other.sbatch"
    ),
    "a link in place of the lock of submissions": Attempt(
        "ln -s $HOME/precious/file $HOME/runs/mine/.submission", refuses_the_lock, carelessness=OPEN_RUN
    ),
    "a FIFO in place of the lock of submissions": Attempt(
        "mkfifo -m 666 $HOME/runs/mine/.submission", refuses_the_lock, carelessness=OPEN_RUN
    ),
    "holding the locks of a run that others may read": Attempt(
        "flock -s -n $HOME/runs/mine/.lock sleep 60 || flock -s -n $HOME/runs/mine/.submission sleep 60",
        locks_stay_free,
        carelessness="cd $HOME/runs/mine; chmod 755 .; touch .lock .submission; chmod 600 .lock .submission",
        succeeds=False,
    ),
    "a link under the temporary name of a file": Attempt(
        f"mkdir -m 777 open; ln -s $HOME/precious/file open/.stop.{os.uname().nodename}.$PID.partial",
        writes_no_links_target,
    ),
    # Runs of others
    "a run whose files are FIFOs": Attempt(
        "mkdir -m 777 evil; cd evil; mkfifo job.json status.json job-1.log metrics.jsonl .lock config.yaml",
        reads_without_waiting,
    ),
    "a run that names a process of the user": Attempt(
        "mkdir -m 777 evil; cd evil; touch job.sbatch; started=$(sed 's/.*) //' /proc/$PID/stat | cut -d ' ' -f 20); "
        """echo '{"job_id": "local-1", "host": "'$(uname -n)'", "pid": '$PID', "start_time": '$started'}' > job.json""",
        acts_on_no_run_of_others,
    ),
    "reading a run": Attempt("cat $HOME/../private/slurm/sbatch", is_untouched, succeeds=False),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempt(place: Place, name: str) -> None:
    attempt = ATTEMPTS[name]
    environ = {"HOME": str(place.home), "ME": str(VICTIM)}
    if attempt.carelessness:
        subprocess.run(
            ["bash", "-euc", attempt.carelessness], cwd=place.shared, env={**os.environ, **environ},
            user=VICTIM, group=VICTIM, extra_groups=[INTRUDER], check=True, timeout=600,
        )  # fmt: skip
    with copy_of_this_process(VICTIM, lambda: attempt.then(place), deadline_s=60) as pid:
        done = as_intruder(attempt.plant, {**environ, "PID": str(pid)}, place.shared)
        assert (done.returncode == 0) == attempt.succeeds, done.stderr
