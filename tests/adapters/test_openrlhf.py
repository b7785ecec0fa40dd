import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.adapters.adapter import ProgramPlace, ReportedStep
from hpc_rl.adapters.openrlhf import OPENRLHF, OPENRLHF_TRAINERS, gpus_needed, progress
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.table import choose, started
from hpc_rl.run_dir import RunDir

PPO = ("python3", "-m", "openrlhf.cli.train_ppo_ray")


def place(folder: Path) -> ProgramPlace:
    return ProgramPlace(RunDir(folder), nodes=2, processes=4)


def save(folder: Path, step: int, processes: int) -> None:
    (folder / f"global_step{step}").mkdir(parents=True)
    for rank in range(processes):
        (folder / f"global_step{step}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (folder / "latest").write_text(f"global_step{step}")


def test_recognised_behind_a_submission_to_ray() -> None:
    typed = Program(("ray", "job", "submit", "--address=http://127.0.0.1:8265", "--", *PPO, "--actor.num_nodes", "1"))
    row = choose("auto", "ray", typed)
    assert row is OPENRLHF and started(row, typed) == (*PPO, "--actor.num_nodes", "1")
    assert choose("auto", "torchrun", Program(("-m", "openrlhf.cli.train_dpo"))) is OPENRLHF_TRAINERS


def test_resuming_in_both_spellings(tmp_path: Path) -> None:
    later = replace(place(tmp_path), is_later=True)
    new, old = Program((*PPO, "--actor.num_nodes", "1")), Program((*PPO, "--actor_num_nodes", "1"))
    folder = str(tmp_path / "checkpoints")
    assert OPENRLHF.arguments(new, later) == ["--ckpt.path", folder]
    save(tmp_path / "checkpoints/_actor", 7, 8)
    assert OPENRLHF.newest(new, later) == Checkpoint(7, f"{folder}/_actor/global_step7", 8)
    assert OPENRLHF.arguments(new, later) == ["--ckpt.path", folder, "--ckpt.load_enable"]
    assert OPENRLHF.arguments(old, later) == ["--ckpt_path", folder, "--load_checkpoint"]
    assert OPENRLHF.arguments(new, place(tmp_path)) == ["--ckpt.path", folder]
    own = Program((*PPO, "--ckpt.path", "mine", "--ckpt.load_enable"), tmp_path)
    assert OPENRLHF.arguments(own, later) == [] and OPENRLHF.folder(own) == tmp_path / "mine"
    save(tmp_path / "checkpoints", 3, 8)
    assert (OPENRLHF_TRAINERS.newest(Program(("-m", "openrlhf.cli.train_sft")), later) or Checkpoint(0, "")).step == 3


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ("--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --critic.num_gpus_per_node 2 "
         "--reward.num_gpus_per_node 2 --vllm.num_engines 2 --vllm.tensor_parallel_size 2", 12),
        ("--actor_num_gpus_per_node 4 --ref_num_gpus_per_node 4 --critic_num_gpus_per_node 4 "
         "--reward_num_gpus_per_node 4 --colocate_actor_ref", 12),
        ("--actor.num_nodes 2 --actor.num_gpus_per_node 8 --train.colocate_all --vllm.num_engines 4", 16),
    ],
)  # fmt: skip
def test_the_gpus_that_it_asks_for(options: str, gpus: int) -> None:
    assert gpus_needed(Program((*PPO, *options.split()))) == gpus


def test_sizes_and_conflicts(tmp_path: Path) -> None:
    here = place(tmp_path)
    together = Program((*PPO, "--train.colocate_all", "--vllm.tensor_parallel_size", "2", "--ckpt.path", "c"), tmp_path)
    added = list(OPENRLHF.arguments(together, here))
    assert added[:2] == ["--actor.num_nodes", "2"] and added[-2:] == ["--vllm.num_engines", "4"]
    assert added[8:10] == ["--actor.num_gpus_per_node", "4"] and len(added) == 18
    assert OPENRLHF.conflicts(together, here) == []
    (apart,) = OPENRLHF.conflicts(Program((*PPO, "--actor.num_nodes", "1")), here)
    assert "ask for 32 GPUs, but the job has 8, and OpenRLHF would wait forever" in apart
    save(tmp_path / "c/_actor", 2, 4)
    (other,) = OPENRLHF.conflicts(together, here)
    assert "global_step2 was written by 4 GPUs" in other and "trains on 8" in other
    first = replace(here, began=time.time() + 60)  # the checkpoint is one of another run
    assert OPENRLHF.conflicts(together, first) == []
    resuming = Program((*together.words, "--ckpt.load_enable"), tmp_path)
    assert "global_step2 was written by 4 GPUs" in OPENRLHF.conflicts(resuming, first)[0]
    unsaved = Program(("-m", "openrlhf.cli.train_sft", "--disable_ds_ckpt"), tmp_path)
    assert "--disable_ds_ckpt: without these checkpoints" in OPENRLHF_TRAINERS.conflicts(unsaved, here)[0]


def test_lines_of_the_log() -> None:
    line = (
        "(PPOTrainer pid=1) INFO 11-28 16:00:00 ppo_trainer.py:551] \u2728 Global step 12: "
        "{'policy_loss': 0.25, 'reward': 1, 'timing/generation': 2.0, 'timing/step_total': 5.0, 'ppo_kl': 0.5}"
    )
    assert progress(line) == ReportedStep(
        12,
        None,
        {
            "actor/pg_loss": 0.25,
            "critic/score/mean": 1.0,
            "timing_s/generation": 2.0,
            "timing_s/step": 5.0,
            "train/ppo_kl": 0.5,
        },
    )
    assert progress("Global step 3: {'a': nan}") == ReportedStep(3)
    assert progress("Episode [1/2]") is None
