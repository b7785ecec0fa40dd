"""Supervised fine-tuning on a real Slurm: two nodes, torchrun, FSDP over gloo, and an exported Hugging Face folder."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import DEADLINE_S

pytestmark = pytest.mark.sandbox
STEPS = "trainer.total_training_steps=24"


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_workspace(slurm_cluster.shared / f"sft-{uuid.uuid4().hex[:8]}", slurm_cluster.env)


@pytest.fixture(scope="module")
def uninterrupted(workspace: Workspace) -> dict[int, float]:
    """Losses of an uninterrupted run on two nodes."""
    workspace.ok("submit", "sft", "--nodes", "2", "--wait", "--job-name", "whole", *QUICK, STEPS)
    return workspace.losses("whole")


def same_losses(found: dict[int, float], expected: dict[int, float]) -> bool:
    return found.keys() == expected.keys() and all(abs(found[step] - expected[step]) < 1e-4 for step in expected)


def test_two_nodes_train_and_the_exported_folder_generates(
    workspace: Workspace, uninterrupted: dict[int, float]
) -> None:
    status = workspace.status("whole")
    assert (status["state"], status["exit_code"], status["nodes"]) == ("COMPLETED", 0, "node[1-2]")
    assert (status["step"], status["total_steps"], status["attempt"]) == (24, 24, 1)
    assert uninterrupted[24] < uninterrupted[1] - 0.5
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(workspace.folder / "runs/whole/model")
    tokenizer = AutoTokenizer.from_pretrained(workspace.folder / "runs/whole/model")
    inputs = tokenizer("A shelf has", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=5, do_sample=False).shape[1] == inputs["input_ids"].shape[1] + 5
    workspace.ok("export", "whole", "exported", "--dtype", "bfloat16")
    assert "bfloat16" in (workspace.folder / "exported" / "config.json").read_text()


def test_the_run_directory_is_private_and_has_a_snapshot(workspace: Workspace, uninterrupted: dict[int, float]) -> None:
    run = workspace.folder / "runs" / "whole"
    assert run.stat().st_mode & 0o077 == 0
    assert (run / "git.txt").read_text()
    assert "total_training_steps: 24" in (run / "config.yaml").read_text()
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    names = {path.name for path in (run / "attempt-1").glob("*.log")}
    assert names == {"node0.log", "node1.log", "node0-rank0.log", "node1-rank1.log"}


def test_a_dry_run_is_what_is_submitted(workspace: Workspace, slurm_cluster: Cluster) -> None:
    arguments = ["sft", "--job-name", "dry", *QUICK, "--sbatch", "hold"]
    script = workspace.ok("submit", *arguments, "--dry-run")
    workspace.ok("submit", *arguments)
    assert (workspace.folder / "runs" / "dry" / "job.sbatch").read_text() == script
    job_id = str(workspace.status("dry")["job_id"])
    queued = slurm_cluster.run(["scontrol", "write", "batch_script", job_id, "-"], check=True).stdout
    assert queued.strip() == script.strip()
    workspace.ok("cancel", "dry")


def edit_steps(workspace: Workspace, run: str, steps: int) -> None:
    config = workspace.folder / "runs" / run / "config.yaml"
    config.write_text(re.sub("total_training_steps: [0-9]+", f"total_training_steps: {steps}", config.read_text()))


def test_script_and_settings_edited_by_hand_train_by_plain_sbatch(workspace: Workspace, slurm_cluster: Cluster) -> None:
    script = workspace.ok("render", "sft", "--job-name", "by-hand", *QUICK, STEPS)
    (workspace.folder / "my.sbatch").write_text(script.replace("cpus-per-task=1", "cpus-per-task=2"))
    edit_steps(workspace, "by-hand", 3)
    sbatch = ["sbatch", "--parsable", str(workspace.folder / "my.sbatch")]
    job_id = slurm_cluster.run(sbatch, cwd="/", check=True).stdout.strip()
    assert slurm_cluster.wait_job(job_id) == "COMPLETED", workspace.logs()
    assert sorted(workspace.losses("by-hand")) == [1, 2, 3]
    assert workspace.status(job_id)["run"] == "by-hand"
    edit_steps(workspace, "by-hand", 4)
    job_id = slurm_cluster.run(sbatch, cwd="/", check=True).stdout.strip()
    assert slurm_cluster.wait_job(job_id) == "COMPLETED", workspace.logs()
    assert sorted(workspace.losses("by-hand")) == [1, 2, 3, 4]
    told = "hpc-rl: settings that differ from attempt-1:\n  trainer.total_training_steps: 3 -> 4\n"
    assert workspace.ok("logs", "by-hand").count(told) == 1


@pytest.mark.long
def test_an_edited_script_goes_through_submit_too(workspace: Workspace) -> None:
    script = workspace.ok("render", "sft", "--job-name", "by-script", *QUICK, STEPS)
    (workspace.folder / "two.sbatch").write_text(script)
    edit_steps(workspace, "by-script", 2)
    workspace.ok("submit", "sft", "--script", "two.sbatch", "--wait")
    assert sorted(workspace.losses("by-script")) == [1, 2]


def test_a_stopped_run_is_resumed_on_one_node(workspace: Workspace, uninterrupted: dict[int, float]) -> None:
    arguments = ["sft", "--job-name", "stopped", *QUICK, STEPS]
    workspace.ok("submit", *arguments, "--nodes", "2", *workspace.hold_at(3))
    workspace.wait_for_step("stopped", 3)
    refused = workspace.hpc_rl("submit", *arguments, "--nodes", "1")
    assert refused.returncode == 2 and "run stopped is RUNNING" in refused.stderr
    workspace.ok("stop", "stopped")
    followed = workspace.hpc_rl("logs", "-f", "stopped")
    assert followed.returncode == 75, followed.stdout
    assert "srun" not in followed.stdout and "slurmstepd" not in followed.stdout, followed.stdout
    assert "requeue stopped" in workspace.ok("status", "stopped")
    status = workspace.status("stopped")
    assert (status["state"], status["exit_code"]) == ("STOPPED", 75)
    saved = max(workspace.losses("stopped"))
    assert 3 <= saved < 24
    waited = workspace.hpc_rl("submit", *arguments, "--nodes", "1", "--wait")
    assert waited.returncode == 0, waited.stderr
    assert "hpc-rl: starting: the program loads model and data; waiting for the first step, " in waited.stderr
    assert same_losses(workspace.losses("stopped"), uninterrupted)
    assert workspace.status("stopped")["attempt"] == 2


def test_the_walltime_warning_saves_and_queues_again(
    workspace: Workspace, slurm_cluster: Cluster, uninterrupted: dict[int, float]
) -> None:
    workspace.ok("submit", "sft", "--nodes", "2", "--job-name", "walltime", *QUICK, STEPS, *workspace.hold_at(3))
    workspace.wait_for_step("walltime", 3)
    job_id = str(workspace.status("walltime")["job_id"])
    # The signal that --signal=B:USR2@N has Slurm send, to the batch shell alone.
    slurm_cluster.run(["scancel", "--batch", "--signal=USR2", job_id], check=True)
    workspace.ok("logs", "-f", "walltime")
    status = workspace.status("walltime")
    assert (status["job_id"], status["state"], status["attempt"]) == (job_id, "COMPLETED", 2)
    assert same_losses(workspace.losses("walltime"), uninterrupted)


@pytest.mark.long
def test_a_run_stops_by_itself_before_the_walltime(workspace: Workspace, uninterrupted: dict[int, float]) -> None:
    """Slurm states the end of the walltime; the first attempt then takes it to be so near that no second step fits."""
    (workspace.folder / "early.sh").write_text(
        'echo "$(date +%s) $HPC_RL_JOB_END" >> "$HPC_RL_RUN_DIR/ends"\n'
        '[ -d "$HPC_RL_RUN_DIR/attempt-1" ] || HPC_RL_JOB_END=$(($(date +%s) + 170))\n'
    )
    setup = f"slurm.setup=['. {workspace.folder}/early.sh']"
    workspace.ok("submit", "sft", "--nodes", "2", "--time", "30", "--job-name", "by-itself", *QUICK, STEPS, setup)
    workspace.ok("logs", "-f", "by-itself")
    log = workspace.ok("logs", "by-itself")
    assert "stopping: the walltime ends in" in log and "stopped after step" in log
    assert "stopped before the walltime; job" in log
    status = workspace.status("by-itself")
    assert (status["state"], status["attempt"]) == ("COMPLETED", 2)
    assert same_losses(workspace.losses("by-itself"), uninterrupted)
    ends = [line.split() for line in (workspace.folder / "runs/by-itself/ends").read_text().splitlines()]
    assert len(ends) == 2 and all(1000 < int(end) - int(now) <= 1800 for now, end in ends), ends


@pytest.mark.slow
@pytest.mark.long
def test_slurm_warns_before_the_walltime_by_itself(workspace: Workspace) -> None:
    (workspace.folder / "stopper.py").write_text(
        "import os, pathlib, sys, time\n"
        "stop = pathlib.Path(os.environ['HPC_RL_RUN_DIR']) / 'stop'\n"
        "if os.environ['HPC_RL_ATTEMPT_DIR'].endswith('attempt-2'): sys.exit(0)\n"
        "while not stop.exists(): time.sleep(0.1)\n"
        "sys.exit(75)\n"
    )
    # Slurm looks every 30 s: at the latest 40 s after the start, when a minute and more remain.
    arguments = ["--time", "2", "--job-name", "warned", "slurm.warning_s=110", "trainer.device=cpu"]
    workspace.ok("submit", "torchrun", *arguments, "--wait", "--", "stopper.py")
    assert workspace.status("warned")["attempt"] == 2
    assert "stopped before the walltime; job" in workspace.ok("logs", "warned")


def test_a_run_continues_without_its_follower_until_it_is_cancelled(workspace: Workspace) -> None:
    arguments = ["sft", "--nodes", "2", "--job-name", "cancelled", *QUICK, STEPS]
    command = [sys.executable, "-m", "hpc_rl.cli", "submit", *arguments, "--follow", *workspace.hold_at(5)]
    with subprocess.Popen(
        command,
        cwd=workspace.folder, env=dict(workspace.environ), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    ) as waiting:  # fmt: skip
        workspace.wait_for_step("cancelled", 5)
        os.kill(waiting.pid, signal.SIGINT)
        _, said = waiting.communicate(timeout=DEADLINE_S)
    assert waiting.returncode == 130 and "continues; end it with" in said
    assert workspace.status("cancelled")["state"] == "RUNNING"
    workspace.ok("cancel", "cancelled")
    followed = workspace.hpc_rl("logs", "-f", "cancelled")
    assert followed.returncode not in (0, 75)
    assert workspace.status("cancelled")["state"] == "CANCELLED"
    assert max(workspace.losses("cancelled")) < 24
    assert not (workspace.folder / "runs/cancelled/model").exists()


def test_a_dead_rank_ends_the_job_and_is_named(workspace: Workspace, slurm_cluster: Cluster) -> None:
    workspace.ok("submit", "sft", "--nodes", "2", "--job-name", "dead", *QUICK, *workspace.hold_at(2))
    workspace.wait_for_step("dead", 2)
    slurm_cluster.exec_on("node2", ["pkill", "-KILL", "-f", "python[^ ]* -u -P -m hpc_rl.finetune.train"], check=True)
    followed = workspace.hpc_rl("logs", "-f", "dead")
    assert followed.returncode == 137, followed.stdout
    assert "rank 1 on node node2 failed with exit code 137 (killed (signal 9) by a user or" in followed.stdout
    slurm_cluster.wait_idle()
    for node in ("node1", "node2"):
        left = slurm_cluster.exec_on(node, ["pgrep", "-f", "hpc_rl"], check=False)
        assert left.stdout == "", f"left on {node}"


@pytest.mark.long
def test_a_run_directory_that_nodes_do_not_share_names_the_node(workspace: Workspace, slurm_cluster: Cluster) -> None:
    alone = f"/dev/shm/run-{uuid.uuid4().hex[:8]}"
    for node in ("node1", "node2"):
        slurm_cluster.exec_on(node, ["mkdir", alone], check=True)
    script = workspace.ok("render", "sft", "--nodes", "2", "--job-name", "alone", *QUICK)
    (workspace.folder / "alone.sbatch").write_text(
        script.replace(str(workspace.folder / "runs/alone") + "/job", str(workspace.folder / "alone")).replace(
            f"HPC_RL_RUN_DIR={workspace.folder}/runs/alone", f"HPC_RL_RUN_DIR={alone}"
        )
    )
    for node in ("node1", "node2"):
        slurm_cluster.exec_on(node, ["cp", f"{workspace.folder}/runs/alone/support.sh", alone], check=True)
    job_id = slurm_cluster.run(
        ["sbatch", "--parsable", str(workspace.folder / "alone.sbatch")], check=True
    ).stdout.strip()
    assert slurm_cluster.wait_job(job_id) == "FAILED"
    slurm_cluster.wait_idle()
    for node in ("node1", "node2"):
        slurm_cluster.exec_on(node, ["rm", "-r", alone], check=True)
    log = (workspace.folder / f"alone-{job_id}.log").read_text()
    assert "node node2 does not see" in log and "which node node1 made" in log, log


def test_a_log_that_cannot_be_written_is_explained(workspace: Workspace) -> None:
    # Made on this machine's /dev/shm; the nodes have one of their own.
    path = f"/dev/shm/run-{uuid.uuid4().hex[:8]}"
    done = workspace.hpc_rl("submit", "sft", "--run-dir", path, "--wait", *QUICK)
    try:
        assert done.returncode not in (0, 2)
        assert "Is the run directory on a shared file system?" in done.stdout
        assert f"run directory {path} is on /dev/shm (tmpfs), which looks like a disk" in done.stderr
        assert "The nodes do not share the folder" in workspace.ok("explain", path)
        for command, words in (
            ("logs", "its job has ended"),
            ("report", "left no log"),
            ("requeue", "would fail like"),
        ):
            refused = workspace.hpc_rl(command, path)
            assert refused.returncode == 2 and words in " ".join(refused.stderr.split()), refused
    finally:
        subprocess.run(["rm", "-r", path], check=True, timeout=600)


@pytest.mark.long
def test_jobs_are_chained(workspace: Workspace, slurm_cluster: Cluster) -> None:
    (workspace.folder / "first.py").write_text("import pathlib\npathlib.Path('first').touch()\n")
    (workspace.folder / "second.py").write_text("import pathlib, sys\nsys.exit(not pathlib.Path('first').exists())\n")
    workspace.ok("submit", "torchrun", "--job-name", "first", "trainer.device=cpu", "--", "first.py")
    workspace.ok("submit", "torchrun", "--after", "first", "--wait", "trainer.device=cpu", "--", "second.py")


def test_any_torchrun_program_runs_with_its_arguments(workspace: Workspace) -> None:
    (workspace.folder / "own.py").write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank()]); dist.all_reduce(total)\n"
        "print(sys.argv[1:], total.item(), os.environ['GLOO_SOCKET_IFNAME'], os.environ['OMP_NUM_THREADS'])\n"
        "dist.barrier()\n"  # all have printed before the first one ends
        "dist.destroy_process_group()\n"
        "sys.exit(3 if dist.is_torchelastic_launched() else 4)\n"
    )
    arguments = ["--nodes", "2", "--cpus-per-task", "2", "trainer.device=cpu", "trainer.n_gpus_per_node=2"]
    done = workspace.hpc_rl("submit", "torchrun", *arguments, "--follow", "--", "own.py", "--lr", "1e-4", "a b;$HOME")
    assert "['--lr', '1e-4', 'a b;$HOME'] 6 eth0 1" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 3


def test_an_odd_run_directory_and_a_name_arrive_at_slurm(workspace: Workspace, slurm_cluster: Cluster) -> None:
    name = "it-s.a_test-1"
    (workspace.folder / "nothing.py").write_text("")
    refused = workspace.hpc_rl(
        "submit", "torchrun", "--job-name", 'a "b" $;y', "trainer.device=cpu", "--", "nothing.py"
    )
    assert refused.returncode == 2 and "use letters, digits" in refused.stderr
    arguments = ["--job-name", name, "--run-dir", "runs/odd %j", "--sbatch", "hold", "trainer.device=cpu"]
    workspace.ok("submit", "torchrun", *arguments, "--", "nothing.py")
    job_id = str(workspace.status("odd %j")["job_id"])
    shown = slurm_cluster.run(["squeue", "-h", "-j", job_id, "-o", "%j"], check=True).stdout.rstrip("\n")
    assert shown == name
    workspace.ok("stop", "odd %j")
    assert workspace.status(job_id)["state"] == "CANCELLED"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit", "sft", "--partition", "nope", *QUICK], "partition nope does not exist"),
        (["submit", "sft", "--after", "999999", *QUICK], "--after 999999: Slurm has no record of this job"),
        (["status", "999999"], "job 999999 does not belong to a run"),
        (["cancel", "999999"], "job 999999 does not belong to a run"),
        (["logs", "no-such-run"], "no run 'no-such-run'"),
    ],
)
def test_what_slurm_refuses_is_said_and_leaves_nothing(workspace: Workspace, arguments: list[str], said: str) -> None:
    runs = workspace.folder / "runs"
    before = sorted(runs.iterdir()) if runs.exists() else []
    done = workspace.hpc_rl(*arguments)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr and "Traceback" not in done.stderr
    assert (sorted(runs.iterdir()) if runs.exists() else []) == before


@pytest.fixture(scope="module")
def accounted(accounting_cluster: Cluster) -> Iterator[Workspace]:
    yield make_workspace(accounting_cluster.shared / "acct", accounting_cluster.env)


@pytest.mark.long
def test_states_with_accounting(accounted: Workspace) -> None:
    accounted.ok(
        "submit", "sft", "--nodes", "2", "--wait", "--job-name", "run", *QUICK, "trainer.total_training_steps=2"
    )
    status = accounted.status("run")
    assert (status["state"], status["exit_code"], status["nodes"]) == ("COMPLETED", 0, "node[1-2]")
    (accounted.folder / "fail.py").write_text("raise SystemExit(9)\n")
    done = accounted.hpc_rl("submit", "torchrun", "--wait", "trainer.device=cpu", "--", "fail.py")
    assert done.returncode == 9
    assert accounted.status("torchrun-1")["state"] == "FAILED"


def test_a_job_id_is_enough_from_anywhere(workspace: Workspace) -> None:
    (workspace.folder / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    arguments = ["--run-dir", "elsewhere/run", "--sbatch", "export=ALL", "trainer.device=cpu"]
    refused = workspace.hpc_rl("submit", "torchrun", "--sbatch", "parsable", "trainer.device=cpu", "--", "sleeper.py")
    assert refused.returncode == 2 and "'parsable' is set by hpc-rl itself" in refused.stderr
    assert not (workspace.folder / "elsewhere").exists()
    workspace.ok("submit", "torchrun", *arguments, "--", "sleeper.py")
    job_id = str(workspace.status("elsewhere/run")["job_id"])
    elsewhere = Workspace(workspace.folder / "data", workspace.environ)
    assert elsewhere.status(job_id)["run_dir"] == str(workspace.folder / "elsewhere" / "run")
    elsewhere.ok("cancel", job_id)
    workspace.wait_until(lambda: workspace.status(job_id)["state"] == "CANCELLED", "cancelled")
    own = workspace.folder / "elsewhere" / "run" / "status.json"
    workspace.wait_until(
        lambda: '"RUNNING"' not in own.read_text() if own.exists() else True, "its own word on the end"
    )
    assert not own.exists() or "COMPLETED" not in own.read_text()


@pytest.mark.long
def test_a_controller_that_does_not_answer_ends_nothing(workspace: Workspace, slurm_cluster: Cluster) -> None:
    (workspace.folder / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    arguments = ["submit", "torchrun", "--job-name", "asleep", "trainer.device=cpu", "--", "sleeper.py"]
    workspace.ok(*arguments)
    for program in ("squeue", "sacct", "scontrol"):
        fake = workspace.folder / "mute" / program
        fake.parent.mkdir(exist_ok=True)
        fake.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
        fake.chmod(0o755)
    path = f"{workspace.folder}/mute:{os.environ['PATH']}"
    mute = Workspace(workspace.folder, {**workspace.environ, "PATH": path})
    shown = mute.status("asleep")
    assert shown["state"] in ("UNKNOWN", "RUNNING") and shown["is_last_recorded"]
    again = mute.hpc_rl(*arguments)
    assert again.returncode == 2 and re.search("run asleep is (UNKNOWN|RUNNING) as job", again.stderr)
    workspace.ok("cancel", "asleep")


def test_a_script_is_submitted_from_inside_an_allocation_and_watched_without_accounting(
    workspace: Workspace, slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpc_rl.slurm.commands import cancel, job_state
    from hpc_rl.submission.executor import ScriptExecutor

    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    monkeypatch.chdir(workspace.folder)
    executor = ScriptExecutor(workspace.folder, "#!/bin/bash\n#SBATCH --mem=500\nsleep 600\n")
    job_id = executor.submit_script()

    def is_in_state(expected: str) -> bool:
        found = job_state(job_id, place=executor.place)
        return found is not None and found.state == expected

    workspace.wait_until(lambda: is_in_state("RUNNING"), "it runs")
    cancel(job_id, place=executor.place)
    workspace.wait_until(lambda: is_in_state("CANCELLED"), "it is cancelled")
