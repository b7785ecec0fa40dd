"""Variables in values mean the same in a profile, a job file, overrides, flags and `--run-dir`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rl.config.compose import compose, compose_partly
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.references import expanded, expanded_path
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.submission.request import JobRequest, typed_run_dir


@pytest.fixture(autouse=True)
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("NOWHERE", raising=False)


FORMS = ["$SCRATCH/x", "${SCRATCH}/x", "${oc.env:SCRATCH}/x", "${oc.env:NOWHERE,/scratch/me}/x"]


def from_layer(layer: str, key: str, text: str, folder: Path) -> object:
    """Set a key of `sft` in one of the layers, and return the value that the job gets."""
    needed = ["model.path=m", "data.train_files=d.jsonl"]
    words: list[str] = []
    options: dict[str, dict[str, object]] = {}
    if layer == "override":
        words = [f"{key}={text}"]
    elif layer == "job file":
        section, _, name = key.partition(".")
        (folder / "configs").mkdir(exist_ok=True)
        (folder / "configs/sft.yaml").write_text(f"{section}:\n  {name}: '{text}'\n")
    else:
        options = {"site" if layer == "profile" else "settings": {key: text}}
    found: object = compose("sft", [*needed, *words], **options)  # type: ignore[arg-type]
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


@pytest.mark.parametrize("layer", ["profile", "job file", "override", "flag"])
@pytest.mark.parametrize("text", FORMS)
def test_each_layer_replaces_the_same_forms(tmp_path: Path, layer: str, text: str) -> None:
    if layer == "job file" and text.startswith("${SCRATCH}"):  # for Hydra, a reference to another key
        with pytest.raises(UserError, match="SCRATCH"):
            from_layer(layer, "cache.hf_home", text, tmp_path)
    else:
        assert from_layer(layer, "cache.hf_home", text, tmp_path) == "/scratch/me/x"
    assert from_layer(layer, "slurm.python", "~/x", tmp_path) == "/home/me/x"


@pytest.mark.parametrize("layer", ["profile", "override", "flag"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$NOWHERE/x", "$NOWHERE is not set in this shell"),
        ("${NOWHERE}/x", "$NOWHERE is not set in this shell"),
        ("${oc.env:NOWHERE}/x", "$NOWHERE is not set in this shell"),
        ("/local/$SLURM_JOB_ID", "$SLURM_JOB_ID is set in the job only"),
        ("${model.path}/x", "only the forms ${NAME} and ${oc.env:NAME}"),
        ("${x", "unfinished"),
    ],
)
def test_what_cannot_be_replaced_is_refused_by_its_key(tmp_path: Path, layer: str, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        from_layer(layer, "cache.hf_home", text, tmp_path)
    assert str(caught.value).startswith("cache.hf_home: ") and said in str(caught.value)


@pytest.mark.parametrize("text", ["$NOWHERE/x", "${oc.env:NOWHERE}/x"])
def test_a_job_file_is_refused_too(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="NOWHERE"):
        from_layer("job file", "cache.hf_home", text, tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "slurm.partition", "slurm.account", "slurm.proxy", "slurm.sbatch.comment", "slurm.env.A", "container.image",
        "model.tokenizer_path", "cache.data_dir", "slurm.interface", "data.chat_template",
    ],
)  # fmt: skip
def test_paths_lines_and_variables_of_the_job_follow_the_rule(tmp_path: Path, key: str) -> None:
    assert from_layer("profile", key, "a$SCRATCH", tmp_path) == "a/scratch/me"
    with pytest.raises(UserError, match=rf"{key}: \$NOWHERE"):
        from_layer("flag", key, "a$NOWHERE", tmp_path)


def test_every_path_and_line_of_every_kind_is_marked() -> None:
    """A new option of these types is covered: its type carries the mark."""
    from hpc_rl.config.keys import documented_keys
    from hpc_rl.config.references import _is_marked

    for kind in KINDS.values():
        named = {key for key, *_ in documented_keys(kind.schema)}
        paths = {key for key in named if key.rpartition(".")[2] in ("path", "image", "python", "hf_home", "data_dir")}
        assert {key for key in paths if not _is_marked(kind.schema, key)} <= {"container.python"}


def test_lists_and_tables_of_files(tmp_path: Path) -> None:
    found = compose("sft", ["model.path=m", "data.train_files=[$SCRATCH/a.jsonl,b.jsonl]"])
    assert found.data.train_files == ["/scratch/me/a.jsonl", "b.jsonl"]  # type: ignore[attr-defined]
    weighted = {"data.train_files": {"$SCRATCH/a.jsonl": 0.5, "b.jsonl": 0.5}}
    assert compose("sft", ["model.path=m"], weighted).data.train_files == {  # type: ignore[attr-defined]
        "/scratch/me/a.jsonl": 0.5,
        "b.jsonl": 0.5,
    }
    own = compose("ppo", ["model.path=m", "data.train_files=d", "reward.function=$SCRATCH/r.py:f"])
    assert own.reward.function == "/scratch/me/r.py:f"  # type: ignore[attr-defined]


def test_bash_keeps_its_own_variables() -> None:
    lines = ["export TMPDIR=/local/$SLURM_JOB_ID", "cd ${NOWHERE:-/}"]
    assert compose("torchrun", settings={"slurm.setup": lines, "slurm.epilogue": lines}).slurm.epilogue == lines


def test_a_variable_of_the_job_is_pointed_to_the_set_up() -> None:
    with pytest.raises(UserError, match=r"add to slurm\.setup: export TMPDIR="):
        compose("torchrun", settings={"slurm.env.TMPDIR": "/local/$SLURM_JOB_ID"})


def test_other_text_keeps_its_dollars() -> None:
    found = compose("sft", ["model.path=m", "data.train_files=d", "trainer.project_name=costs $5 or $NOWHERE"])
    assert found.trainer.project_name == "costs $5 or $NOWHERE"  # type: ignore[attr-defined]
    assert expanded("a$5$", {}) == "a$5$"


def test_what_is_shown_is_what_a_job_gets() -> None:
    found, missing = compose_partly("torchrun", ["cache.hf_home=$SCRATCH/x"])
    assert (found.cache.hf_home, missing) == ("/scratch/me/x", [])


def test_run_directories(tmp_path: Path) -> None:
    assert typed_run_dir(JobRequest("sft")) is None
    assert typed_run_dir(JobRequest("sft", run_dir=Path("~/$SCRATCH"))) == Path("/home/me/scratch/me")
    with pytest.raises(UserError, match=r"--run-dir: \$NOWHERE is not set"):
        typed_run_dir(JobRequest("sft", run_dir=Path("$NOWHERE/x")))
    assert expanded_path("~/x", {}) == "/home/me/x"
    with pytest.raises(ValueError, match="no such home folder"):
        expanded_path("~nobody-of-this-name/x")


@pytest.mark.parametrize("option", ["--run-dir=$NOWHERE/x", "--run-dir=${NOWHERE}", "--run-dir=$SLURM_JOB_ID"])
def test_a_folder_with_a_literal_dollar_is_never_made(tmp_path: Path, option: str) -> None:
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "hpc_rl.cli", "render", "torchrun", "trainer.device=cpu", option, "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and "$" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    command[command.index(option)] = f"--run-dir=~/{tmp_path.name}"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert RunDir(tmp_path / tmp_path.name).script.is_file()
