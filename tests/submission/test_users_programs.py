"""Mistakes about other people's programs: each one is a line, before anything is queued."""

import shlex
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.submission.preflight.checks import check
from hpc_rl.submission.request import JobRequest, plan
from hpc_rl.submission.script.render import node_options
from tests.fake_slurm import fake_slurm

SCRIPTS = {"sft.py": "from transformers import Trainer", "fit.py": "import pytorch_lightning as pl"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fake_slurm(tmp_path, monkeypatch)
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(f"{text}\n")
    return tmp_path


def checked(kind: str, program: str, *words: str) -> list[str]:
    return check(plan(JobRequest(kind, ("trainer.device=cpu", *words), tuple(shlex.split(program)))))


@pytest.mark.parametrize(
    ("kind", "program", "words", "line"),
    [
        (
            "torchrun",
            "sft.py",
            ("slurm.adapter=tlr",),
            "slurm.adapter=tlr: there is no such adapter: choose auto, none",
        ),
        ("ray", "python sft.py", ("slurm.adapter=trl",), "TRL .* needs `submit torchrun`, not `submit ray`"),
        ("torchrun", "axolotl train c.yml", (), r"Axolotl \(transformers' Trainer\) needs axolotl, and .* lacks it"),
        ("torchrun", "fit.py", (), "Lightning's Trainer needs pytorch_lightning, and .* lacks it"),
        ("ray", "uv run -m verl.trainer.main_ppo", (), "verl needs verl, and .* lacks it"),
        ("torchrun", "-m axolotl.cli.train --cloud x", (), "--cloud: Axolotl would start trainings or a cluster"),
    ],
)
def test_a_mistake_is_a_line(kind: str, program: str, words: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        checked(kind, program, *words)
    lines = str(refused.value).splitlines()
    assert len(lines) == len({one.partition(":")[0] for one in lines})  # each mistake once


def test_a_program_behind_uv_runs_in_the_python_of_the_job() -> None:
    job = plan(JobRequest("torchrun", ("trainer.device=cpu",), ("uv", "run", "--frozen", "torchrun", "sft.py", "--x")))
    assert (job.program, job.adapter.name) == (("sft.py", "--x"), "transformers")
    own = ("uv", "run", "python", "driver.py")
    assert plan(JobRequest("ray", (), own)).program == own  # without an adapter, it is the user's command


@pytest.mark.parametrize(
    ("program", "words", "limit"),
    [
        ("sft.py", (), ["--hang-timeout", "3600"]),
        ("sft.py", ("trainer.hang_timeout_s=600",), ["--hang-timeout", "600"]),
        ("sft.py", ("trainer.hang_timeout_s=0",), []),
        ("sft.py", ("slurm.adapter=none",), []),  # without heartbeats
        ("loop.py", (), []),
    ],
)
def test_hangs_are_found_if_the_adapter_has_heartbeats(
    folder: Path, program: str, words: tuple[str, ...], limit: list[str]
) -> None:
    (folder / "loop.py").write_text("from accelerate import Accelerator\n")
    options = node_options(plan(JobRequest("torchrun", ("trainer.device=cpu", *words), (program,))))
    at = options.index("--hang-timeout") if "--hang-timeout" in options else len(options)
    assert options[at : at + 2] == limit
