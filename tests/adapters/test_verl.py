import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.adapters.adapter import ProgramPlace, ReportedStep
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.table import choose
from hpc_rl.adapters.verl import CALLBACK, ENV_CALLBACK, VERL, VERL_SFT, progress
from hpc_rl.run_dir import RunDir

PPO = ("python3", "-m", "verl.trainer.main_ppo")
EXPIRY = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"


def place(folder: Path) -> ProgramPlace:
    return ProgramPlace(RunDir(folder), nodes=2, processes=4)


def save(folder: Path, step: int, processes: int | None = 8, part: str = "actor") -> None:
    path = folder / f"global_step_{step}" / part
    path.mkdir(parents=True)
    if processes is not None:
        (path / "fsdp_config.json").write_text(f'{{"FSDP_version": 2, "world_size": {processes}}}')
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


@pytest.mark.parametrize(
    ("words", "kind", "name"),
    [
        ("python3 -m verl.trainer.main_ppo a=1", "ray", "verl"),
        ("uv run -m verl.trainer.main_ppo_sync", "ray", "verl"),
        ("ray job submit -- python -m verl.experimental.one_step_off_policy.main_ppo", "ray", "verl"),
        ("python -m recipe.dapo.main_dapo", "ray", "verl"),
        ("python -m verl.trainer.main_eval", "ray", "generic"),
        ("-m verl.trainer.sft_trainer", "torchrun", "verl-sft"),
        ("-m verl.trainer.fsdp_sft_trainer", "torchrun", "verl-sft"),
    ],
)
def test_recognised(words: str, kind: str, name: str) -> None:
    assert choose("auto", kind, Program(tuple(words.split()))).name == name


def test_arguments_that_the_user_has_not_given(tmp_path: Path) -> None:
    assert VERL.arguments(Program(PPO), place(tmp_path)) == [
        "++trainer.nnodes=2",
        "++trainer.n_gpus_per_node=4",
        f"++trainer.default_local_dir={tmp_path}/checkpoints",
        "++trainer.save_freq=1000000",
        "++trainer.esi_redundant_time=120",
        f"++trainer.checkpoint_callback_class={CALLBACK}",
    ]
    own = ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "trainer.default_local_dir=out", "trainer.save_freq=5")
    more = ("ray_kwargs.ray_init.num_cpus=8", "+trainer.esi_redundant_time=9")
    assert VERL.arguments(Program((*PPO, *own, *more)), place(tmp_path)) == [
        f"++trainer.checkpoint_callback_class={CALLBACK}",
        "ray_kwargs.ray_init.num_cpus=null",
    ]
    pools = Program((*PPO, "actor_rollout_ref.rollout.nnodes=1", "trainer.nnodes=1"))
    assert not any("n_gpus_per_node" in word for word in VERL.arguments(pools, place(tmp_path)))
    assert VERL.conflicts(pools, place(tmp_path)) == []


def test_options_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_text("trainer:\n  save_freq: 7\n  default_local_dir: there\n")
    program = Program((*PPO, "--config-path", "conf", "--config-name=mine"), tmp_path)
    added = VERL.arguments(program, place(tmp_path))
    assert not any("save_freq" in word or "default_local_dir" in word for word in added)
    assert VERL.folder(program) == tmp_path / "there"
    (tmp_path / "conf/mine.yaml").write_text("trainer:\n  default_local_dir: elsewhere\n")
    save(tmp_path / "there", 5)
    newest = VERL.newest(program, place(tmp_path))
    assert newest is not None and newest.step == 5  # the program runs with what the file was at its start


def test_environment(tmp_path: Path) -> None:
    assert VERL.environment(Program(PPO), place(tmp_path)) == {"RAY_COLOR_PREFIX": "0"}
    own = Program((*PPO, "trainer.checkpoint_callback_class=my.Callback"))
    found = VERL.environment(own, replace(place(tmp_path), seconds=3600))
    assert found[ENV_CALLBACK] == "my.Callback"
    assert 3590 < int(found[EXPIRY]) - time.time() <= 3600


def test_conflicts_with_the_job(tmp_path: Path) -> None:
    wrong = Program((*PPO, "trainer.nnodes=1", "trainer.n_gpus_per_node=8"))
    nodes, gpus = VERL.conflicts(wrong, place(tmp_path))
    assert nodes.startswith("trainer.nnodes=1, but the job has 2 nodes: leave the option out")
    assert "the job has 4 GPUs per node" in gpus and gpus.endswith("--gpus-per-node 8")
    save(tmp_path / "checkpoints", 5)
    assert VERL.conflicts(Program(PPO), place(tmp_path)) == []
    (other,) = VERL.conflicts(Program(PPO), replace(place(tmp_path), nodes=1, began=time.time() + 60))
    assert "global_step_5 was written by 8 GPUs" in other and "the job has 4: submit it" in other
    anew = Program((*PPO, "trainer.resume_mode=disable"))
    assert VERL.conflicts(anew, replace(place(tmp_path), nodes=1)) == []


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    here, folder = place(tmp_path), tmp_path / "checkpoints"
    assert VERL.newest(Program(PPO), here) is None
    save(folder, 5)
    assert VERL.newest(Program(PPO), here) == Checkpoint(5, f"{folder}/global_step_5", 8)
    save(folder, 6, None)
    assert VERL.newest(Program(PPO), here) == Checkpoint(6, f"{folder}/global_step_6", 0)
    assert VERL.newest(Program(PPO), replace(here, began=time.time() + 60)) is None  # of another run
    (folder / "latest_checkpointed_iteration.txt").write_text("")
    assert VERL.newest(Program(PPO), here) is None  # it is being written
    save(tmp_path / "sft", 3, 2, ".")
    sft = Program(("-m", "verl.trainer.sft_trainer", "trainer.default_local_dir=sft"), tmp_path)
    assert VERL_SFT.newest(sft, here) == Checkpoint(3, f"{tmp_path}/sft/global_step_3", 2)
    assert VERL_SFT.arguments(sft, here) == []


def test_lines_of_the_log() -> None:
    line = (
        "\x1b[36m(TaskRunner pid=7)\x1b[0m step:12 - critic/score/mean:0.5 - actor/pg_loss:-0.001 - "
        "perf/total_num_tokens:600 - timing_s/step:np.float64(3.0) - val-core/gsm8k/acc:1e-3 - x:nan"
    )
    found = progress(line)
    assert found is not None and found.step == 12 and found.total is None
    assert {name: value for name, value in found.metrics.items() if name != "x"} == {
        "critic/score/mean": 0.5,
        "actor/pg_loss": -0.001,
        "perf/total_num_tokens": 600.0,
        "timing_s/step": 3.0,
        "val-core/gsm8k/acc": 0.001,
        "perf/tokens_per_s": 200.0,
    }
    assert progress("(TaskRunnerV1 pid=1) INFO:2026-11-28 16:20:39,303:Total training steps: 120") == ReportedStep(
        0, 120
    )
    assert progress("Total steps: 30, num_warmup_steps: 0") == ReportedStep(0, 30)
    assert progress("Epoch 1/4:  25%|##      | 2/8 [00:02<00:16,  2.73s/it]step:3 - train/loss:5.5\n") == ReportedStep(
        3, None, {"train/loss": 5.5}
    )
    assert progress("step 3") is None
    assert VERL.stops("(TaskRunner pid=1) Force saving checkpoint: ESI instance expiration approaching.")
