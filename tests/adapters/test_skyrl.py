from dataclasses import replace
from pathlib import Path

from hpc_rl.adapters.adapter import ProgramPlace, ReportedStep
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.skyrl import SKYRL
from hpc_rl.adapters.step_line import step_line
from hpc_rl.adapters.table import choose
from hpc_rl.run_dir import RunDir

RL = ("uv", "run", "--isolated", "--extra", "fsdp", "-m", "skyrl.train.entrypoints.main_base")
SFT = ("python", "-m", "skyrl.train.main_sft")


def place(folder: Path) -> ProgramPlace:
    return ProgramPlace(RunDir(folder), nodes=2, processes=4)


def save(folder: Path, step: int, processes: int) -> None:
    (folder / f"global_step_{step}/policy").mkdir(parents=True)
    for rank in range(processes):
        (folder / f"global_step_{step}/policy/model_world_size_{processes}_rank_{rank}.pt").touch()
    (folder / "latest_ckpt_global_step.txt").write_text(str(step))


def test_recognised(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from skyrl.train.entrypoints.main_base import BasePPOExp\n")
    assert choose("auto", "ray", Program(RL)) is choose("auto", "ray", Program(SFT)) is SKYRL
    assert choose("auto", "ray", Program(("python", "mine.py"), tmp_path)) is SKYRL
    assert choose("auto", "ray", Program(("python", "-m", "skyrl_train.entrypoints.main_base"))).name == "generic"


def test_arguments(tmp_path: Path) -> None:
    added = list(SKYRL.arguments(Program((*RL, "generator.inference_engine.tensor_parallel_size=2")), place(tmp_path)))
    assert added[:3] == [
        f"trainer.ckpt_path={tmp_path}/checkpoints",
        "trainer.placement.policy_num_nodes=2",
        "trainer.placement.policy_num_gpus_per_node=4",
    ]
    assert added[-2:] == ["generator.inference_engine.num_engines=4", f"trainer.log_path={tmp_path}/skyrl-logs"]
    apart = Program((*RL, "trainer.placement.colocate_all=false", "trainer.ckpt_path=x"), tmp_path)
    assert SKYRL.arguments(apart, place(tmp_path)) == [f"trainer.log_path={tmp_path}/skyrl-logs"]
    sft = [f"ckpt_path={tmp_path}/checkpoints", "placement.num_nodes=2", "placement.num_gpus_per_node=4"]
    later = replace(place(tmp_path), is_later=True)
    assert SKYRL.arguments(Program(SFT), later) == sft
    save(tmp_path / "checkpoints", 6, 8)
    assert SKYRL.arguments(Program(SFT), later) == [*sft, "resume_from=latest"]
    assert SKYRL.newest(Program(SFT), later) == Checkpoint(6, f"{tmp_path}/checkpoints/global_step_6", 8)
    assert SKYRL.newest(Program(SFT), replace(later, began=4e9)) is None


def test_conflicts(tmp_path: Path) -> None:
    (wrong,) = SKYRL.conflicts(Program((*RL, "trainer.placement.policy_num_nodes=1")), place(tmp_path))
    assert wrong.startswith("trainer.placement.policy_num_nodes=1, but the job has 2: leave the option out")
    save(tmp_path / "checkpoints", 6, 4)
    (other,) = SKYRL.conflicts(Program(RL), place(tmp_path))
    assert "global_step_6 was written by 4 GPUs" in other and "the job has 8" in other


def test_lines_of_the_log() -> None:
    logs = {"reward/avg_raw_reward": 0.5, "policy/policy_loss": 0.1, "policy/lr": 1.0, "timing/step": 2.0, "loss": 3.0}
    assert SKYRL.progress(step_line(4, 9, logs)) == ReportedStep(
        4,
        9,
        {"critic/score/mean": 0.5, "actor/pg_loss": 0.1, "actor/lr": 1.0, "timing_s/step": 2.0, "train/loss": 3.0},
    )
