from pathlib import Path

import pytest

from hpc_rl.adapters.program import Program
from hpc_rl.adapters.table import ADAPTERS, GENERIC, choose, description
from hpc_rl.errors import UserError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from trl import SFTTrainer", "trl"),
        ("from transformers import AutoTokenizer, Trainer", "transformers"),
        ("from transformers import AutoTokenizer", "generic"),
        ("import torch", "generic"),
    ],
)
def test_a_script_is_recognised_by_its_imports(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert choose("auto", "torchrun", Program(("train.py", "--lr", "1"), tmp_path)).name == name
    assert choose("auto", "ray", Program(("python", "train.py"), tmp_path)) is GENERIC
    assert choose("none", "torchrun", Program(("train.py",), tmp_path)) is GENERIC


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("-m", "axolotl.cli.train", "c.yml"), "axolotl"),
        (("-m", "trl.scripts.sft"), "trl"),
        (("-m", "llamafactory.launcher", "c.yaml"), "llamafactory"),
        (("-m", "swift.cli.sft"), "ms-swift"),
        (("-m", "my.module"), "generic"),
    ],
)
def test_a_module_is_recognised_by_its_name(words: tuple[str, ...], name: str) -> None:
    assert choose("auto", "torchrun", Program(words)).name == name


def test_a_chosen_adapter_has_to_exist_and_to_fit() -> None:
    program = Program(("train.py",))
    assert choose("trl", "torchrun", program).name == "trl"
    with pytest.raises(UserError, match=r"slurm\.adapter=tlr: there is no such adapter: choose auto, none, "):
        choose("tlr", "torchrun", program)
    with pytest.raises(UserError, match=r"slurm\.adapter=trl: .* needs `submit torchrun`, not `submit ray`"):
        choose("trl", "ray", program)
    assert choose("tlr", "torchrun", Program(())) is GENERIC  # a script that was rendered before


def test_descriptions(tmp_path: Path) -> None:
    program = Program(("-m", "trl.scripts.sft", "--output_dir", "out"))
    assert description(ADAPTERS["trl"], program).startswith("TRL (transformers' Trainer): saves to out before ")
    assert "looks for $HPC_RL_RUN_DIR/stop itself" in description(GENERIC, program)
    (tmp_path / "c.yml").write_text("output_dir: there\n")
    config = Program(("-m", "axolotl.cli.train", "c.yml"), tmp_path)
    assert ADAPTERS["axolotl"].folder(config) == tmp_path / "there"
    assert ADAPTERS["trl"].folder(Program(("sft.py",))) is None
