"""The commands as a user types them, on a machine without Slurm."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl import cli
from tests.helpers import make_tiny_model

SFT = [
    *("submit", "sft", "--local", "model.path=model", "data.train_files=train.jsonl", "trainer.device=cpu"),
    "data.train_batch_size=4",
]


def chat(*roles: str) -> str:
    return json.dumps({"messages": [{"role": role, "content": "1"} for role in roles]}) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "train.jsonl").write_text(chat("user", "assistant") * 8)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, because imports take longer than most commands."""
    printed = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hpc-rl", *arguments])
        patch.setattr(sys, "stdout", printed[0])
        patch.setattr(sys, "stderr", printed[1])
        with pytest.raises(SystemExit) as left:
            cli.main()
    texts = [stream.buffer.getvalue().decode() for stream in printed]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, int(left.value.code or 0), *texts)


def run_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_rl.cli", *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.train_files=none.jsonl"], "none.jsonl: no such data file"),
        (["trainer.total_epoch=3"], "did you mean trainer.total_epochs?"),
        (["--run-dir", "model"], "is neither empty nor a run directory"),
    ],
)
def test_bad_input_is_a_line_and_exit_code_2_and_starts_nothing(folder: Path, arguments: list[str], said: str) -> None:
    """tests/test_bad_inputs.py has many more."""
    done = run_process(folder, *SFT, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    assert all(line.startswith("hpc-rl: ") for line in done.stderr.splitlines())
    assert not (folder / "runs").exists()


def test_all_problems_are_told_at_once(folder: Path) -> None:
    done = run(folder, *SFT, "model.path=./no/model", "data.train_files=[a.jsonl,b.jsonl]")
    keys = [line.split(":")[1].split()[0] for line in done.stderr.splitlines()]
    assert keys == ["model.path", "data.train_files", "data.train_files"]


def test_without_slurm_local_is_proposed_and_nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [word for word in SFT if word != "--local"]
    monkeypatch.setenv("PATH", "/nonexistent")
    done = run(folder, *arguments)
    assert done.returncode == 2
    assert "no sbatch on PATH" in done.stderr and "--local" in done.stderr
    assert not (folder / "runs").exists()


def test_a_run_on_this_machine(folder: Path) -> None:
    steps = ["trainer.total_training_steps=2", "data.train_batch_size=4"]
    done = run_process(folder, *SFT, "--job-name", "mine", *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    found = json.loads(run(folder, "status", "mine", "--json").stdout)
    assert (found["state"], found["exit_code"], found["step"]) == ("COMPLETED", 0, 2)
    assert run(folder, "status", str(folder / "runs" / "mine")).stdout.startswith("run ")
    assert "step 2/2" in run(folder, "logs", "mine").stdout
    lines = [json.loads(line) for line in run(folder, "logs", "mine", "--node", "0", "--json").stdout.splitlines()]
    assert {Path(line["file"]).name for line in lines} <= {"node0.log", "node0-rank0.log"}
    assert "has no job to stop: its state is COMPLETED" in run(folder, "stop", "mine").stdout
    assert "no job to cancel: its state is COMPLETED" in run(folder, "cancel", "mine").stdout
    again = run(folder, *SFT, "--job-name", "mine", *steps)
    assert again.returncode == 2 and "run mine has completed, and the job would have nothing to do" in again.stderr
    assert (folder / "runs" / "mine" / "model" / "model.safetensors").exists()
    export = run(folder, "export", "mine", "out")
    assert export.returncode == 0 and (folder / "out" / "tokenizer.json").exists()
    refused = run(folder, "export", "mine", "out")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr


def test_names_count_up_and_a_dry_run_makes_nothing(folder: Path) -> None:
    dry = [*SFT, "--dry-run", "--sbatch", "exclusive", "--sbatch", "nice=10", "--time", "90", "--mem", "64G"]
    script = run(folder, *dry).stdout
    assert f"HPC_RL_RUN_DIR={folder}/runs/sft-1\n" in script
    for line in ("exclusive", "nice=10", "time=90", "mem=64G", "job-name=sft-1"):
        assert f"#SBATCH --{line}\n" in script
    assert not (folder / "runs").exists()
    rendered = run(folder, "render", *SFT[1:2], *SFT[3:])
    assert rendered.returncode == 0 and (folder / "runs" / "sft-1" / "job.sbatch").read_text() == rendered.stdout
    assert f"HPC_RL_RUN_DIR={folder}/runs/sft-2\n" in run(folder, *dry).stdout


def test_unknown_runs_name_the_nearest(folder: Path) -> None:
    run(folder, "render", *SFT[1:2], *SFT[3:], "--job-name", "first-try")
    done = run(folder, "status", "frist-try")
    assert done.returncode == 2 and "did you mean first-try?" in done.stderr
    assert "is a folder, but not a run directory" in run(folder, "status", "model").stderr
    assert "job 123 does not belong to a run" in run(folder, "status", "123").stderr
    assert "NOT SUBMITTED" in run(folder, "status", "first-try").stdout


def test_configuration_is_shown_and_documented(folder: Path) -> None:
    done = run(folder, "config", "sft", "trainer.total_epochs=3")
    assert "total_epochs: 3" in done.stdout
    assert "required keys without a value: model.path, data.train_files" in done.stderr
    assert json.loads(run(folder, "config", "sft", "--json").stdout)["trainer"]["nnodes"] == 1
    documented = run(folder, "config", "sft", "--help").stdout
    assert "trainer.micro_tokens = auto" in documented and "Usage:" in documented


def test_a_script_of_somebody_else_is_refused(folder: Path) -> None:
    (folder / "other.sbatch").write_text("#!/bin/bash\ntrue\n")
    done = run(folder, "submit", "sft", "--script", "other.sbatch")
    assert done.returncode == 2 and "hpc-rl render did not write it" in done.stderr
    assert (
        "cannot be combined with other options"
        in run(folder, "submit", "sft", "--script", "other.sbatch", "--nodes", "2").stderr
    )


def test_help_and_dry_run_import_nothing_heavy(folder: Path) -> None:
    heavy = ["torch", "transformers", "ray", "vllm", "datasets", "numpy", "pyarrow", "submitit"]
    for arguments in (["--help"], [*SFT, "--dry-run"]):
        code = "\n".join(
            [
                f"import sys; sys.argv = {['hpc-rl', *arguments]!r}",
                "from hpc_rl import cli",
                "try: cli.main()",
                "except SystemExit as left: assert not left.code",
                f"print('HEAVY', [name for name in {heavy!r} if name in sys.modules])",
            ]
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.stdout.splitlines()[-1] == "HEAVY []", done.stderr


def test_a_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    words = ["model.path=~/model", "data.train_files=~/train.jsonl", "data.train_batch_size=4"]
    run(folder, "render", "sft", "--job-name", "mine", *words)
    settings = (folder / "runs" / "mine" / "config.yaml").read_text()
    assert f"path: {folder}/model\n" in settings and f"- {folder}/train.jsonl\n" in settings


def test_submissions_at_once_get_names_of_their_own(folder: Path) -> None:
    command = [sys.executable, "-m", "hpc_rl.cli", "render", "torchrun", "--", "train.jsonl"]
    running = [subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    scripts = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert len({line for script in scripts for line in script.splitlines() if "HPC_RL_RUN_DIR=" in line}) == 4


def test_after_needs_a_job(folder: Path) -> None:
    run(folder, "render", *SFT[1:2], *SFT[3:], "--job-name", "rendered")
    done = run(folder, "submit", *SFT[1:2], *SFT[3:], "--dry-run", "--after", "rendered")
    assert done.returncode == 2 and "run rendered has no Slurm job" in done.stderr
    done = run(folder, "render", *SFT[1:2], *SFT[3:], "--after", "rendered")
    assert done.returncode == 2 and "render does not accept --after" in done.stderr


def test_a_program_may_have_an_equals_sign(folder: Path) -> None:
    (folder / "lr=3").mkdir()
    (folder / "lr=3" / "train.py").write_text("")
    done = run(folder, "submit", "torchrun", "--dry-run", "slurm.account=me", "--", "lr=3/train.py", "--x", "y=1")
    assert "lr=3/train.py --x y=1 &" in done.stdout and "--account=me" in done.stdout


def test_an_encoding_that_lacks_a_character_shows_a_question_mark(folder: Path) -> None:
    (folder / "runs" / "done").mkdir(parents=True)
    (folder / "runs" / "done" / "job.sbatch").write_text("")
    losses = "".join(
        json.dumps({"step": step, "total_steps": 8, "train/loss": 1 / step}) + "\n" for step in range(1, 9)
    )
    (folder / "runs" / "done" / "metrics.jsonl").write_text(losses)
    command = [sys.executable, "-m", "hpc_rl.cli", "watch", "done", "--once"]
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    shown = subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=600, check=False)
    assert b"Traceback" not in shown.stderr and b"loss" in shown.stdout and b"????" in shown.stdout, shown.stderr
