"""Names that are no path here: mistakes are told from names on the hub, before the hub is asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.errors import UserError
from hpc_rl.submission.hub import hub_cache
from hpc_rl.submission.preflight import hub_names
from hpc_rl.submission.preflight.data import check_train_data
from hpc_rl.submission.preflight.hub_names import refuse_mistyped
from hpc_rl.submission.preflight.model import check_model_path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(
        hub_names, "hub_problem", lambda name, kind: "" if name.startswith("owner/") else "HUB LACKS IT"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "openai-cookbook").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dta", "there is no such path here; did you mean data? "),
        ("dta/train", "there is no such path here; did you mean data/train? "),
        ("data/trian", "the folder data has no such file or folder; did you mean data/train.jsonl? "),
        ("data/train", "the folder data has no such file or folder; did you mean data/train.jsonl? "),
        ("data/gsm8k", "the folder data has no such file or folder; it has train.jsonl. "),
    ],
)
def test_a_name_like_one_here_is_a_mistake(name: str, hint: str) -> None:
    with pytest.raises(UserError) as found:
        refuse_mistyped(f"data set {name}", name, folders_only=False)
    assert str(found.value) == f"data set {name}: {hint}If it is a name on the hub: hpc-rl fetch {name}"


@pytest.mark.parametrize("name", ["gsm8k", "openai/gsm8k", "squad"])
def test_a_name_like_none_here_may_be_on_the_hub(name: str) -> None:
    refuse_mistyped(name, name, folders_only=False)


def test_a_file_is_not_suggested_for_a_folder(folder: Path) -> None:
    (folder / "modle.txt").touch()
    refuse_mistyped("model.path", "model", folders_only=True)
    with pytest.raises(UserError, match=r"did you mean tiny\?"):
        refuse_mistyped("model.path", "tinny", folders_only=True)


def checked(name: str) -> str | None:
    config = compose("sft", ["model.path=m", f"data.train_files={name}", "trainer.device=cpu"])
    return check_train_data(config.data, frozenset(), hub_cache(config))  # type: ignore[attr-defined]


def test_a_mistyped_data_folder_is_refused_and_a_fetched_data_set_accepted(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data set dta: .*did you mean data\?"):
        checked("dta")
    assert checked("owner/numbers") == "data set owner/numbers is on the hub: the job downloads it"
    prepared = folder / "hf/datasets/dta/default/0.0.0/abc"
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").touch()
    assert checked("dta") is None


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_an_offline_shell_makes_offline_jobs(value: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    place = re.escape(str(folder / "hf" / "datasets"))
    with pytest.raises(UserError, match=rf"not a path here and not in the cache {place}, .* \(HF_HUB_OFFLINE is set\)"):
        checked("owner/numbers")
    config = compose("sft", ["model.path=owner/model", "data.train_files=x"])
    with pytest.raises(UserError, match=r"^model\.path owner/model is not a path here .*HF_HUB_OFFLINE is set"):
        check_model_path("model.path", "owner/model", frozenset(), hub_cache(config))


def test_the_jobs_own_setting_counts_more_than_the_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_cache(compose("torchrun", ["slurm.env.HF_HUB_OFFLINE=0"])).offline == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert hub_cache(compose("torchrun", [])).offline == ""
    assert hub_cache(compose("torchrun", ["cache.offline=true"])).offline == "cache.offline"


@pytest.mark.parametrize(
    ("variables", "models", "data"),
    [
        ({}, "", ""),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set", "HF_HUB_OFFLINE is set"),
        ({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "0"}, "HF_HUB_OFFLINE is set", "HF_HUB_OFFLINE is set"),
        ({"HF_DATASETS_OFFLINE": "on"}, "", "HF_DATASETS_OFFLINE is set"),
        ({"HF_DATASETS_OFFLINE": "0"}, "", ""),
    ],
)
def test_data_sets_have_a_setting_of_their_own(variables: dict[str, str], models: str, data: str) -> None:
    found = hub_cache(compose("torchrun", []), variables)
    assert (found.offline, found.data_offline) == (models, data)


def test_what_is_nowhere_is_refused_and_a_hub_of_the_job_is_not_asked() -> None:
    def model(name: str, *words: str) -> str | None:
        config = compose("sft", [f"model.path={name}", "data.train_files=a", "trainer.device=cpu", *words])
        return check_model_path("model.path", name, frozenset(), hub_cache(config))

    assert model("owner/m") == "model owner/m is on the hub: the job downloads it"
    for name in ("nowhere/model", "gpt2"):
        with pytest.raises(
            UserError, match=f"model.path {name} is not a path here and not in the cache .*, and HUB LACKS"
        ):
            model(name)
    with pytest.raises(UserError, match=r"data set squad is not a path here and not in the cache .*, and HUB LACKS IT"):
        checked("squad")
    assert "is looked up when the job starts" in str(model("nowhere/model", "slurm.env.HF_ENDPOINT=http://mirror"))
