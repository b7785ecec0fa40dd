from pathlib import Path

import pytest

from hpc_rl.adapters.adapter import ProgramPlace
from hpc_rl.adapters.loops import ACCELERATE, TORCHTITAN
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint, record_saved
from hpc_rl.adapters.table import choose
from hpc_rl.run_dir import RunDir


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import lightning as L", "lightning"),
        ("import pytorch_lightning as pl", "lightning"),
        ("from lightning.pytorch.cli import LightningCLI", "lightning"),
        ("from accelerate import Accelerator", "accelerate"),
        ("from accelerate import Accelerator\nfrom transformers import Trainer", "transformers"),
        ("from torchtitan.train import main", "generic"),  # with options of its own
    ],
)
def test_a_script_is_recognised_by_its_imports(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert choose("auto", "torchrun", Program(("train.py",), tmp_path)).name == name


def test_a_loop_with_accelerate_resumes_by_its_own_option(tmp_path: Path) -> None:
    run, script = RunDir(tmp_path), tmp_path / "train.py"
    script.write_text("parser.add_argument('--resume_from_checkpoint')\n")
    program = Program(("train.py",), tmp_path)
    record_saved(run, Checkpoint(2, str(tmp_path)))
    assert ACCELERATE.arguments(program, ProgramPlace(run)) == []
    later = ProgramPlace(run, is_later=True)
    assert ACCELERATE.arguments(program, later) == ["--resume_from_checkpoint", str(tmp_path)]
    script.write_text("")
    assert ACCELERATE.arguments(program, later) == []
    assert ACCELERATE.arguments(Program(("none.py",), tmp_path), later) == []


def test_torchtitan(tmp_path: Path) -> None:
    place = ProgramPlace(RunDir(tmp_path))
    words = ("-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel")
    program, folder = Program(words), ["--checkpoint.folder", str(tmp_path / "checkpoints")]
    row = choose("auto", "torchrun", program)
    assert row is TORCHTITAN and not row.conflicts(program, place)
    assert row.arguments(program, place) == ["--checkpoint.enable", *folder]
    assert row.arguments(Program((*words, "--checkpoint.enable")), place) == folder
    assert row.arguments(Program((*words, "--checkpoint.enable", "--checkpoint.folder", "x")), place) == []
    refused = Program((*words, "--checkpoint.no-enable"))
    assert row.conflicts(refused, place) == [
        "--checkpoint.no-enable: torchtitan would save nothing, and could not resume"
    ]
    assert "--module llama3 --config NAME" in row.conflicts(Program(words[:2]), place)[0]
