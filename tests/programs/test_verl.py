"""What verl itself makes of our options and variables."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.adapters.adapter import ProgramPlace
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.verl import CALLBACK, ENV_CALLBACK, SAVE_S, VERL, VERL_SFT, progress
from hpc_rl.run_dir import RunDir
from tests.programs.environments import output_of

pytestmark = pytest.mark.programs
COMPOSE = """
import json, sys
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
with initialize_config_module("verl.trainer.config", version_base=None):
    found = compose(sys.argv[1], sys.argv[2:])
print(json.dumps({"trainer": OmegaConf.to_container(found.trainer, resolve=False), "ray": OmegaConf.select(found,
    "ray_kwargs.ray_init.num_cpus")}))
"""
ESI = """
import sys
from hpc_rl.adapters.inside import hooks
hooks.install()
from verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi
print(should_save_ckpt_esi(max_steps_duration=float(sys.argv[1]), redundant_time=float(sys.argv[2])))
"""


def test_hydra_accepts_the_options(tmp_path: Path) -> None:
    place = ProgramPlace(RunDir(tmp_path), nodes=2, processes=4)
    own = ("trainer.save_freq=5", "ray_kwargs.ray_init.num_cpus=8")
    added = VERL.arguments(Program(("python", "-m", "verl.trainer.main_ppo", *own)), place)
    found = json.loads(output_of("verl", COMPOSE, "ppo_trainer", *own, *added))
    trainer = found["trainer"]
    assert (trainer["nnodes"], trainer["n_gpus_per_node"], trainer["save_freq"], found["ray"]) == (2, 4, 5, None)
    assert (trainer["checkpoint_callback_class"], trainer["esi_redundant_time"]) == (CALLBACK, SAVE_S)
    assert (trainer["default_local_dir"], trainer["resume_mode"]) == (str(tmp_path / "checkpoints"), "auto")
    added = VERL_SFT.arguments(Program(("-m", "verl.trainer.sft_trainer")), place)
    found = json.loads(output_of("verl", COMPOSE, "sft_trainer_engine", *added))
    assert found["trainer"]["default_local_dir"] == str(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("left_s", "step_s", "stop", "is_saved"),
    [
        (1000, 100, False, False),
        (60 + SAVE_S + 90, 100, False, True),
        (60 + SAVE_S + 110, 100, False, False),
        (50, 0, False, False),  # in its first step
        (1000, 0, True, True),
    ],
)
def test_v0_saves_when_a_step_does_not_fit(
    tmp_path: Path, left_s: float, step_s: float, stop: bool, is_saved: bool
) -> None:
    if stop:
        (tmp_path / "stop").touch()
    began = time.time()
    place = ProgramPlace(RunDir(tmp_path), seconds=left_s + 10_000)
    ((name, end),) = (
        pair for pair in VERL.environment(Program(("-m", "verl.trainer.main_ppo")), place).items() if "MLP" in pair[0]
    )
    assert abs(int(end) - began - left_s - 10_000) < 5
    # verl reads the clock when it is asked, after seconds of imports: the time is given from then on.
    code = ESI.replace("import sys\n", "import os, sys, time\n", 1).replace(
        "print(", f"os.environ[{name!r}] = str(time.time() + {left_s})\nprint(", 1
    )
    assert output_of(
        "verl", code, str(step_s), str(SAVE_S), HPC_RL_RUN_DIR=str(tmp_path), HPC_RL_HOOK=" verl_ppo"
    ).split()[-1] == str(is_saved)


def test_verl_builds_our_callback_with_the_users_own(tmp_path: Path) -> None:
    code = f"""
from omegaconf import OmegaConf
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
settings = {{"checkpoint_callback_class": "{CALLBACK}", "save_freq": -1}}
found = build_checkpoint_callback(OmegaConf.create({{"trainer": settings}}))
print(type(found).__name__, type(found._own).__name__)
"""
    own = {ENV_CALLBACK: "verl.trainer.ppo.checkpoint_callback.CheckpointCallback", "HPC_RL_RUN_DIR": str(tmp_path)}
    assert output_of("verl", code, **own).splitlines()[-1] == "StopCallback CheckpointCallback"


def test_lines_of_its_console_logger() -> None:
    code = """
from verl.utils.logger import LocalLogger
logger = LocalLogger(print_to_console=True)
logger.log({"critic/score/mean": 0.5, "actor/lr": 1e-6, "timing_s/step": 2.0, "n": 3}, step=12)
"""
    found = [step for line in output_of("verl", code).splitlines() if (step := progress(line)) is not None]
    assert [step.step for step in found] == [12]
    assert replace(found[0]).metrics == {"critic/score/mean": 0.5, "actor/lr": 1e-6, "timing_s/step": 2.0, "n": 3.0}


def test_the_loop_of_v1_saves_once_and_returns(tmp_path: Path) -> None:
    program, place = Program(("python", "-m", "verl.trainer.main_ppo")), ProgramPlace(RunDir(tmp_path))
    script = Path(__file__).parent / "beside_verl/v1_fit.py"
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    printed = output_of("verl", code, str(tmp_path), *VERL.arguments(program, place), HPC_RL_RUN_DIR=str(tmp_path))
    steps = [step.step for line in printed.splitlines() if (step := progress(line)) is not None and step.step]
    newest = VERL.newest(program, place)
    assert newest is not None and 3 < newest.step < 20
    assert steps == list(range(1, newest.step + 1)) and f"stopped after step {newest.step}: checkpoint" in printed
    assert len(list((tmp_path / "checkpoints").glob("global_step_*"))) == 1 and "fit returned" in printed
