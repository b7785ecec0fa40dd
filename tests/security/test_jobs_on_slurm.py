"""Running jobs on a real Slurm: what another user on their node can do to them, and where their secrets are written."""

from __future__ import annotations

import re
import resource
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_ppo_on_slurm import PPO, REWARD
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.sandbox.cluster import Cluster
from tests.security.intruder import INTRUDER

pytestmark = [pytest.mark.sandbox, pytest.mark.security]
SECRETS = {name: f"{name.lower()}-{uuid.uuid4().hex}" for name in ("HF_TOKEN", "WANDB_API_KEY")}
NODE = "node1"
STEPS = ["trainer.total_training_steps=4", "trainer.save_freq=2"]
PLANT = """cd /tmp
mkdir -m 777 0.zz && mkfifo -m 666 0.zz/.hpc-rl
for id in {1..99}; do ln -s $PRECIOUS 0.$id.0; mkdir 0.$id.1; done
mkdir -p -m 777 hpc-rl-cache-0 0.hpc-rl-images
"""
ATTEMPTS = {
    "list the temporary folder": "ls $SCRATCH",
    "write into it": "touch $SCRATCH/x",
    "open it for others": "chmod 777 $SCRATCH",
    "move it away": "mv $SCRATCH /tmp/theirs",
    "remove it": "rm -rf $SCRATCH; test ! -e $SCRATCH",
    "replace it by a link": "ln -sfn /tmp/0.zz $SCRATCH && test -h $SCRATCH",
    "list the run directory": "ls $RUN",
    "write a stop file": "echo user > $RUN/stop",
    "replace the configuration": "echo x > $RUN/config.yaml",
    "replace the job script": "echo id > $RUN/job.sbatch",
    "write a state": "echo '{}' > $RUN/status.json",
    "take the lock": "flock --nonblock $RUN/.lock true",
    "move the run directory away": "mv $RUN $RUN.away",
    "read the log": "cat $RUN/job-$JOB.log",
    "read a rank's variables": "cat /proc/$RANK/environ",
    "read a rank's memory": "head -c 1 /proc/$RANK/mem",
    "list a rank's files": "ls /proc/$RANK/fd",
    "end a rank": "kill $RANK",
    "change the walltime": "scontrol update JobId=$JOB TimeLimit=1",
    "requeue the job": "scontrol requeue $JOB",
    "cancel the job": "scancel $JOB",
    "signal the job": "scancel --signal=USR2 --full $JOB",
    "read the script that Slurm has": "scontrol write batch_script $JOB - | grep srun",
    "start a step in the job": "timeout 20 srun --jobid=$JOB --overlap true",
}
"""What the intruder tries while the job runs. An exit code of 0 means that it worked."""


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Iterator[Workspace]:
    environ = {**slurm_cluster.env, **SECRETS}
    found = make_workspace(slurm_cluster.shared / f"security-{uuid.uuid4().hex[:8]}", environ)
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))  # a user who allows core dumps
    yield found
    resource.setrlimit(resource.RLIMIT_CORE, limits)
    on_node(slurm_cluster, f"find /tmp -mindepth 1 -maxdepth 1 -user {INTRUDER} -exec rm -rf {{}} +")


def job_id(workspace: Workspace, run: str) -> str:
    return str(workspace.status(run)["job_id"])


def on_node(cluster: Cluster, command: str) -> str:
    return cluster.exec_on(NODE, ["bash", "-c", command], check=True).stdout


def intrude(cluster: Cluster, commands: str, **variables: str) -> tuple[int, str]:
    environ = [f"{name}={value}" for name, value in {"SLURM_CONF": cluster.env["SLURM_CONF"], **variables}.items()]
    other = ["setpriv", f"--reuid={INTRUDER}", f"--regid={INTRUDER}", "--clear-groups", "env", *environ]
    done = cluster.exec_on(NODE, [*other, "bash", "-uc", commands])
    return done.returncode, done.stdout + done.stderr


def places_of(secret: str, *folders: Path | str) -> list[str]:
    """Return the files that contain a text."""
    command = ["grep", "-rlaF", "--", secret, *folders]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return found.stdout.split("\n")[:-1]


def expect_no_secret(cluster: Cluster, workspace: Workspace, run: str, secrets: list[str]) -> None:
    """Check that nothing that the run, Slurm or the node shows has a secret."""
    job = job_id(workspace, run)
    shown = {
        "arguments": on_node(cluster, "cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' ' '; true"),
        "scontrol show job": cluster.run(["scontrol", "show", "job", "-dd", job]).stdout,
        "the stored script": cluster.run(["scontrol", "write", "batch_script", job, "-"]).stdout,
    }
    assert "srun" in shown["the stored script"] and "bash" in shown["arguments"]
    for secret in secrets:
        assert [what for what, text in shown.items() if secret in text] == []
        assert places_of(secret, workspace.folder) == []
        assert on_node(cluster, f"grep -rlsF -e {secret} /tmp; true") == "", "the node's disk"
        # Slurm keeps a job's variables for itself.
        for path in map(Path, places_of(secret, cluster.base / "state", cluster.base / "spool")):
            assert path.name == "environment" and path.stat().st_mode & 0o077 == 0, path


def test_a_running_job_is_out_of_reach_and_leaves_nothing(workspace: Workspace, slurm_cluster: Cluster) -> None:
    precious = workspace.folder / "precious"
    precious.mkdir(mode=0o500)
    workspace.folder.chmod(0o755)
    code, said = intrude(slurm_cluster, PLANT, PRECIOUS=str(precious))
    assert code == 0, said
    before = set(on_node(slurm_cluster, "ls -A /tmp").split())  # an earlier job may still be removing its folder
    hold = [*workspace.hold_at(2), f"slurm.sbatch.nodelist={NODE}"]
    wandb = ["trainer.logger=[console,wandb]", "trainer.wandb_mode=offline", "trainer.profile_steps=[1]"]
    workspace.ok("submit", "sft", "--job-name", "held", *QUICK, *STEPS, *hold, *wandb)
    workspace.wait_for_step("held", 2)
    job, run = job_id(workspace, "held"), workspace.folder / "runs" / "held"
    attempt = run / "attempt-1"
    scratch = (attempt / ".node0.scratch").read_text()
    assert re.fullmatch(rf"/tmp/0\.{job}\.[0-9a-f]{{6}}", scratch) and run.stat().st_mode & 0o777 == 0o700
    rank = on_node(slurm_cluster, "pgrep -f 'python[^ ]* -u -P -m hpc_rl.finetune.train'").split()[0]
    limits = on_node(slurm_cluster, f"cat /proc/{rank}/limits")
    assert re.search(r"^Max core file size +0 ", limits, re.MULTILINE), limits
    assert f"TMPDIR={scratch}" in on_node(slurm_cluster, f"tr '\\0' '\\n' < /proc/{rank}/environ").splitlines()
    variables = on_node(slurm_cluster, f"cat /proc/{rank}/environ")
    assert all(secret in variables for secret in SECRETS.values())  # the job does have them
    for what, commands in ATTEMPTS.items():
        code, said = intrude(slurm_cluster, commands, SCRATCH=scratch, RUN=str(run), JOB=job, RANK=rank)
        assert code != 0, f"the intruder could {what}: {said}"
    expect_no_secret(slurm_cluster, workspace, "held", list(SECRETS.values()))
    script = ["sbatch", "--parsable", "--nodelist=node2", str(run / "job.sbatch")]  # past hpc-rl and its lock
    second = slurm_cluster.run(script, check=True).stdout.strip()
    assert slurm_cluster.wait_job(second) == "FAILED"
    assert f"finds job {job} running" in (run / f"job-{second}.log").read_text()
    status = workspace.status("held")
    assert (status["job_id"], status["state"], status["attempt"]) == (job, "RUNNING", 1)
    workspace.release("held")
    assert slurm_cluster.wait_job(job) == "COMPLETED", workspace.logs()
    assert list((run / "wandb").iterdir()) and list((run / "profiles").iterdir()) and (run / "report.html").exists()
    expect_no_secret(slurm_cluster, workspace, "held", list(SECRETS.values()))
    assert set(on_node(slurm_cluster, "ls -A /tmp").split()) <= before
    assert precious.stat().st_mode & 0o777 == 0o500


@pytest.mark.long
def test_a_killed_job_leaves_nothing_and_no_links_target_is_changed(
    workspace: Workspace, slurm_cluster: Cluster
) -> None:
    """The job script's last block removes what a killed node entry left."""
    precious = workspace.folder / "precious-too"
    precious.mkdir(mode=0o500)
    before = set(on_node(slurm_cluster, "ls -A /tmp").split())
    options = [*QUICK, "trainer.total_training_steps=4", *workspace.hold_at(1), f"slurm.sbatch.nodelist={NODE}"]
    workspace.ok("submit", "sft", "--job-name", "killed", *options)
    workspace.wait_for_step("killed", 1)
    job = job_id(workspace, "killed")
    code, said = intrude(slurm_cluster, f"ln -s {precious} /tmp/0.{job}.link")
    assert code == 0, said
    entry = on_node(slurm_cluster, "pgrep -f 'python[^ ]* -P -m hpc_rl.node.torchrun'").split()
    on_node(slurm_cluster, f"kill -KILL {' '.join(entry)}")
    assert slurm_cluster.wait_job(job) == "FAILED"
    assert set(on_node(slurm_cluster, "ls -A /tmp").split()) - before == {f"0.{job}.link"}
    assert precious.stat().st_mode & 0o777 == 0o500


@pytest.mark.faults
def test_secrets_of_reinforcement_learning_are_nowhere(workspace: Workspace, slurm_cluster: Cluster) -> None:
    (workspace.folder / "reward.py").write_text(REWARD)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    options = [*PPO, "trainer.total_training_steps=1000", f"slurm.sbatch.nodelist={NODE}"]
    workspace.ok("submit", "ppo", "--mem", "5G", "--job-name", "rl", *options)
    metrics = workspace.folder / "runs" / "rl" / "metrics.jsonl"
    workspace.wait_until(lambda: metrics.exists() and "critic/score/mean" in metrics.read_text(), "a step")
    token_file = metrics.parent / "attempt-1" / ".ray-token"
    token = token_file.read_text()
    elsewhere = [path for path in places_of(token, workspace.folder) if path != str(token_file)]
    assert elsewhere == [] and token_file.stat().st_mode & 0o777 == 0o600
    expect_no_secret(slurm_cluster, workspace, "rl", list(SECRETS.values()))
    assert token not in on_node(slurm_cluster, "cat /proc/[0-9]*/cmdline 2> /dev/null; true")
    workspace.ok("cancel", "rl")
    slurm_cluster.wait_job(job_id(workspace, "rl"))
    assert not token_file.exists()
    expect_no_secret(slurm_cluster, workspace, "rl", [*SECRETS.values(), token])
    assert on_node(slurm_cluster, "ls -Ad /tmp/0.*.[0-9a-f]*[0-9a-f][0-9a-f][0-9a-f] 2> /dev/null; true") == ""
