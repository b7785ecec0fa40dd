import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.adapters.inside import launched

PLACE = {
    **{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "3", "GROUP_RANK": "1"},
    **{"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: Layer
"""


def start(folder: Path, *words: str) -> tuple[dict[str, str], list[str]]:
    """Start a program as a rank does, and return its environment and arguments."""
    (folder / "x.py").write_text("import json, os, sys; print(json.dumps([dict(os.environ), sys.argv]))\n")
    environ = {name: value for name, value in os.environ.items() if name != "HF_HOME"}
    environ |= {**PLACE, "HF_HOME": str(folder), "PYTHONPATH": str(Path(launched.__file__).parents[3])}
    command = [sys.executable, "-m", launched.__name__, *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found, arguments = json.loads(done.stdout.splitlines()[-1])
    return found, arguments


def test_accelerate_s_own_code_makes_its_variables(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "f.yaml").write_text(FSDP)
    found, arguments = start(tmp_path, "accelerate", "--config_file", "f.yaml", "--", "x.py", "--lr", "1")
    assert arguments == ["x.py", "--lr", "1"]
    assert found["ACCELERATE_USE_FSDP"] == "true" and found["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Layer"
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16" and found["FSDP_VERSION"] == "2"
    assert {name: found[name] for name in PLACE} == PLACE  # the place of the rank is the job's


def test_deepspeed_and_fabric(tmp_path: Path) -> None:
    assert start(tmp_path, "deepspeed", "--num_gpus", "8", "--", "x.py", "a")[1] == ["x.py", "--local_rank=1", "a"]
    assert start(tmp_path, "deepspeed", "--no_local_rank", "--", "x.py")[1] == ["x.py"]
    found, _ = start(tmp_path, "fabric", "--strategy=fsdp", "--devices", "8", "--precision", "bf16-mixed", "--", "x.py")
    assert {name: value for name, value in found.items() if name.startswith("LT_")} == {
        **{"LT_CLI_USED": "1", "LT_STRATEGY": "fsdp", "LT_PRECISION": "bf16-mixed"},
        **{"LT_DEVICES": "2", "LT_NUM_NODES": "2"},
    }


def test_a_settings_file_of_swift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swift/cli").mkdir(parents=True)
    (tmp_path / "swift/cli/main.py").write_text("def parse_yaml_args(argv):\n    argv[0:1] = ['--lr', '1']\n")
    monkeypatch.setenv("NNODES", "2")
    found, arguments = start(tmp_path, "swift", "--", "x.py", "--a", "b")
    assert arguments == ["x.py", "--a", "b"]
    found, arguments = start(tmp_path, "swift", "--", "-m", "x", "c.yaml", "--a", "b")
    assert arguments[1:] == ["--lr", "1", "--a", "b"] and "NNODES" not in found


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(
        AssertionError, match="trl: --accelerate_config zero9: neither a file nor a configuration of TRL"
    ):
        start(tmp_path, "trl", "zero9", "--", "-m", "trl.scripts.sft")
