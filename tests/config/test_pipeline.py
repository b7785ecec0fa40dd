from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_rl.config.pipeline import PipelineConfig, PlannedStage, expand, load_pipeline
from hpc_rl.errors import UserError

FOLDER = Path("/runs/loop")
TWO: dict[str, Any] = {
    "values": {"model": None, "data": "train.jsonl"},
    "rounds": 2,
    "before": {"first": {"kind": "sft", "options": {"model.path": "@model", "trainer.seed": "@round"}}},
    "stages": {
        "pairs": {"kind": "dpo", "options": {"model": {"path": "@model"}, "data.train_files": ["@data", "x@y"]}},
        "train": {"kind": "sft", "options": {"model.path": "@pairs", "trainer.seed": "@round"}, "becomes": "model"},
    },
}


def planned(tree: dict[str, Any], given: dict[str, Any] | None = None, rounds: int = 2) -> list[PlannedStage]:
    return expand(PipelineConfig.model_validate(tree), {"model": "base"} if given is None else given, rounds, FOLDER)


def test_references_are_values_results_and_the_round() -> None:
    found = planned(TWO)
    assert [(stage.round, stage.name, stage.kind) for stage in found] == [
        (0, "first", "sft"),
        (1, "pairs", "dpo"),
        (1, "train", "sft"),
        (2, "pairs", "dpo"),
        (2, "train", "sft"),
    ]
    options = [stage.options for stage in found]
    assert options[0] == {"model.path": "base", "trainer.seed": 0}
    assert options[1] == {"model.path": "base", "data.train_files": ["train.jsonl", "x@y"]}
    assert options[2] == {"model.path": "/runs/loop/loop_1-pairs/model", "trainer.seed": 1}
    assert options[3]["model.path"] == "/runs/loop/loop_1-train/model", "the first round's result became the model"
    assert options[4] == {"model.path": "/runs/loop/loop_2-pairs/model", "trainer.seed": 2}
    assert found[-1].result == Path("/runs/loop/loop_2-train/model")


def test_values_of_the_command_line_replace_those_of_the_file_and_rounds_are_counted() -> None:
    found = planned(TWO, {"model": "m", "data": ["a", "b"]}, rounds=1)
    assert len(found) == 3
    assert found[1].options["data.train_files"] == [["a", "b"], "x@y"]


def changed(**changes: Any) -> dict[str, Any]:
    return {**TWO, **changes}


@pytest.mark.parametrize(
    ("tree", "given", "said"),
    [
        (TWO, {}, "model: required, but not given; write model=VALUE"),
        (
            TWO,
            {"model": "m", "modle": 1},
            "modle: the pipeline has no such value or stage; its values are model, data; its stages, for "
            "STAGE.KEY=VALUE, are first, pairs, train; did you mean model?",
        ),
        (
            TWO,
            {"model": "m", "trian.optim.lr": 1},
            "trian.optim.lr: the pipeline has no such value or stage; its values are model, data; its stages, for "
            "STAGE.KEY=VALUE, are first, pairs, train; did you mean train.optim.lr?",
        ),
        (
            changed(stages={"one": {"kind": "sft", "options": {"model.path": "@later"}}, "later": {"kind": "sft"}}),
            {"model": "m"},
            "stage one needs @later, but no earlier stage and no value has this name; there are @model, @data, @first, "
            "@round",
        ),
    ],
)
def test_what_is_missing_is_said(tree: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        planned(tree, given)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": {}}, "stages: Dictionary should have at least 1 item"),
        ({"stages": {"One_1": {"kind": "sft"}}}, "stage 'One_1': use lower-case letters, digits and single hyphens"),
        ({"stages": {"one": {"kind": "ray"}}}, "stage one: there is no kind 'ray' for stages; choose one of sft, dpo"),
        (
            {"stages": {"one": {"kind": "sft", "becomes": "x"}}},
            "stage one: becomes x, which is none of the values: data",
        ),
        ({"values": {"round": 1, "model": 1}}, "round is a value and also the number of the round: rename it"),
        ({"values": {"train": 1, "model": 1}}, "train is a value and also a stage: rename it"),
        ({"rounds": 0}, "rounds: Input should be greater than or equal to 1"),
        ({"extra": 0}, "extra: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_is_no_pipeline(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**TWO, **changes}))
    with pytest.raises(UserError) as error:
        load_pipeline(str(file))
    assert f"{file}: {said}" in str(error.value)


def test_a_name_is_a_file_of_the_project_or_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/pipeline").mkdir(parents=True)
    (tmp_path / "configs/pipeline/mine.yaml").write_text(yaml.safe_dump(TWO))
    assert load_pipeline("mine").rounds == 2
    for name in ("iterative-dpo", "rejection-sampling", "reward-model"):
        assert load_pipeline(name).description
    said = r"there is no pipeline or kind 'yours': choose one of .* the kinds sft, dpo, rm, distill, ppo$"
    with pytest.raises(UserError, match=said):
        load_pipeline("yours")
    with pytest.raises(UserError, match=r"no configuration at yours\.yaml: No such file"):
        load_pipeline("yours.yaml")


def test_files_with_weights_may_be_results() -> None:
    options = {"model.path": "@model", "data": {"train_files": {"@first": 0.75, "old.jsonl": 0.25}}}
    tree = changed(stages={"train": {"kind": "sft", "options": options}})
    found = planned(tree, {"model": "m"})
    first, train = found[:2]
    assert train.options["data.train_files"] == {str(first.result): 0.75, "old.jsonl": 0.25}
    options["data"] = {"train_files": {"@data": 1.0}}
    with pytest.raises(UserError, match="stage train: @data stands for several files, and a weight needs one file"):
        planned(tree, {"model": "m", "data": ["a", "b"]})
