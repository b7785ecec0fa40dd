"""A node that another job lends to a run, on a real Slurm: what another user on this node can do to the run."""

import json
import re

import pytest

from hpc_rl.formats.offer import read_offer
from tests.e2e.ray_drivers import INTRUDER
from tests.e2e.test_lending_on_slurm import GRPO, wait_for_tokens
from tests.e2e.test_ppo_on_slurm import make_ppo_workspace
from tests.e2e.test_ray_on_slurm import OTHER, environment_of_others, python_of_others
from tests.e2e.workspace import Workspace
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import DEADLINE_S

pytestmark = [pytest.mark.sandbox, pytest.mark.security, pytest.mark.long]
ENDLESS = [*GRPO, "trainer.total_training_steps=100000", "rollout.engines=lent"]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_ppo_workspace(slurm_cluster)


def test_nobody_else_gets_in_from_a_lent_node(workspace: Workspace, slurm_cluster: Cluster) -> None:
    python = python_of_others()
    (workspace.folder / "intruder.py").write_text(INTRUDER)
    workspace.ok("submit", "ppo", "--nodes", "2", "--job-name", "guest", *ENDLESS)
    workspace.ok("lend", "guest", "--mem", "3G")
    wait_for_tokens(workspace, "guest", str(workspace.status("guest-lend-1")["job_id"]))
    node = str(workspace.status("guest-lend-1")["nodes"])
    runs = workspace.folder / "runs"
    attempt, lender = runs / "guest" / "attempt-1", runs / "guest-lend-1"
    offer, token = read_offer(attempt), (attempt / ".ray-token").read_text()
    assert offer is not None
    written = [path.read_text(errors="replace") for path in lender.rglob("*") if path.is_file()]
    shown = slurm_cluster.exec_on(node, ["ps", "axwwe"]).stdout
    assert not any(token in text for text in (*written, shown))
    # As on the job's own second node, and the srun of the lender's script:
    assert listeners(slurm_cluster, node) <= listeners(slurm_cluster, "node2") | {"srun"}
    scratch = slurm_cluster.exec_on(node, ["sh", "-c", "ls -d /tmp/0.*"]).stdout.split()
    private = [str(path) for path in (lender, attempt, attempt / "offer.json", attempt / ".ray-token", *scratch)]
    assignments = [f"{name}={value}" for name, value in environment_of_others().items()]
    intrude = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups", "env", *assignments, python]
    arguments = [str(workspace.folder / "intruder.py"), offer.gcs_address, "9", *private]
    done = slurm_cluster.exec_on(node, [*intrude, *arguments], timeout=DEADLINE_S)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {found.pop(f"read {path}") for path in private} == {"PermissionError"}
    assert {found.pop(what) for what in [*found] if what.startswith("submit ")} == {"refused"}
    assert found.pop("roll call") == ""
    assert len(found) == 4 and all("oken" in said or "Failed to connect" in said for said in found.values()), found
    workspace.ok("cancel", "guest")


def listeners(cluster: Cluster, node: str) -> set[str]:
    """Return the names of the processes on a node to which other machines can connect. Ray's have a common one."""
    lines = cluster.exec_on(node, ["ss", "-ltnpH"], check=True).stdout.splitlines()
    open_ones = [line for line in lines if not re.search(r"\s(127\.\S+|\[::1\]):\d+\s", line)]
    return {re.sub("^ray::.*", "ray::", name) for line in open_ones for name in re.findall(r'\("([^"]+)"', line)}
