"""The table of jobs that run on a GPU and on CPUs: its options, and what it concludes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import gpu_jobs
from benchmarks.first_gpus import first_gpus
from benchmarks.gpu_jobs import AGREEMENT, JOBS, LOSS, Result, difference, last_line, row, verdict
from hpc_rl.errors import UserError
from tests.commands import understand


@pytest.mark.parametrize("name", JOBS)
def test_every_job_has_options_that_exist(name: str) -> None:
    understand(f"hpc-rl submit {JOBS[name].options} model.path=model")


def result(*losses: float, code: int | None = 0, last: str = "") -> Result:
    return Result(code, [{LOSS: loss} for loss in losses], last)


def sampled(agreement: float) -> Result:
    return Result(0, [{AGREEMENT: 0.0}, {AGREEMENT: agreement}])


def test_losses_are_compared_in_every_step() -> None:
    assert difference([2.0, 1.0, 0.5], [2.0, 1.01, 0.5]) == pytest.approx(0.005)
    assert difference([], [1.0]) is None and difference([1.0], []) is None
    assert difference([2.0], [2.0, 1.0]) == math.inf


def test_a_row_has_the_last_losses_and_their_difference() -> None:
    results = {("sft", "cuda"): result(4.0, 2.02), ("sft", "cpu"): result(4.0, 2.0)}
    assert row("sft", results) == ["2.0200", "2.0000", "0.50%", "", "passed"]
    results["sft", "cuda"] = result(4.0, 2.05)
    assert row("sft", results)[-1] == "losses differ by more than 1%"


def test_a_job_that_cannot_run_on_cpus_is_compared_with_plain_training() -> None:
    results = {("sft-liger", "cuda"): result(4.0, 2.0), ("sft", "cpu"): result(4.0, 3.0)}
    assert row("sft-liger", results)[-1] == "losses differ by more than 1%"


def test_weights_in_4_bits_are_compared_with_adapters_on_whole_weights() -> None:
    others = {("sft", "cpu"): result(4.0, 3.0), ("sft-lora", "cpu"): result(4.0, 2.0)}
    assert row("sft-qlora", {("sft-qlora", "cuda"): result(4.02, 2.01), **others})[-1] == "passed"


def test_engine_and_trainer_have_to_agree() -> None:
    assert row("grpo-hf", {("grpo-hf", "cuda"): sampled(1e-5)}) == ["", "", "", "1.0e-05", "passed"]
    assert row("grpo-hf", {("grpo-hf", "cuda"): sampled(3e-5)})[-1] == "probabilities differ by more than 2e-05"


def test_what_was_not_compared_has_not_passed() -> None:
    nothing = "nothing to compare with"
    assert row("sft", {("sft", "cuda"): result(4.0)})[-1] == nothing
    assert row("sft", {("sft", "cuda"): result(), ("sft", "cpu"): result(4.0)})[-1] == nothing
    assert row("grpo-vllm", {("grpo-vllm", "cuda"): result()})[-1] == nothing
    assert row("sft-liger", {})[-1] == "left out: no liger_kernel"
    assert row("generate-vllm", {("generate-vllm", "cuda"): result()})[-1] == "passed"


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (result(code=None), "longer than 600 s on cuda"),
        (result(code=2, last="hpc-rl: no GPU"), "exit code 2 on cuda: hpc-rl: no GPU"),
    ],
)
def test_a_job_that_does_not_end_well_has_its_last_line(ended: Result, expected: str) -> None:
    assert verdict("sft", {"cuda": ended}, None, None) == expected


def test_the_last_line_of_an_output() -> None:
    assert last_line("first\nlast\n\n") == "last"
    assert last_line("\n") == "no output"


def test_a_loss_that_is_not_a_number_fails() -> None:
    assert verdict("sft", {"cuda": result(1.0)}, math.nan, None) == "losses differ by more than 1%"


def test_the_data_fits_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_jobs, "STEPS", 1)
    gpu_jobs.prepare(tmp_path)
    ended = gpu_jobs.run(tmp_path, "dpo", "cpu")
    assert ended.code == 0, ended.last_line
    assert ended.series(LOSS) == pytest.approx([math.log(2)], abs=1e-4)


def test_the_first_gpus(tmp_path: Path) -> None:
    assert first_gpus(2, {"CUDA_VISIBLE_DEVICES": "3,5,6"}) == "3,5"
    with pytest.raises(UserError, match=r"GPUS=4: this shell may use 3 GPUs of type cuda"):
        first_gpus(4, {"CUDA_VISIBLE_DEVICES": "3,5,6"})
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: A'\n")
    smi.chmod(0o755)
    assert first_gpus(2, {"PATH": str(tmp_path)}) == "0,1"
    with pytest.raises(UserError, match="this shell may use 0 GPUs of type cuda"):
        first_gpus(1, {"PATH": str(tmp_path / "none")})
