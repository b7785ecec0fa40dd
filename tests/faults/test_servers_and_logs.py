"""Servers that accept connections and never answer, and a log of a gigabyte."""

import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.faults.jobs import left_behind
from tests.faults.outcomes import Outcome
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import DEADLINE_S

pytestmark = [pytest.mark.sandbox, pytest.mark.faults]
ON_NODE1 = ("--nodes", "1", "--sbatch", "nodelist=node1")
STEPS = "trainer.total_training_steps=4"
MUTE = """
import pathlib, signal, socket, sys
signal.alarm(int(sys.argv[2]))
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
pathlib.Path(sys.argv[1]).write_text(str(port))
kept = []
while True:
    kept.append(server.accept())
    pathlib.Path("called").open("a").close()
"""
"""A server that accepts every connection and never answers: mute.py PORT_FILE SECONDS. The time of the file `called` is
that of its first call."""


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_workspace(slurm_cluster.shared / f"servers-{uuid.uuid4().hex[:8]}", slurm_cluster.env)


@pytest.fixture(scope="module")
def mute(workspace: Workspace, slurm_cluster: Cluster) -> str:
    """Address of a server on node1 that never answers. It ends by itself."""
    (workspace.folder / "mute.py").write_text(MUTE)
    port = workspace.folder / "port"
    start = f"cd {workspace.folder}; setsid python3 mute.py port {DEADLINE_S:.0f} > /dev/null 2>&1 < /dev/null &"
    slurm_cluster.exec_on("node1", ["bash", "-c", start], check=True)
    workspace.wait_until(lambda: port.exists() and port.read_text() != "", "the server to listen")
    return f"http://127.0.0.1:{port.read_text()}"


@pytest.fixture(scope="module")
def expected(workspace: Workspace) -> dict[int, float]:
    workspace.ok("submit", "sft", *ON_NODE1, "--wait", "--job-name", "whole", *QUICK, STEPS)
    return workspace.losses("whole")


def seconds_until(workspace: Workspace, run: str, words: str) -> tuple[float, str]:
    """Wait for a message of a run. Return the seconds since the server was called first, and the line."""

    def lines() -> list[str]:
        logs = (workspace.folder / "runs" / run).glob("job-*.log")
        return [line for log in logs for line in log.read_text().splitlines() if words in line]

    workspace.wait_until(lambda: bool(lines()), f"the message of {run}: {words}")
    return time.time() - (workspace.folder / "called").stat().st_mtime, lines()[0].replace(f"{workspace.folder}/", "")


def test_a_mute_wandb_server(
    workspace: Workspace,
    slurm_cluster: Cluster,
    mute: str,
    expected: dict[int, float],
    observed: Callable[[Outcome], None],
) -> None:
    (workspace.folder / "called").unlink(missing_ok=True)
    wandb = ["trainer.logger=[console,wandb]", "trainer.wandb_mode=online"]
    server = [f"slurm.env.WANDB_BASE_URL={mute}", "slurm.env.WANDB_MODE=online"]
    with_key = replace(workspace, environ={**workspace.environ, "WANDB_API_KEY": "0" * 40})
    with_key.ok("submit", "sft", *ON_NODE1, "--job-name", "no-wandb", *QUICK, STEPS, *wandb, *server)
    seconds, message = seconds_until(workspace, "no-wandb", "wandb cannot be used online")
    workspace.ok("logs", "-f", "no-wandb")
    assert workspace.losses("no-wandb") == expected
    left = left_behind(slurm_cluster, workspace.folder / "runs" / "no-wandb")
    observed(Outcome("wandb server never answers", "sft", seconds, message, "completed", None, left, losses_equal=True))


def test_a_mute_hub(
    workspace: Workspace, slurm_cluster: Cluster, mute: str, observed: Callable[[Outcome], None]
) -> None:
    (workspace.folder / "called").unlink(missing_ok=True)
    online = [f"slurm.env.HF_ENDPOINT={mute}", "slurm.env.HF_HUB_OFFLINE=0", "slurm.env.TRANSFORMERS_OFFLINE=0"]
    words = ["submit", "sft", *ON_NODE1, "--job-name", "no-hub", *QUICK, STEPS, "model.path=owner/model"]
    workspace.ok(*words, *online)
    seconds, message = seconds_until(workspace, "no-hub", "did not answer within")
    ended = workspace.hpc_rl("logs", "-f", "no-hub")
    assert ended.returncode == 2 and "Traceback" not in ended.stdout, ended.stdout + ended.stderr
    left = left_behind(slurm_cluster, workspace.folder / "runs" / "no-hub")
    observed(Outcome("hub never answers", "sft", seconds, message, "exit code 2", None, left))


def test_a_log_of_a_gigabyte(
    workspace: Workspace, expected: dict[int, float], observed: Callable[[Outcome], None]
) -> None:
    """The commands that read logs keep to little memory."""
    run = workspace.folder / "runs" / "whole"
    log = next(run.glob("job-*.log"))
    block = b"a line that a reward function prints in every call\n" * 20_000
    with log.open("ab") as stream:
        for _ in range(1024**3 // len(block)):
            stream.write(block)
    limited = replace(workspace, login=[*workspace.login, "prlimit", f"--as={1024**3}"])
    for command in (["status", "whole"], ["explain", "whole"], ["watch", "whole", "--once"], ["report", "whole"]):
        limited.ok(*command)
    log.unlink()
    observed(Outcome("log of 1 GB", "sft", None, "", "unaffected: at most 1 GiB of address space", None, ""))
