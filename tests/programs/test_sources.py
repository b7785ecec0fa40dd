"""Programs that need GPUs: their options, and the functions that hooks change, are those of their sources."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from hpc_rl.adapters.adapter import ProgramPlace
from hpc_rl.adapters.inside import nemo_rl
from hpc_rl.adapters.nemo_rl import duration
from hpc_rl.adapters.openrlhf import OLD, OPENRLHF
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.skyrl import SKYRL
from hpc_rl.run_dir import RunDir
from tests.programs.environments import folder_of

pytestmark = pytest.mark.programs


def functions(file: Path, class_name: str) -> set[str]:
    tree = ast.parse(file.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_openrlhf_has_the_options_and_the_function(tmp_path: Path) -> None:
    source = folder_of("openrlhf") / "openrlhf"
    text = (source / "cli/train_ppo_ray.py").read_text()
    options = set(re.findall(r'add_argument\(\s*"--([\w.]+)"', text))
    assert set(OLD) <= options
    program = Program(("python", "-m", "openrlhf.cli.train_ppo_ray", "--train.colocate_all"))
    added = OPENRLHF.arguments(program, ProgramPlace(RunDir(tmp_path), 2, 4, is_later=True))
    assert {word[2:] for word in added if word.startswith("--")} <= options
    for kind, name in (
        ("ppo", "BasePPOTrainer"),
        ("sft", "SFTTrainer"),
        ("dpo", "DPOTrainer"),
        ("rm", "RewardModelTrainer"),
    ):
        assert "save_logs_and_checkpoints" in functions(source / f"trainer/{kind}_trainer.py", name)
    assert ".ckpt.save_steps == 0" in (source / "trainer/ppo_trainer.py").read_text()


def test_skyrl_has_the_options_and_the_callbacks(tmp_path: Path) -> None:
    source = folder_of("skyrl") / "skyrl/train"
    texts = "".join(file.read_text() for file in sorted((source / "config").glob("*.py")))
    fields = set(re.findall(r"^    (\w+): ", texts, re.MULTILINE))
    place = ProgramPlace(RunDir(tmp_path), 2, 4)
    for module in ("skyrl.train.entrypoints.main_base", "skyrl.train.main_sft"):
        added = SKYRL.arguments(Program(("python", "-m", module)), place)
        assert {part for word in added for part in word.partition("=")[0].split(".")} <= {
            *fields,
            "generator",
            "trainer",
        }
    events = functions(source / "utils/callbacks.py", "TrainingCallback")
    assert {"on_step_end", "on_save", "on_log"} <= events
    for file, name in (("trainer.py", "RayPPOTrainer"), ("sft_trainer.py", "SFTTrainer")):
        assert "add_callback" in functions(source / file, name)
        assert "    TrainingCallback," in (source / file).read_text()
    assert "self.cfg.trainer.max_training_steps" in (source / "trainer.py").read_text()


@pytest.fixture
def timer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nemo_rl_timer", folder_of("nemo-rl") / "timer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_timer_of_nemo_rl(timer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_RL_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(nemo_rl, "_BEGAN", 1000.0)
    assert timer.convert_to_seconds(duration(93784.5)) == 93784
    nemo_rl.attach(timer)
    now = 1600.0  # 600 s after the start of the program
    monkeypatch.setattr(timer.time, "time", lambda: now)
    checker = timer.TimeoutChecker(timeout=duration(700), fit_last_save_time=True)
    checker.start_iterations()
    assert not checker.check_save()
    now = 1660.0
    checker.mark_iteration()  # a step took 60 s: another one would end after 720 s
    assert checker.check_save() and not checker.check_save()
    checker = timer.TimeoutChecker(timeout=None)
    assert not checker.check_save()
    (tmp_path / "stop").touch()
    assert checker.check_save() and not checker.check_save()
