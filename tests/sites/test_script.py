"""The effect of a profile on the job script, which is run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.run_dir import RunDir
from hpc_rl.sites.profile import load_profile, shipped_names
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.render import render
from tests.submission.script.test_render import check_shell, run_script, torchrun_job

GOLDEN = Path(__file__).parents[1] / "golden" / "site"
SHIPPED = shipped_names()


@pytest.mark.parametrize("name", SHIPPED)
def test_golden_script_of_a_shipped_profile(name: str) -> None:
    settings = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2, "slurm.python": "/opt/venv/bin/python"}
    config = compose("torchrun", [], settings, load_profile(name, environ={}).values)
    script = render(Job("torchrun", config, RunDir(Path("/scratch/me/runs/first")), Path("/home/me"), ("train.py",)))
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()
    check_shell(script)


# Environment Modules 3 (module.c, init/bash): an error is printed, and the exit code is that of `eval` without a text.
MODULES_3 = """\
module() {
  case $1 in
    use) [ -d "$2" ] && export MODULEPATH="$2:$MODULEPATH" ;;
    load | swap)
      shift
      for name; do
        case $name in
          none*) echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for '$name'" >&2 ;;
          warns) echo "WARNING: this version has known errors" >&2; LOADEDMODULES=$LOADEDMODULES:warns/1.0 ;;
          fails) return 1 ;;
          *) LOADEDMODULES=$LOADEDMODULES:$name/1.0 ;;
        esac
      done ;;
  esac
  echo "module $*"
  eval ""
}
MODULEPATH= LOADEDMODULES=
"""


def with_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **slurm: list[str]) -> tuple[Any, dict[str, Any]]:
    """Run a job's script where `module` is defined as on many clusters."""
    init = tmp_path / "modules" / "init" / "bash"
    init.parent.mkdir(parents=True, exist_ok=True)
    init.write_text(MODULES_3)
    with_home = f"export MODULESHOME={tmp_path}/modules\n"
    monkeypatch.setattr("tests.submission.script.test_render.render", lambda job: with_home + render(job))
    job = torchrun_job(tmp_path / "run", **{f"slurm.{key}": value for key, value in slurm.items()})
    return run_script(job, tmp_path)


def test_modules_are_loaded_before_the_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, seen = with_modules(tmp_path, monkeypatch, modules=["cuda/12.4", "a b"], setup=["echo setup"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == ["module cuda/12.4", "module a b", "setup"]
    assert seen["argv"][-1] == "train.py"


def test_folders_of_modules_are_added_before_modules_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path)]
    done, _ = with_modules(tmp_path, monkeypatch, module_paths=paths, modules=["cuda"], setup=["echo $MODULEPATH"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [f"module use {tmp_path}", "module cuda", f"{tmp_path}:"]


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"modules": ["fails"]}, "module load fails (slurm.modules): failed with exit code 1."),
        ({"modules": ["cuda", "none"]}, "module load none (slurm.modules): failed with exit code 1."),
        ({"module_paths": ["/nowhere"]}, "module use /nowhere (slurm.module_paths): failed with exit code 1 at: ["),
        ({"setup": ["module load cuda none"]}, "module load cuda none (slurm.setup): failed with exit code 1."),
        ({"setup": ["module swap cuda none"]}, "module swap cuda none (slurm.setup): failed with exit code 1."),
        ({"setup": ["ml() { module load $1; }", "ml none && true"]}, "ml none && true (slurm.setup): failed"),
        ({"setup": ["source $MODULESHOME/init/bash; module load none || exit"]}, "at: module load none || exit"),
        ({"setup": ["module load none || true"]}, None),
        ({"setup": ["module load warns", "module swap a b", "module purge"], "modules": ["warns"]}, None),
    ],
    ids=str,
)  # fmt: skip
def test_a_module_that_is_not_loaded_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: dict[str, list[str]], said: str | None
) -> None:
    done, seen = with_modules(tmp_path, monkeypatch, **slurm)
    assert (done.returncode, bool(seen)) == ((2, False) if said else (0, True)), done.stderr
    assert (said or "") in done.stderr


def test_programs_of_the_set_up_and_what_follows_have_the_modules_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = ["source $MODULESHOME/init/bash; export -f module", "bash -c 'module load set-up'"]
    epilogue = ["bash -c 'module load epilogue'", "declare -F", "declare -f module"]
    done, _ = with_modules(tmp_path, monkeypatch, setup=setup, epilogue=epilogue)
    assert done.returncode == 0, done.stderr
    assert "module set-up" in done.stdout and "module epilogue" in done.stdout
    assert "declare -fx module" in done.stdout and "unwatched_module" not in done.stdout


def test_code_of_others_counts_by_its_exit_code_alone(tmp_path: Path) -> None:
    """As `conda shell.bash hook` and `activate` do: commands inside fail, and nothing is wrong."""
    (tmp_path / "hook").write_text("false\nconda() { false; [ $2 != missing ]; }\ntrue\n")
    setup = [f"source {tmp_path}/hook", f'eval "$(sed 1d {tmp_path}/hook)"', "conda activate rl"]
    done, seen = run_script(torchrun_job(tmp_path / "run", **{"slurm.setup": setup}), tmp_path)
    assert (done.returncode, bool(seen)) == (0, True), done.stderr
    (tmp_path / "seen.json").unlink()
    job = torchrun_job(tmp_path / "run", **{"slurm.setup": [*setup[:2], "conda activate missing"]})
    done, seen = run_script(job, tmp_path)
    assert (done.returncode, seen) == (2, {})
    assert "conda activate missing (slurm.setup): failed with exit code 1" in done.stderr


def test_a_set_up_that_activates_another_python_is_reported(tmp_path: Path) -> None:
    job = torchrun_job(tmp_path / "run", **{"slurm.setup": ["export VIRTUAL_ENV=/envs/rl"]})
    done, _ = run_script(job, tmp_path)
    said = "hpc-rl: the set-up activates /envs/rl, but the job runs with /usr/bin/python3: set slurm.python to choose\n"
    assert (done.returncode, done.stderr) == (0, said)
    job = torchrun_job(tmp_path / "run", **{"slurm.setup": ["export VIRTUAL_ENV=/usr"]})
    done, _ = run_script(job, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_its_support_file_a_script_does_not_run(tmp_path: Path) -> None:
    job = torchrun_job(tmp_path / "run")
    for command in ("rm", "echo 'touch ran' >>", "ln -sf /dev/null"):
        done, seen = run_script(job, tmp_path, first=f"{command} {job.run_dir.support}\n")
        assert (done.returncode, seen) == (2, {})
        assert f"finds that {job.run_dir.support} is missing or is not the file that was written" in done.stderr
        assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "ran").exists()
        job.run_dir.support.unlink(missing_ok=True)


def test_functions_that_the_set_up_defines_replace_none_of_the_scripts(tmp_path: Path) -> None:
    names = ("report", "finish", "warn", "terminate", "is_latest", "begin_attempt", "begin_step", "end_job", "requeue")
    setup = [f"{name}() {{ exit 3; }}" for name in names]
    done, seen = run_script(torchrun_job(tmp_path / "run", **{"slurm.setup": setup}), tmp_path)
    assert (done.returncode, bool(seen)) == (0, True), done.stderr


@pytest.mark.parametrize("exits", [0, 3])
def test_the_epilogue_runs_however_the_job_ends_and_changes_nothing(tmp_path: Path, exits: int) -> None:
    lines = ["echo left with $code$not_set", "false", "exit 9"]
    job = torchrun_job(tmp_path / "run", **{"slurm.epilogue": lines})
    done, _ = run_script(job, tmp_path, exits=exits)
    assert done.returncode == exits
    assert done.stdout.count(f"left with {exits}\n") == 1
    assert json.loads(job.run_dir.status.read_text())["exit_code"] == exits


def test_the_epilogue_runs_before_a_requeue(tmp_path: Path) -> None:
    job = torchrun_job(tmp_path / "run", **{"slurm.epilogue": ["echo left with $code", "exit 9"]})
    done, _ = run_script(job, tmp_path, step='echo walltime > "$HPC_RL_RUN_DIR/stop"; exit 75')
    assert done.returncode == 75
    assert done.stdout.splitlines() == ["hpc-rl: stopped before the walltime; job 7 is queued again", "left with 75"]
    assert json.loads(job.run_dir.status.read_text())["state"] == "REQUEUED"


# Each of these lines fails without ending bash: what the message has to contain.
FAILING = {
    "cd /nowhere && true": "cd /nowhere && true (slurm.setup): failed with exit code 1. Correct the line",
    "missing_program sync": "missing_program sync (slurm.setup): failed with exit code 127.",
    "source /nowhere/env.sh": "source /nowhere/env.sh (slurm.setup): failed",
    "cd /nowhere; true": "cd /nowhere (slurm.setup): failed",
    "cd /nowhere && true; export X=1": "cd /nowhere && true (slurm.setup): failed",
    "[ -d / ] && cd /nowhere && true": "failed with exit code 1",
    "missing_program | cat": "missing_program | cat (slurm.setup): failed with exit code 127",
    "(cd /nowhere; true)": "(cd /nowhere; true) (slurm.setup): failed",
    "{ cd /nowhere; true; }": "{ cd /nowhere; true; } (slurm.setup): failed",
    "export X=$(missing_program)": "export X=$(missing_program) (slurm.setup): failed with exit code 127",
    'eval "$(missing_program hook)"': "failed with exit code 127",
    "source <(missing_program hook)": "failed with exit code 127",
    "for f in $(missing_program); do echo $f; done": "failed with exit code 127",
    "if true; then\n  cd /nowhere\n  true\nfi": "failed with exit code 1",
    "prepare() { cd /nowhere; true; }\nprepare": "prepare (slurm.setup): failed with exit code 1 at: cd /nowhere",
    "function prepare { cd /nowhere && true; }\nprepare": "prepare (slurm.setup): failed",
    "for i in 1 2; do\n  false\ndone": "failed with exit code 1",
    "! true": "! true (slurm.setup): failed",
    "[ -d /nowhere ]": "[ -d /nowhere ] (slurm.setup): failed",
    "exit 0": "ended with exit code 0 before the job step, at: exit 0 (slurm.setup)",
    "cd /nowhere || exit 5": "ended with exit code 5 before the job step, at: cd /nowhere || exit 5",
    "set -e; false": "false (slurm.setup): failed",
    "set -u\necho $NOT_SET": "ended with exit code 1 before the job step, at: echo $NOT_SET",
    "echo ${NOT_SET:?no}": "before the job step, at: echo ${NOT_SET:?no}",
    "readonly A=1\nA=2": "A=2 (slurm.setup): failed",
    "return 0": "return 0 (slurm.setup): failed",
    "cat <<EOF | missing_program\ntext\nEOF": "failed with exit code 127",
    "export UID=5": "export UID=5 (slurm.setup): failed",
    "trap - ERR DEBUG\ncd /nowhere && true": "cd /nowhere && true (slurm.setup): failed",
}
PASSING = [
    "[ -d /nowhere ] && cd /nowhere",
    "[[ a == b ]] && false",
    "command -v missing_program > /dev/null && missing_program",
    "grep -q nothing /dev/null && false",
    "missing_program || true",
    "if ! missing_program; then :; fi",
    "X=$(missing_program) || X=1",
    'if [ "$(missing_program | wc -l)" -gt 0 ]; then false; fi',
    "yes | head -n 1",
    "for d in /nowhere /; do [ -d $d ] && cd $d; done",
    "echo \"a; b\" 'c; d' e\\; f",
    "case x in x) echo a; echo b ;; esac; echo c # d; e",
    "cat <<'EOF'\nfalse; a && b\nEOF",
    "export A=1 \\\n  B=2",
    "f() {\n  local x\n  x=1\n}\nf",
    "set +e\ntrue",
]


@pytest.mark.parametrize("lines", FAILING)
def test_a_step_of_the_set_up_that_fails_ends_the_job(tmp_path: Path, lines: str) -> None:
    after = tmp_path / "after"
    job = torchrun_job(tmp_path / "run", **{"slurm.setup": ["true", lines, f"touch {after}"]})
    done, seen = run_script(job, tmp_path)
    assert (done.returncode, seen, after.exists()) == (2, {}, False), done.stderr
    assert FAILING[lines] in done.stderr
    assert done.stderr.count("hpc-rl:") == 1
    assert not list(Path("/tmp").glob(f"{os.getuid()}.7.setup.*"))


@pytest.mark.parametrize("lines", PASSING)
def test_what_a_line_handles_itself_is_no_failure(tmp_path: Path, lines: str) -> None:
    job = torchrun_job(tmp_path / "run", **{"slurm.setup": lines.split("\n"), "slurm.env": {"MY_SET_UP": "done"}})
    done, seen = run_script(job, tmp_path)
    assert (done.returncode, seen.get("env", {}).get("MY_SET_UP")) == (0, "done"), done.stderr
    assert "hpc-rl:" not in done.stderr
