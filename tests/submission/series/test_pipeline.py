import grp
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hpc_rl.cli import app
from hpc_rl.config.compose import compose, dump
from hpc_rl.config.groups import choices
from hpc_rl.config.kinds import piped
from hpc_rl.config.pipeline import expand, file_of_pipeline, load_pipeline
from hpc_rl.errors import UnclearError, UserError
from hpc_rl.submission.series import chain, pipeline
from hpc_rl.submission.series.pipeline import PipelineRequest
from tests.fake_slurm import calls, fake_slurm
from tests.submission.series.test_chain import FIRST, SECOND, folder  # noqa: F401 - a fixture
from tests.submission.series.test_chain import plan as chain_plan

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
    asked = PipelineRequest(
        file, ["model=model", "b.optim.lr=0.5"], {"trainer.nnodes": 2, "slurm.time": "10:00"}, rounds=2
    )
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
        PipelineRequest(file, ["model=model", "b.trainer.nnodes=5", "a.trainer.nnodes=4"], {"trainer.nnodes": 2})
    )
    configs: list[Any] = [job.config for job in planned.jobs]
    assert [config.trainer.nnodes for config in configs] == [4, 5]


def test_the_record_lists_rounds_and_stages(tmp_path: Path, file: str) -> None:
    planned = pipeline.plan(PipelineRequest(file, ["model=model"], name="mine"))
    planned.folder.path.mkdir(parents=True)
    pipeline.prepare(planned)
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
            "'word' is not an option: write NAME=VALUE for a value of the pipeline, or STAGE.KEY=VALUE for an",
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
        pipeline.plan(PipelineRequest(file, words))
    assert said in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_pipeline_is_not_submitted_twice(tmp_path: Path, file: str) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    with pytest.raises(UserError, match="resume it with hpc-rl requeue mine"):
        pipeline.plan(PipelineRequest(file, ["model=model"], name="mine"))


def test_the_folder_is_shared_with_the_group(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(tmp_path, monkeypatch)
    group = grp.getgrgid(os.getgid()).gr_name
    planned = pipeline.plan(PipelineRequest(file, ["model=model"], {"slurm.group": group}, name="mine"))
    assert pipeline.submit(planned) == ["7", "7"]
    for path in (planned.folder.path, *(run.path for run in planned.folder.runs())):
        assert path.stat().st_mode & 0o7777 == 0o2750, path


@pytest.mark.parametrize(("fails", "stays"), [("exit 124", True), ("echo no >&2; exit 1", False)])
@pytest.mark.parametrize("is_chain", [True, False])
def test_the_files_stay_if_a_stage_may_be_queued(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch, fails: str, stays: bool, is_chain: bool
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "sbatch.fails").write_text(f'if [ -e "$0.first" ]; then {fails}; fi; touch "$0.first"')
    with pytest.raises(UserError) as found:
        if is_chain:
            chain.submit([job for job, _ in chain_plan(f"{FIRST} -- {SECOND}")[0]])
        else:
            pipeline.submit(pipeline.plan(PipelineRequest(file, ["model=model"], rounds=1)))
    assert isinstance(found.value, UnclearError) == stays == ("squeue --me" in str(found.value))
    assert calls(tmp_path)[-1] == "scancel 7", "the stage before it"
    scripts = list((tmp_path / "runs").rglob("job.sbatch")) if stays else []
    assert len(scripts) == 2 * stays and (tmp_path / "runs").exists() == stays


@pytest.mark.parametrize("is_chain", [True, False])
def test_the_first_error_is_shown_if_the_stages_before_cannot_be_cancelled(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch, is_chain: bool
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "sbatch.fails").write_text('if [ -e "$0.first" ]; then exit 124; fi; touch "$0.first"')
    (programs / "scancel.fails").write_text("echo no answer >&2; exit 1")
    with pytest.raises(UserError, match=r"(?s)squeue --me.*\njobs 7 were queued .*: cancel them with scancel 7$"):
        if is_chain:
            chain.submit([job for job, _ in chain_plan(f"{FIRST} -- {SECOND}")[0]])
        else:
            pipeline.submit(pipeline.plan(PipelineRequest(file, ["model=model"], rounds=1)))
    assert len(list((tmp_path / "runs").rglob("job.sbatch"))) == 2, "the jobs need them"


def test_a_later_stage_can_use_what_the_first_one_waits_for(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "squeue.text").write_text("5|RUNNING|node1|None|\n")
    select = tmp_path / "runs" / "select-1"
    select.mkdir(parents=True)
    (select / "job.json").write_text(json.dumps({"job_id": "5", "kind": "select"}))
    words = ["model=model", "b.data.train_files=runs/select-1/selected.jsonl"]
    planned = pipeline.plan(PipelineRequest(file, words, after="select-1"))
    after = [job.after for job in planned.jobs]
    assert after[0] is not None and after[0].job_ids == ("5",)
    assert after[1] is not None and after[1].coming == {select / "selected.jsonl", planned.jobs[0].run_dir.model}


def completed(planned: pipeline.PlannedPipeline) -> None:
    """The folder, with the first stage as a local run leaves it."""
    planned.folder.path.mkdir(parents=True)
    pipeline.prepare(planned)
    run = planned.jobs[0].run_dir
    run.path.mkdir()
    run.config.write_text(dump(planned.jobs[0].config))
    run.write_status("local-1", 1, "COMPLETED", 0)


def test_a_local_pipeline_is_continued_with_the_same_settings(file: str) -> None:
    words = ["model=model"]
    completed(pipeline.plan(PipelineRequest(file, words, name="mine", local=True)))
    for again in (
        PipelineRequest(file, words, name="mine", local=True, rounds=2),
        PipelineRequest(file, words, {"slurm.time": "10:00"}, name="mine", local=True),
        PipelineRequest(file, [*words, "b.optim.lr=0.5"], name="mine", local=True),  # this stage has not run
    ):
        assert pipeline.plan(again).folder.name == "mine"
    with pytest.raises(UserError) as error:
        pipeline.plan(PipelineRequest(file, [*words, "a.optim.lr=0.5"], name="mine", local=True))
    assert "stage mine_1-a has completed with other settings (optim.lr: 1e-05 -> 0.5): " in str(error.value)


def test_a_local_pipeline_is_continued_by_a_version_with_more_options(file: str) -> None:
    asked = PipelineRequest(file, ["model=model"], name="mine", local=True)
    planned = pipeline.plan(asked)
    completed(planned)
    config = planned.jobs[0].run_dir.config
    tree = yaml.safe_load(config.read_text())
    del tree["trainer"]["hang_timeout_s"]
    config.write_text(yaml.safe_dump(tree))
    assert pipeline.plan(asked).folder.name == "mine"


def test_fewer_rounds_leave_the_later_ones_in_the_record(file: str) -> None:
    completed(pipeline.plan(PipelineRequest(file, ["model=model"], name="mine", local=True, rounds=3)))
    fewer = pipeline.plan(PipelineRequest(file, ["model=model"], name="mine", local=True, rounds=1))
    pipeline.prepare(fewer)
    assert [one["round"] for one in fewer.folder.values()] == ["1", "1", "2", "2", "3", "3"]


def test_a_local_pipeline_is_not_put_into_another_folder(tmp_path: Path, file: str) -> None:
    said = "runs/mine exists, and is not this pipeline: choose another --job-name"
    (tmp_path / "runs/mine").mkdir(parents=True)
    with pytest.raises(UserError, match=said):
        pipeline.plan(PipelineRequest(file, ["model=model"], name="mine", local=True))
    (tmp_path / "runs/mine/pipeline.json").write_text(json.dumps({"stages": [{"round": "1", "stage": "b"}]}))
    with pytest.raises(UserError, match=said):
        pipeline.plan(PipelineRequest(file, ["model=model"], name="mine", local=True))


def test_a_local_pipeline_waits_for_no_job(file: str) -> None:
    with pytest.raises(UserError, match="--local starts immediately: leave out --after"):
        pipeline.plan(PipelineRequest(file, ["model=model"], after="7", local=True))


PAGE = Path(__file__).parents[3] / "docs" / "pipelines.md"
FILES = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", FILES)
def test_the_files_of_the_page_are_pipelines(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    found = load_pipeline(str(tmp_path / "mine.yaml"))
    given = {name: f"given-{name}.jsonl" for name, value in found.values.items() if value is None}
    for stage in expand(found, given, found.rounds, tmp_path / "mine"):
        compose(stage.kind, settings={"trainer.device": "cpu", **stage.options})


def test_the_page_has_a_file_with_each_kind_of_stage() -> None:
    kinds = {stage["kind"] for text in FILES for stage in yaml.safe_load(text)["stages"].values()}
    before = {stage["kind"] for text in FILES for stage in yaml.safe_load(text).get("before", {}).values()}
    assert kinds | before == set(piped())


def test_a_shipped_pipeline_is_shown_with_its_path() -> None:
    for name in choices("pipeline"):
        done = CliRunner().invoke(app, ["chain", "--show", name])
        path = file_of_pipeline(name)
        assert done.exit_code == 0 and done.stdout == path.read_text() and str(path) in done.stderr
    done = CliRunner().invoke(app, ["chain", "--show", "iterativ-dpo"])
    assert "did you mean iterative-dpo?" in str(done.exception)
