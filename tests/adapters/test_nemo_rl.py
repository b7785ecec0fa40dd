from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.adapters.adapter import ProgramPlace, ReportedStep
from hpc_rl.adapters.nemo_rl import NEMO_RL, duration
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.step_line import step_line
from hpc_rl.adapters.table import choose, started
from hpc_rl.run_dir import RunDir

WORDS = ("python", "examples/run_grpo.py", "--config", "c.yaml")


def test_recognised_by_name_and_imports(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/run_grpo.py").write_text("from nemo_rl.algorithms.grpo import setup\n")
    (tmp_path / "examples/run_sft.py").write_text("import torch\n")
    typed = Program(("uv", "run", *WORDS[1:], "grpo.seed=1"), tmp_path)
    assert choose("auto", "ray", typed) is NEMO_RL
    assert started(NEMO_RL, typed) == ("python", "examples/run_grpo.py", "--config", "c.yaml", "grpo.seed=1")
    assert choose("auto", "ray", Program(("python", "examples/run_sft.py"), tmp_path)).name == "generic"


def test_arguments(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("cluster:\n  num_nodes: 1\ncheckpointing:\n  checkpoint_dir: results/grpo\n")
    place = ProgramPlace(RunDir(tmp_path), nodes=2, processes=4, seconds=90061.5)
    assert NEMO_RL.arguments(Program(WORDS, tmp_path), place) == [
        "++cluster.num_nodes=2",
        "++cluster.gpus_per_node=4",
        f"++checkpointing.checkpoint_dir={tmp_path}/checkpoints",
        "++checkpointing.checkpoint_must_save_by=01:01:01:01",
        "++checkpointing.enabled=true",
    ]
    own = ("cluster.num_nodes=2", "cluster.gpus_per_node=8", "checkpointing.checkpoint_dir=x")
    typed = Program((*WORDS, *own), tmp_path)
    assert NEMO_RL.arguments(typed, replace(place, seconds=None)) == ["++checkpointing.enabled=true"]
    (wrong,) = NEMO_RL.conflicts(typed, place)
    assert wrong.startswith("cluster.gpus_per_node=8, but the job has 4 GPUs per node")
    assert NEMO_RL.folder(typed) == tmp_path / "x"


@pytest.mark.parametrize(("seconds", "text"), [(-5, "00:00:00:00"), (59.9, "00:00:00:59"), (3 * 86400, "03:00:00:00")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    place = ProgramPlace(RunDir(tmp_path))
    for name in ("step_9", "step_10", "tmp_step_11", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert NEMO_RL.newest(Program(WORDS), place) == Checkpoint(10, f"{tmp_path}/checkpoints/step_10")
    assert NEMO_RL.newest(Program(WORDS), replace(place, began=2e9)) is None
    assert NEMO_RL.newest(Program(WORDS), ProgramPlace(RunDir(tmp_path / "other"))) is None


def test_lines_of_the_log() -> None:
    line = step_line(4, None, {"timing/train/total_step_time": 2.0, "timing/train/generation": 1.0})
    assert NEMO_RL.progress(line) == ReportedStep(4, None, {"timing_s/step": 2.0, "timing_s/generation": 1.0})
    line = step_line(4, None, {"train/reward": 0.5, "train/loss": 1.0})
    assert NEMO_RL.progress(line) == ReportedStep(4, None, {"critic/score/mean": 0.5, "train/loss": 1.0})
    assert NEMO_RL.stops("Timeout has been reached, stopping training early")
    assert not NEMO_RL.stops("Max number of steps has been reached, stopping training early")
