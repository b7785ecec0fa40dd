from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.adapters.adapter import ProgramPlace, ReportedStep
from hpc_rl.adapters.prime_rl import PRIME_RL, TRAINER, progress
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.table import choose
from hpc_rl.run_dir import RunDir

SFT = ("-m", TRAINER, "@", "sft.toml")


@pytest.mark.parametrize(
    "typed", ["uv run rl @ rl.toml", "sft @ x.toml", "python -m prime_rl.trainer.rl.train @ x.toml"]
)
def test_its_launchers_are_refused_with_what_works(tmp_path: Path, typed: str) -> None:
    program = Program(tuple(typed.split()))
    for kind in ("ray", "torchrun"):
        assert choose("auto", kind, program) is PRIME_RL
    (refused,) = PRIME_RL.conflicts(program, ProgramPlace(RunDir(tmp_path)))
    assert f"SFT by `submit torchrun ... -- -m {TRAINER} @ FILE`" in refused
    assert choose("auto", "ray", Program(("sft", "--lr", "1"))).name == "generic"


def test_arguments_and_the_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text("max_steps = 5\n")
    program, place = Program(SFT, tmp_path), ProgramPlace(RunDir(tmp_path), is_later=True)
    folder = f"{tmp_path}/checkpoints"
    named = ["--output-dir", folder, "--run.name", "run"]
    assert PRIME_RL.arguments(program, place) == [*named, "--ckpt.interval", "50"]
    assert PRIME_RL.conflicts(program, place) == []
    for step, name in ((50, ".metadata"), (100, ".metadata"), (150, "__0_0.distcp")):
        (tmp_path / f"checkpoints/run/checkpoints/step_{step}/trainer").mkdir(parents=True)
        (tmp_path / f"checkpoints/run/checkpoints/step_{step}/trainer" / name).touch()
    newest = Checkpoint(100, f"{folder}/run/checkpoints/step_100")
    assert PRIME_RL.newest(program, place) == newest
    (tmp_path / "sft.toml").write_text("max_steps = 5\n[ckpt]\ninterval = 9\n")
    assert "--ckpt.interval" in PRIME_RL.arguments(program, place)  # the file was read before
    program = Program(SFT, tmp_path)
    assert PRIME_RL.arguments(program, place) == [*named, "--resume.step", "100"]
    assert PRIME_RL.arguments(program, replace(place, is_later=False)) == named
    own = Program((*SFT, "--output-dir", "o", "--run.name", "n"), tmp_path)
    assert PRIME_RL.arguments(own, place) == [] and PRIME_RL.folder(own) == tmp_path / "o"


def test_lines_of_the_log() -> None:
    line = (
        "16:00:00 SUCCESS Step 12 |   3.20s | Loss 0.1234 | Grad. Norm 0.5000 | LR 1.00e-06 | Throughput 123 tokens/s"
    )
    found = {"train/loss": 0.1234, "train/grad_norm": 0.5, "train/lr": 1e-6, "perf/tokens_per_s": 123.0}
    assert progress(line) == ReportedStep(12, None, {**found, "timing_s/step": 3.2})
    assert progress("Validation | Step 12 | Loss 0.5") is None
