"""The rollout engine and the weight transfer of docs/extending.md, added to a copy of the package and used in a run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_rl
from hpc_rl.data.arithmetic import generate
from hpc_rl.tracking.metrics import read_metrics
from tests.helpers import make_tiny_model

PACKAGE = Path(hpc_rl.__file__).parent
PAGES = "".join(page.read_text() for page in sorted((PACKAGE.parent / "docs").glob("*extending*.md")))
BLOCKS: dict[str, str] = dict(re.findall(r"^```python\n# (.*?)\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL))
"""Code by the comment on its first line: a file, or `row of TABLE in FILE`."""
TIMEOUT_S = 600
LEARNING_RATE = 1e-2
"""Large, so that an engine with old weights differs from the trainer."""


def add(checkout: Path, module: str, table: str) -> None:
    """Write the module, and insert its row at the beginning of the table."""
    assert not (checkout / module).exists()
    (checkout / module).write_text(BLOCKS[module])
    ((head, row),) = [(head, code) for head, code in BLOCKS.items() if head.startswith(f"row of {table} in ")]
    file = checkout / head.rpartition(" ")[2]
    text, count = re.subn(rf"^({table}: .* = {{\n)", lambda found: found[1] + row, file.read_text(), flags=re.M)
    assert count == 1
    file.write_text(text)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package, and add an engine and a transfer, which the engine uses."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PACKAGE, folder / "hpc_rl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "configs"):
        (folder / name).symlink_to(PACKAGE.parent / name)
    add(folder, "hpc_rl/rl/rollout/plain.py", "ENGINES")
    add(folder, "hpc_rl/rl/weights/object_store.py", "WEIGHT_TRANSFERS")
    file = folder / "hpc_rl/config/rl/engines.py"
    text = file.read_text()
    before, after = 'transfers=("host",),\n),\n', 'transfers=("object_store", "host"),\n),\n'
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))
    return folder


def python(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the copy, which also precedes the installed package in the processes that it starts."""
    unset = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "HPC_RL_RUN_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_the_configuration_lists_the_new_engine(checkout: Path) -> None:
    code = "from hpc_rl.config.compose import compose; compose('ppo', ['rollout.name=plan'])"
    found = python(checkout, "-c", code)
    assert (
        "rollout.name: Input should be 'auto', 'plain', 'hf', 'vllm', 'sglang' or 'openai', found 'plan'"
        in found.stderr
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_run_generates_with_the_new_engine_and_the_new_transfer(checkout: Path, tmp_path: Path) -> None:
    """At the second step the engine's probabilities are those of the trainer, whose weights have changed."""
    data, run = tmp_path / "data", tmp_path / "run"
    generate(data, n_train=8, n_val=1)
    options = [
        f"model.path={make_tiny_model(tmp_path / 'model')}",
        *(f"data.train_files={data}/train.jsonl", "data.train_batch_size=4", "rollout.n=2"),
        *("data.max_prompt_length=40", "data.max_response_length=6", "trainer.micro_tokens=256"),
        *("algorithm.advantage=grpo", "reward.function=format", "reward.kwargs={pattern: '.*[a-i].*'}"),
        *("trainer.device=cpu", "trainer.n_gpus_per_node=2", "pools.spec={train: [1], engines: [1]}"),
        *("pools.roles={rollout: engines}", "rollout.name=plain", "rollout.calculate_log_probs=true"),
        *(f"actor.optim.lr={LEARNING_RATE}", "trainer.total_training_steps=2", "trainer.export=false"),
        *("trainer.val_before_train=false", "trainer.logger=[]", "trainer.save_freq=0"),
    ]
    done = python(checkout, "-m", "hpc_rl.rl.main_ppo", "--run-dir", str(run), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = read_metrics(run / "metrics.jsonl")
    assert first["actor/grad_norm"] > 0
    assert first["training/rollout_probs_diff_max"] < 1e-5 and second["training/rollout_probs_diff_max"] < 1e-5
    assert (run / "attempt-1" / "node0-engines-engine0.log").exists()
