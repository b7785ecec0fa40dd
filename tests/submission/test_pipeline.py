import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_rl.errors import UserError
from hpc_rl.submission import pipeline
from hpc_rl.submission.pipeline import Asked
from tests.submission.test_chain import folder  # noqa: F401 - a fixture

OPTIONS = {"trainer.device": "cpu", "data.train_batch_size": 1, "data.train_files": "@data", "model.path": "@model"}
TREE: dict[str, Any] = {
    "values": {"model": None, "data": "train.jsonl"},
    "stages": {
        "a": {"kind": "sft", "options": {**OPTIONS, "trainer.seed": "@round"}, "becomes": "model"},
        "b": {"kind": "sft", "options": {**OPTIONS, "trainer": {"nnodes": 3}}, "becomes": "model"},
    },
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "loop.yaml").write_text(yaml.safe_dump(TREE))
    return "loop.yaml"


def test_each_stage_is_a_job_after_the_one_before(tmp_path: Path, file: str) -> None:
    asked = Asked(file, ["model=model", "b.optim.lr=0.5"], {"trainer.nnodes": 2, "slurm.time": "10:00"}, rounds=2)
    planned = pipeline.plan(asked)
    assert [job.run_dir.path.relative_to(tmp_path) for job in planned.jobs] == [
        Path(f"runs/loop-1/loop-1_{name}") for name in ("1-a", "1-b", "2-a", "2-b")
    ]
    configs: list[Any] = [job.config for job in planned.jobs]
    assert [config.trainer.seed for config in configs] == [1, 1, 2, 1]
    assert [config.trainer.nnodes for config in configs] == [2, 3, 2, 3], "the file takes precedence over flags"
    assert [config.optim.lr for config in configs] == [1e-5, 0.5, 1e-5, 0.5]
    models = [config.model.path for config in configs]
    assert models == ["model", *(str(job.run_dir.model) for job in planned.jobs[:-1])]
    assert planned.jobs[0].after is None
    for number, job in enumerate(planned.jobs[1:], 1):
        assert job.after is not None
        assert job.after.target == str(planned.jobs[number - 1].run_dir.path)
        assert job.after.coming == {before.run_dir.model for before in planned.jobs[:number]}
    assert all("--time=10:00\n" in script for script in planned.scripts)
    assert not (tmp_path / "runs").exists()


def test_an_option_of_the_command_line_replaces_that_of_the_file_and_the_flag(file: str) -> None:
    planned = pipeline.plan(
        Asked(file, ["model=model", "b.trainer.nnodes=5", "a.trainer.nnodes=4"], {"trainer.nnodes": 2})
    )
    configs: list[Any] = [job.config for job in planned.jobs]
    assert [config.trainer.nnodes for config in configs] == [4, 5]


def test_the_record_lists_rounds_and_stages(tmp_path: Path, file: str) -> None:
    planned = pipeline.plan(Asked(file, ["model=model"], name="mine"))
    planned.folder.path.mkdir(parents=True)
    pipeline.write_record(planned)
    assert planned.folder.values() == [{"round": "1", "stage": "a"}, {"round": "1", "stage": "b"}]
    assert planned.folder.runs() == [job.run_dir for job in planned.jobs]
    assert "submitted" in json.loads((tmp_path / "runs/mine/pipeline.json").read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=./gone"], "model.path ./gone: there is no such folder"),
        (["model=model", "data=gone.jsonl"], "gone.jsonl: no such data file"),
        (["model=model", "b.optim.lr=-1"], "stage b: "),
        (["model=model", "b.trainer.export=false"], "stage b exports no model: leave out trainer.export=false"),
        (
            ["model=model", "word"],
            "'word' is not an option: write VALUE=..., or STAGE.KEY=... for an option of a stage",
        ),
        (["model=model", "data=[x"], "data=[x: the value cannot be read as YAML"),
        (
            ["model=model", "c.optim.lr=1"],
            "c.optim.lr: the pipeline has no such value or stage; its values are data, model",
        ),
    ],
)
def test_mistakes_are_said_before_anything_is_made(tmp_path: Path, file: str, words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        pipeline.plan(Asked(file, words))
    assert said in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_pipeline_is_not_submitted_twice(tmp_path: Path, file: str) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    with pytest.raises(UserError, match="resume it with hpc-rl requeue mine"):
        pipeline.plan(Asked(file, ["model=model"], name="mine"))
