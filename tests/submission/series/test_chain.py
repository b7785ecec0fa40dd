import json
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_rl.cli.sweep import _split_stages, _stage
from hpc_rl.errors import UserError
from hpc_rl.submission.job import Job
from hpc_rl.submission.series import chain
from tests.bad_files import safetensors

CHAT = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
FIRST = "sft model.path=model data.train_files=train.jsonl trainer.device=cpu data.train_batch_size=1"
SECOND = "sft data.train_files=train.jsonl trainer.device=cpu data.train_batch_size=1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With as much of a model as a login node looks at."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (model / "model.safetensors").write_bytes(safetensors())
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "train.jsonl").write_text(json.dumps(CHAT) + "\n")
    return tmp_path


def plan(line: str) -> tuple[list[tuple[Job, str]], list[str]]:
    return chain.plan([_stage(words, local=False) for words in _split_stages(line.split())])


def test_each_stage_trains_the_model_of_the_one_before(folder: Path) -> None:
    stages, notes = plan(f"{FIRST} --nodes 2 -- {SECOND} --time 1:00:00 -- {SECOND} --job-name last")
    jobs, scripts = [job for job, _ in stages], [script for _, script in stages]
    assert [job.run_dir.name for job in jobs] == ["sft-1", "sft-2", "last"]
    assert "path: model\n" in str(jobs[0].settings)
    for before, job in pairwise(jobs):
        assert f"path: {before.run_dir.model}\n" in str(job.settings)
        assert job.after is not None and job.after.target == str(before.run_dir.path)
    assert "--nodes=2\n" in scripts[0] and "--nodes=1\n" in scripts[1]
    assert "--time=1:00:00\n" in scripts[1] and "--time" not in scripts[0]
    assert notes == []
    assert not (folder / "runs").exists()


def test_stages_without_options_need_no_separator() -> None:
    assert _split_stages(["sft", "ppo"]) == [["sft"], ["ppo"]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (FIRST, "a chain needs at least two stages"),
        (f"{FIRST} --", "a stage is empty"),
        (f"{FIRST} -- {FIRST}", "stage 2 (sft) trains the model of stage 1: leave out model.path"),
        (f"{FIRST} -- torchrun", "stage 2 is torchrun: a chain is made of sft, dpo, rm, distill, ppo"),
        (f"{FIRST} -- {SECOND} --after sft-7", "stage 2 (sft) starts after stage 1: leave out --after"),
        (f"{FIRST} trainer.export=false -- {SECOND}", "stage 1 (sft) exports no model"),
        (
            f"{FIRST} model.lora.rank=2 model.lora.merge=false -- {SECOND}",
            "stage 2 (sft): model.path is the result of sft-1 (sft), which exports only adapters: leave out its",
        ),
        (
            f"rm{FIRST.removeprefix('sft')} -- {SECOND}",
            "stage 2 (sft): model.path is the result of rm-1 (rm), a reward model, and a language model is needed",
        ),
        (f"{FIRST} --job-name x -- {SECOND} --job-name x", "two stages have the same run directory"),
        (f"{FIRST} -- {SECOND} --dry-run", "--dry-run is not an option of a stage"),
        (f"{FIRST} -- {SECOND} data.train_files=none.jsonl", "none.jsonl: no such data file"),
        (f"{FIRST.replace('path=model', 'path=./none')} -- {SECOND}", "model.path ./none: there is no such folder"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_made(folder: Path, line: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        plan(line)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("runtime", "said"), [("pyxis", "does not work with --local"), ("auto", "no apptainer and no singularity on PATH")]
)
def test_an_image_that_this_machine_cannot_run_is_said_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, said: str
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    requests = [
        _stage(f"{line} container.runtime={runtime} --image image".split(), local=True) for line in (FIRST, SECOND)
    ]
    with pytest.raises(UserError, match=said):
        chain.plan(requests, local=True)


def test_a_local_chain_waits_for_no_job() -> None:
    requests = [_stage(line.split(), local=True) for line in (f"{FIRST} --after 7", SECOND)]
    with pytest.raises(UserError, match="--local starts immediately: leave out --after"):
        chain.plan(requests, local=True)


def test_a_message_completes_the_command_of_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sft", "trainer.device=cpu", "--", "sft"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/hpc-rl", "chain", *words])
    with pytest.raises(UserError) as caught:
        chain.plan([_stage(each, local=False) for each in _split_stages(words)])
    command = str(caught.value).splitlines()[-1].strip()
    assert command.startswith("hpc-rl submit sft trainer.device=cpu model=") and "--" not in command.split()
