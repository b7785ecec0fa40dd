"""A folder full of files with the names of modules: none of them runs in what an ordinary user starts in that folder.

Another user, or an archive, has put them there, or they are the user's own. Each notes that it ran, and ends its
process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.images.definition import Builder
from hpc_rl.images.inspect import probe_argv
from tests.security.users import REPOSITORY, VICTIM, as_ordinary, hpc_rl, run

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root"),
]
PACKAGES = ("numpy", "torch", "transformers", "ray", "vllm", "hpc_rl", "pydantic", "yaml", "sglang", "hydra_plugins")
NAMES = sorted({*sys.stdlib_module_names, *PACKAGES, "sitecustomize", "usercustomize"} - {"__main__"})
REWARD = "import helper\n\ndef score(response, answer):\n    return helper.VALUE\n"
TOOL = """
import helper

class Quiz:
    def reset(self, **row):
        return None

    def step(self, text):
        return None, True

    def reward(self):
        return helper.VALUE
"""
DATA = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(16)]
CHATS = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}] * 16
SMALL = ["model.path=../model", "trainer.device=cpu", "data.max_prompt_length=64", "trainer.total_training_steps=1"]
PPO = [*SMALL, "data.train_files=rows.jsonl", "data.prompt_key=question", "data.answer_key=answer"]
PPO += ["data.max_response_length=4", "data.train_batch_size=4", "rollout.n=2", "rollout.name=hf"]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home with a folder `project` that has all the names, and the user's own modules."""
    with tempfile.TemporaryDirectory(prefix="hpc-rl-names-", dir="/var/tmp") as name:
        home = Path(name)
        project = home / "project"
        project.mkdir()
        for module in NAMES:
            note = f"import os\nopen({str(home / 'ran')!r}, 'a').write({module!r} + ' ')\nos._exit(99)\n"
            (project / f"{module}.py").write_text(note)
        files = {"my_rewards.py": REWARD, "my_tools.py": TOOL, "helper.py": "VALUE = 0.25\n"}
        for file, text in files.items():
            (project / file).write_text(text)
        (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA))
        (project / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
        for path in [home, *home.rglob("*")]:
            os.chown(path, VICTIM, VICTIM)
        model = "from pathlib import Path\nfrom hpc_rl.probes.tiny_model import make_tiny_model\n"
        model += "make_tiny_model(Path('model'))"
        done = run(VICTIM, as_ordinary(VICTIM, sys.executable, "-P", "-c", model), home, deadline_s=600)
        assert done.returncode == 0, done.stderr
        yield home


def in_project(home: Path, *argv: str, deadline_s: float = 900, **environ: str) -> str:
    """Run a program of the user in the folder, and return its output. No module of the folder has run."""
    done = run(VICTIM, list(argv), home, folder=home / "project", deadline_s=deadline_s, **environ)
    ran = home / "ran"
    assert not ran.exists(), f"ran: {ran.read_text()}\n{done.stdout}{done.stderr}"
    logs = (
        "".join(path.read_text()[-3000:] for path in (home / "project" / "runs").rglob("*.log"))
        if done.returncode
        else ""
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


def program(text: str) -> list[str]:
    """Return the command of a process that does not look into the folder itself."""
    return as_ordinary(VICTIM, sys.executable, "-P", "-c", f"{text}\n")


PROCESSES = """
from hpc_rl.environments.pool import EnvironmentPool
from hpc_rl.environments.requests import EnvironmentSpec
from hpc_rl.rewards.processes import RewardProcesses
"""


@pytest.mark.parametrize("spec", ["my_rewards:score", "my_rewards.py:score"])
def test_reward_processes(home: Path, spec: str) -> None:
    scored = (
        f"processes = RewardProcesses([({spec!r}, {{}})], 2, 60.0)\nprint(processes.results([(0, 'a', 'b', {{}})]))\n"
    )
    assert "0.25" in in_project(home, *program(PROCESSES + scored + "processes.close()"))


def test_environments_and_tools(home: Path) -> None:
    asked = "pool = EnvironmentPool(EnvironmentSpec('my_tools:Quiz', {}, [], 100), 1, 60.0)\n"
    asked += "talk = pool.start([], {})\ntalk.first.result(60)\nprint(talk.finish().result(60))\npool.close()"
    assert "0.25" in in_project(home, *program(PROCESSES + asked))


def test_the_probe_of_an_image(home: Path) -> None:
    """It runs in the Python of the image, with the working folder bound; that Python may be too old for -P."""
    probe = probe_argv(Builder("apptainer", ""), Path("image.sif"), sys.executable, None)
    facts = in_project(home, *as_ordinary(VICTIM, *probe[probe.index(sys.executable) :]))
    assert json.loads(facts)["executable"] == sys.executable


@pytest.mark.long
def test_the_server_of_sglang(home: Path) -> None:
    served = f"from pathlib import Path\nimport os\nos.chdir({str(home / 'project')!r})\n"
    served += "from tests.rl.rollout.sglang.engines import make_model, respond, started\n"
    served += "with started(make_model(Path('../sglang'))) as engine:\n    print(len(respond(engine)), 'responses')\n"
    found = in_project(home, *program(served), PYTHONPATH=str(REPOSITORY))
    assert "7 responses" in found


@pytest.mark.long
@pytest.mark.slow
def test_ranks_of_torchrun(home: Path) -> None:
    options = [*SMALL[:2], "trainer.total_training_steps=1", "data.train_files=chats.jsonl", "data.train_batch_size=8"]
    in_project(home, *hpc_rl(VICTIM, "submit", "sft", "--local", "--nodes", "2", "--run-dir", "runs/sft", *options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["reward.function=my_rewards:score"], ["environment.name=my_tools:Quiz"]],
    ids=["rewards", "environment"],
)
def test_workers_of_ray(home: Path, more: list[str], request: pytest.FixtureRequest) -> None:
    name = f"runs/{request.node.callspec.id}"
    in_project(home, *hpc_rl(VICTIM, "submit", "ppo", "--local", "--run-dir", name, *PPO, *more))
    metrics = (home / "project" / name / "metrics.jsonl").read_text()
    assert '"score/mean": 0.25' in metrics or "0.25" in metrics


def test_an_agent_of_the_user_imports_what_is_beside_it(home: Path) -> None:
    """The variable by which libraries start their children without the folder is none of the agent's."""
    (home / "agents").mkdir()
    (home / "agents" / "helper.py").write_text("VALUE = 0.25\n")
    (home / "agents" / "agent.py").write_text("import helper\nprint('agent', helper.VALUE)\n")
    started = "import os, subprocess, sys\nfrom hpc_rl.system import owned, search_path\n"
    started += (
        "from hpc_rl.rl.endpoint.processes import agent_environment\nos.environ |= search_path.safe_variables()\n"
    )
    started += "environ = agent_environment(os.environ, 'http://127.0.0.1:1', 'key')\n"
    started += "subprocess.run(owned.command([sys.executable, '../agents/agent.py']), env=environ, check=True)\n"
    assert in_project(home, *program(started)) == "agent 0.25\n"


@pytest.mark.long
@pytest.mark.slow
def test_the_trials_of_the_doctor(home: Path) -> None:
    words = ("doctor", "--local", "--on-nodes", "1", "trainer.device=cpu", "--json")
    done = run(VICTIM, hpc_rl(VICTIM, *words), home, folder=home / "project", deadline_s=900)
    assert not (home / "ran").exists(), (home / "ran").read_text()
    found = {check["name"]: check["level"] for check in json.loads(done.stdout)}
    assert found["all-reduce"] == found["Ray cluster"] == "ok", done.stdout + done.stderr
