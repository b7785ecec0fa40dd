import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from hpc_rl.cli.submit import SlurmFlags
from hpc_rl.config.compose import compose, dump, load_config
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.run_sets import SweepDir
from hpc_rl.submission.edits import edited_since
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.render import bash_word, directive_word, render, support_text, write_support
from hpc_rl.submission.series.sweep import array_script
from tests.helpers import write_python_program
from tests.small_disk import needs_root, small_disk

GOLDEN = Path(__file__).parents[2] / "golden"
NASTY = "a b'c\"d$HOME`id`;e\\f\n#SBATCH --uid=0\n!{x}*?~%j\té"
# Shrinking a failure would run bash and shellcheck for minutes.
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
anything = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))


def without_variables(text: str) -> str:
    """Return a text in which no variable is replaced, or missed."""
    return re.sub(r"\$(?=\w)", "$ ", text)


one_line = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1)

# In place of Slurm: a step that writes down what it was given; bash and what it is to do runs as it stands.
FAKE_SRUN = """\
import json, os, sys
if "bash" in sys.argv:
    os.execvp("bash", sys.argv[sys.argv.index("bash"):])
keys = [key for key in os.environ if key.startswith(("HPC_RL", "MY_"))]
seen = {"argv": sys.argv[1:], "env": {key: os.environ[key] for key in keys}, "cwd": os.getcwd()}
json.dump(seen, open(os.environ["SEEN"], "w"))
os.environ["STEP"] and os.execvp("bash", ["bash", "-c", os.environ["STEP"]])
sys.exit(int(os.environ.get("STEP_EXITS", 0)))
"""

# The controller's clock and its record of the job are given by the test; the calls are written down.
SCONTROL = """#!/bin/bash
case "$*" in
  "show config") echo "Configuration data as of ${CONTROLLER_TIME:-1795280000}"; echo "KillWait = 30 sec" ;;
  requeue*) echo "$*" >> "$SEEN.scontrol"; [ -z "${REFUSED:-}" ] || { touch "$SEEN.refused"; exit 1; } ;;
  "show job --oneliner 7"*) [ ! -e "$SEEN.refused" ] || JOB=$REFUSED
    echo "JobId=7 JobName=x JobState=${JOB_STATE:-RUNNING} ${JOB:-}" ;;
  *) echo "$*" >> "$SEEN.scontrol" ;;
esac
"""


def torchrun_job(run_dir: Path, *program: str, **flags: Any) -> Job:
    config = compose("torchrun", [], {"slurm.python": "/usr/bin/python3", **flags})
    return Job("torchrun", config, RunDir(run_dir), Path("/"), program or ("train.py",))


def run_script(
    job: Job, tmp: Path, exits: int = 0, step: str = "", first: str = ""
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the rendered script with bash, with a fake srun and scontrol on PATH.

    Args:
        exits: the step's exit code.
        step: bash for it to run instead.
        first: lines of bash before the script.
    """
    programs = tmp / "bin"
    programs.mkdir(exist_ok=True)
    commands = {
        "scontrol": SCONTROL,
        "squeue": '#!/bin/sh\n[ "$SLURM_TIME_FORMAT $*" = "%s --noheader --jobs=7 --format=%e" ] && echo 1795290000\n',
    }
    for name, text in commands.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    write_python_program(programs / "srun", FAKE_SRUN, "-SE")
    job.run_dir.path.mkdir(parents=True, exist_ok=True)
    job.run_dir.support.write_text(support_text())
    if job.settings is not None and not job.run_dir.config.exists():
        job.run_dir.config.write_text(job.settings)
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        **{"SEEN": str(tmp / "seen.json"), "STEP_EXITS": str(exits), "STEP": step, "TMPDIR": str(tmp / "tmp")},
        **{"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "1"},
    }
    done = subprocess.run(
        ["bash"], input=first + render(job), env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    seen = tmp / "seen.json"
    return done, json.loads(seen.read_text()) if seen.exists() else {}


def check_shell(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=600)
    if shutil.which("shellcheck"):
        result = subprocess.run(
            ["shellcheck", "-"], input=script, text=True, capture_output=True, timeout=600, check=False
        )
        assert result.returncode == 0, result.stdout


GOLDEN_SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"model.path": "/models/qwen", "data.train_files": ["train.jsonl"]},
    "dpo": {"model.path": "/models/qwen", "data.train_files": ["pairs.jsonl"], "ref.path": "/models/reference"},
    "rm": {"model.path": "/models/qwen", "data.train_files": ["pairs.jsonl"], "data.margin_key": "margin"},
    "distill": {"model.path": "/models/qwen", "data.train_files": ["train.jsonl"], "teacher.path": "/models/teacher"},
    "ppo": {"model.path": "/models/qwen", "data.train_files": ["train.jsonl"], "reward.function": "gsm8k"},
    "generate": {"model.path": "/models/qwen", "data.files": ["prompts.jsonl"], "rollout.n": 16},
    "eval": {"model.path": "/models/qwen", "data.files": ["test.jsonl"], "reward.function": "gsm8k"},
    "select": {
        "select.responses": ["runs/generate-1/responses.jsonl"],
        "select.method": "pairs",
        "trainer": {"nnodes": 1, "n_gpus_per_node": 1, "device": "cpu"},  # it is the work of one CPU
    },
    "torchrun": {},
    "ray": {
        "ray_kwargs.ray_init": {"num_cpus": 16},
        "ray_kwargs.timeline_json_file": "time line.json",
        "ray.object_store_gb": 1.5,
        "ray.first_port": 20000,
        "ray.dashboard": True,
    },
    "doctor": {},
    "lend": {"lend.engine_package": "vllm"},
}
PROGRAMS = {
    "lend": ("/scratch/me/runs/math",),
    "torchrun": ("train.py", "--lr", "1e-4"),
    "ray": ("python", "my driver.py", "--lr", "1e-4"),
}


@pytest.mark.parametrize("name", GOLDEN_SETTINGS)
def test_golden(name: str) -> None:
    slurm = {"slurm.python": "/opt/venv/bin/python", "slurm.time": "24:00:00", "slurm.partition": "gpu"}
    slurm |= {"slurm.setup": ["module load cuda"], "slurm.env": {"HF_HOME": "/scratch/my cache"}}
    slurm |= {
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 4,
        "trainer.device": "cuda",
        "slurm.sbatch": {"exclusive": None, "nice": 10},
    }
    config = compose(name, [], {**slurm, **GOLDEN_SETTINGS[name]})
    run_dir = RunDir(Path("/scratch/me/runs/first"))
    script = render(Job(name, config, run_dir, Path("/home/me"), PROGRAMS.get(name, ())))
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()
    check_shell(script)


@given(
    anything,
    anything,
    one_line.filter(lambda t: t not in (".", "..") and "/" not in t and "\\" not in t and len(t.encode()) < 200),
    one_line,
)
@example("a", "=", "b", "c")
@example(NASTY, NASTY, NASTY.replace("\n", " ").replace("\\", "").replace("\t", " ").replace("/", ""), "a;b $c'd")
@settings(max_examples=25, phases=QUICK)
def test_no_value_breaks_out_and_all_arrive(argument: str, variable: str, name: str, job_name: str) -> None:
    variable, job_name = without_variables(variable), without_variables(job_name)
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        job = torchrun_job(
            tmp / name, "train.py", argument, **{"slurm.env": {"MY_VALUE": variable}, "slurm.job_name": job_name}
        )
        check_shell(render(job))
        done, seen = run_script(job, tmp)
        assert done.returncode == 0, done.stderr
        assert seen["argv"][-2:] == ["train.py", argument]
        assert seen["env"]["MY_VALUE"] == variable
        assert seen["env"]["HPC_RL_RUN_DIR"] == str(tmp / name)


@given(anything.filter(lambda text: text.strip() and not text.startswith("~")))  # `~name` is a home folder
@example("1e100")
@example(NASTY)
@settings(max_examples=15, phases=QUICK)
def test_the_configuration_arrives_intact(text: str) -> None:
    text = without_variables(text)
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        values = {"model.path": text, "data.train_files": [text], "slurm.env": {"MY_TEXT": text}}
        config = compose("sft", [], {**values, "slurm.python": "/usr/bin/python3"})
        job = Job("sft", config, RunDir(tmp / "run"), Path("/"))
        done, _ = run_script(job, tmp)
        assert done.returncode == 0, done.stderr
        assert load_config("sft", job.run_dir.config) == config


@given(anything)
@example(NASTY)
@settings(max_examples=60, phases=QUICK)
def test_a_bash_word_is_one_line_and_has_its_value(text: str) -> None:
    word = bash_word(text)
    assert "\n" not in word
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True, timeout=600)
    assert done.stdout.decode() == text


def test_a_directive_holds_one_line_only() -> None:
    assert directive_word("a b#c'd") == '"a b#c\'d"'
    assert directive_word('a"b\\c') == r'"a\"b\\c"'
    assert directive_word("gpu:a100:4") == "gpu:a100:4"
    with pytest.raises(UserError, match="line break"):
        directive_word("a\n#SBATCH --uid=0")


def test_the_steps_exit_code_is_the_scripts(tmp_path: Path) -> None:
    job = torchrun_job(tmp_path / "run")
    done, _ = run_script(job, tmp_path, exits=3)
    assert done.returncode == 3
    status = json.loads(job.run_dir.status.read_text())
    assert status == {"job_id": "7", "attempt": 1, "state": "FAILED", "exit_code": 3}


@pytest.mark.parametrize(
    ("first", "left_s"),
    [
        ("", 10_000),  # of the controller, although the clock of this node is another one
        ("export SLURM_JOB_END_TIME=1795280099\n", 99),
        ('squeue() { echo Unknown; }; timeout() { shift; "$@"; }  # no limit\n', None),
        ("timeout() { return 1; }  # Slurm does not answer\n", None),
    ],
)
def test_the_trainers_learn_when_the_walltime_ends(tmp_path: Path, first: str, left_s: int | None) -> None:
    before = int(time.time())
    done, seen = run_script(torchrun_job(tmp_path / "run"), tmp_path, first=first)
    end = seen["env"]["HPC_RL_JOB_END"]
    assert done.returncode == 0
    if left_s is None:
        assert end == ""
    else:
        assert before + left_s <= int(end) <= time.time() + left_s


def test_without_the_controllers_clock_both_are_taken_to_agree(tmp_path: Path) -> None:
    first = "export SLURM_JOB_END_TIME=1795280099; timeout() { return 1; }\n"
    _, seen = run_script(torchrun_job(tmp_path / "run"), tmp_path, first=first)
    assert seen["env"]["HPC_RL_JOB_END"] == "1795280099"


def ray_job(run_dir: Path) -> Job:
    config = compose("ray", [], {"slurm.python": "/usr/bin/python3"})
    return Job("ray", config, RunDir(run_dir), Path("/"), ("python", "driver.py", "a b;$HOME"))


def test_a_ray_job_that_fails_is_swept_and_its_code_kept(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    left, other = tmp_path / "tmp" / f"{os.getuid()}.7.0", tmp_path / "tmp" / f"{os.getuid()}.77.0"
    for exits, swept in ((75, False), (3, True)):
        left.mkdir(exist_ok=True)
        other.mkdir(exist_ok=True)
        done, seen = run_script(ray_job(tmp_path / "run"), tmp_path, exits=exits)
        assert (done.returncode, left.exists(), other.exists()) == (exits, not swept, True), done.stderr
        assert seen["argv"][-3:] == ["python", "driver.py", "a b;$HOME"]


AGREED = "echo 137 > $HPC_RL_ATTEMPT_DIR/.outcome"


def test_a_ray_job_does_not_wait_for_a_node_that_is_gone(tmp_path: Path) -> None:
    began = time.monotonic()
    done, _ = run_script(
        ray_job(tmp_path / "run"), tmp_path, step=f"{AGREED}; echo node2 > $HPC_RL_ATTEMPT_DIR/.lost; exec sleep 1000"
    )
    assert done.returncode == 137 and time.monotonic() - began < 600
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 137


@pytest.mark.parametrize("job", [torchrun_job, ray_job])
def test_the_exit_code_is_the_one_on_which_the_nodes_agreed(tmp_path: Path, job: Callable[[Path], Job]) -> None:
    done, _ = run_script(job(tmp_path / "run"), tmp_path, step=f"{AGREED}; exit 143")
    assert (done.returncode, "srun" in done.stderr) == (137, False), done.stderr


@pytest.mark.parametrize(
    ("step", "code", "said"),
    [
        (
            "kill -KILL $$",
            137,
            "hpc-rl: srun, or a node entry that it started, was ended by signal 9 before the nodes of the job had "
            "agreed on its end",
        ),
        ("exit 127", 127, "hpc-rl: srun ended with exit code 127 before the nodes of the job had agreed on its end"),
        ("exit 2", 2, ""),
    ],
)
def test_how_srun_ended_is_reported_without_an_outcome(tmp_path: Path, step: str, code: int, said: str) -> None:
    done, _ = run_script(torchrun_job(tmp_path / "run"), tmp_path, step=step)
    assert done.returncode == code and [line for line in done.stderr.splitlines() if "hpc-rl" in line] == [said] * bool(
        said
    )


@pytest.mark.parametrize(("sign", "code"), [("", 1), ('touch "$HPC_RL_ATTEMPT_DIR/.node0.here"; ', 3)])
def test_a_step_that_does_not_begin_is_ended_with_a_sentence(tmp_path: Path, sign: str, code: int) -> None:
    job = torchrun_job(tmp_path / "run", **{"slurm.start_timeout_s": 1})
    done, _ = run_script(job, tmp_path, step=f"{sign}sleep 5; exit 3" if sign else "exec sleep 600")
    assert done.returncode == code, done.stderr
    said = "hpc-rl: srun has started no task within 1 s (slurm.start_timeout_s). Another job step may hold the nodes"
    assert (said in done.stderr) == (not sign)


def test_a_deleted_attempt_is_not_replaced(tmp_path: Path) -> None:
    job = torchrun_job(tmp_path / "run")
    for name in ("attempt-2", "attempt-9", "attempt-10", "attempt-old", "attempt-08"):
        (job.run_dir.path / name).mkdir(parents=True)
    run_script(job, tmp_path)
    assert json.loads(job.run_dir.status.read_text())["attempt"] == 11
    assert job.run_dir.next_attempt().name == "attempt-12"


def test_the_end_of_the_walltime_moves_if_the_job_was_suspended(tmp_path: Path) -> None:
    """The clock jumps while the script waits for its step."""
    end = tmp_path / "run/attempt-1/.job-end"
    step = f"for i in {{1..600}}; do [ -e {end} ] && break; sleep 0.1; done"
    first = "export SLURM_JOB_END_TIME=1795280099 CONTROLLER_TIME=$(date +%s)\n"
    jumps = "sleep() { command sleep 0.1; SECONDS=$((SECONDS + 11)); }\n"
    run_script(torchrun_job(tmp_path / "run"), tmp_path, step=step, first=first + jumps)
    assert abs(int(end.read_text()) - 1795290000) <= 2
    end.unlink()
    steady = "sleep() { command sleep 0.1; SECONDS=$((before - 1000)); }\n"  # however slow this machine is
    run_script(torchrun_job(tmp_path / "other"), tmp_path, step="sleep 1", first=first + steady)
    assert not (tmp_path / "other/attempt-1/.job-end").exists()


def test_each_start_is_an_attempt_and_forgets_an_old_warning(tmp_path: Path) -> None:
    job = torchrun_job(tmp_path / "run")
    run_script(job, tmp_path)
    job.run_dir.stop.write_text("walltime\n")
    run_script(job, tmp_path)
    assert [path.name for path in job.run_dir.attempts()] == ["attempt-1", "attempt-2"]
    assert not job.run_dir.stop.exists()


@needs_root
def test_a_full_disk_is_found_before_anything_starts(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        job = torchrun_job(disk.path / "run")
        job.run_dir.path.mkdir()
        disk.fill(leave_bytes=500_000)
        done, seen = run_script(job, tmp_path)
        assert (done.returncode, seen) == (2, {})
        last = done.stderr.splitlines()[-1]
        assert "cannot write 1 MB into the run directory" in last and f"(free space and inodes: {disk.path}" in last
        assert not job.run_dir.attempts() and not list(job.run_dir.path.glob(".probe*"))


@needs_root
def test_a_disk_that_fills_up_does_not_stop_the_clean_up(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", inodes=60) as disk:
        job = torchrun_job(disk.path / "run", **{"slurm.epilogue": ["touch /dev/shm/$MARK"]})
        done, _ = run_script(
            job,
            tmp_path,
            step=f"for i in {{1..99}}; do touch {disk.path}/$i; done; exit 3",
            first=f"export MARK={disk.path.parent.name}\n",
        )
        assert done.returncode == 3
    mark = Path("/dev/shm") / disk.path.parent.name
    assert mark.exists()  # the commands at the end did run
    mark.unlink()


def test_each_attempt_takes_the_settings_that_config_yaml_has_then(tmp_path: Path) -> None:
    config = compose("sft", ["model.path=m", "data.train_files=t.jsonl"], {"slurm.python": "/usr/bin/python3"})
    job = Job("sft", config, RunDir(tmp_path / "run"), Path("/"))
    run, first = job.run_dir, dump(config)
    done, seen = run_script(job, tmp_path)
    assert done.returncode == 0 and str(run.path / "attempt-1" / "config.yaml") in " ".join(seen["argv"])
    run.config.write_text(first + "# mine\n")
    assert edited_since(run) == run.path / "attempt-1"
    run_script(job, tmp_path)
    assert [(path / "config.yaml").read_text() for path in run.attempts()] == [first, first + "# mine\n"]
    assert edited_since(run) is None and run.attempt_with_settings(run.path / "attempt-2") == run.path / "attempt-1"


def test_settings_that_are_missing_or_a_link_end_the_job_before_its_step(tmp_path: Path) -> None:
    config = compose("sft", ["model.path=m", "data.train_files=t.jsonl"], {"slurm.python": "/usr/bin/python3"})
    job = Job("sft", config, RunDir(tmp_path / "run"), Path("/"))
    job.run_dir.path.mkdir()
    (tmp_path / "other.yaml").write_text(dump(config))
    job.run_dir.config.symlink_to(tmp_path / "other.yaml")
    done, seen = run_script(job, tmp_path)
    assert (done.returncode, seen) == (2, {}) and f"finds no file {job.run_dir.config} with the settings" in done.stderr


def test_a_missing_python_or_folder_is_one_line(tmp_path: Path) -> None:
    done, seen = run_script(torchrun_job(tmp_path / "run", **{"slurm.python": "/no/python"}), tmp_path)
    assert (done.returncode, seen) == (2, {})
    assert done.stderr.strip().endswith("has no /no/python (slurm.python)")


def test_a_template_in_the_working_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm_templates").mkdir()
    own = tmp_path / "slurm_templates" / "torchrun.sbatch.j2"
    own.write_text("#!/bin/bash\n# mine\ntrue {{ program }}\n")
    assert render(torchrun_job(tmp_path / "run")) == "#!/bin/bash\n# mine\ntrue train.py\n"
    (tmp_path / "slurm_templates" / "further.j2").write_text("# further")  # not the name of a shipped one
    own.write_text("#!/bin/bash\n{% include 'further.j2' %}\n")
    assert render(torchrun_job(tmp_path / "run")).splitlines() == ["#!/bin/bash", "# further"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n{% if %}\n", "line 2"),
        ("a\nb\n{{ nonsense }}\n", "line 3: 'nonsense' is undefined"),
        ("{{ run_dir | upperr }}", "line 1"),
        ("#!/bin/bash\n{{ warning_s + 'x' }}\n", "line 2: unsupported operand"),
    ],
)
def test_a_broken_template_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm_templates").mkdir()
    (tmp_path / "slurm_templates" / "torchrun.sbatch.j2").write_text(text)
    with pytest.raises(UserError, match=r"torchrun\.sbatch\.j2") as caught:
        render(torchrun_job(tmp_path / "run"))
    assert said in str(caught.value)


def test_a_script_is_short_and_complete() -> None:
    """What users read and edit: at most 90 lines without the settings of a trainer."""
    script = (GOLDEN / "torchrun.sbatch").read_text()
    assert len(script.splitlines()) <= 90
    check_shell(support_text())


@pytest.mark.parametrize(("kept", "refused"), [("", True), ("old\n", False), ("older\n", True)])
def test_a_script_of_another_version_keeps_its_functions(tmp_path: Path, kept: str, refused: bool) -> None:
    own = tmp_path / "support.sh"
    script = render(torchrun_job(tmp_path / "run"))
    write_support(script, own)
    assert own.read_text() == support_text()
    own.write_text(kept)
    other = script.replace(hashlib.sha256(support_text().encode()).hexdigest(), hashlib.sha256(b"old\n").hexdigest())
    assert other != script
    if refused:
        with pytest.raises(UserError, match=r"rendered by another version of hpc-rl, and .*support\.sh is not that"):
            write_support(other, own)
    else:
        write_support(other, own)
    assert own.read_text() == kept
    write_support("#!/bin/bash\n", own)  # a template of the user
    assert own.read_text() == kept


def test_a_run_directory_with_a_backslash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="backslash"):
        render(torchrun_job(tmp_path / "a\\b"))


def test_a_second_job_in_the_run_directory_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    job = torchrun_job(tmp_path / "run")
    job.run_dir.path.mkdir()
    with (job.run_dir.path / ".lock").open("a+") as lock:
        lock.write("6\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, seen = run_script(job, tmp_path)
        assert (done.returncode, seen) == (2, {})
        assert "finds job 6 running in" in done.stderr
        assert [path.name for path in sorted(job.run_dir.path.iterdir())] == [".lock", "support.sh"]
        lock.write("7\n")  # a lock that outlived an earlier attempt of this very job
        lock.flush()
        assert run_script(job, tmp_path)[0].returncode == 0


def test_gpus_in_the_clusters_own_way_replace_ours(tmp_path: Path) -> None:
    assert "#SBATCH --gpus-per-node=1\n" in render(torchrun_job(tmp_path / "run"))
    typed = render(torchrun_job(tmp_path / "run", **{"slurm.sbatch": {"gres": "gpu:a100:4", "cpus-per-gpu": 8}}))
    assert "#SBATCH --gres=gpu:a100:4\n" in typed and "gpus-per-node" not in typed and "cpus-per-task=" not in typed


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["--ntasks-per-node=1"]),
        ({"slurm.task_option": "ntasks"}, ["--ntasks=2"]),
        ({"slurm.task_option": "both"}, ["--ntasks-per-node=1", "--ntasks=2"]),
        ({"slurm.task_option": "both", "slurm.gpu_option": "gpus-per-task"}, ["--ntasks-per-node=1", "--ntasks=2"]),
    ],
)
def test_tasks_are_requested_as_the_cluster_expects(
    tmp_path: Path, settings: dict[str, str], expected: list[str]
) -> None:
    script = render(torchrun_job(tmp_path / "run", **{"trainer.nnodes": 2, **settings}))
    assert [line.removeprefix("#SBATCH ") for line in script.splitlines() if "SBATCH --ntasks" in line] == expected


def test_a_script_can_have_a_login_shell(tmp_path: Path) -> None:
    script = render(torchrun_job(tmp_path / "run", **{"slurm.login_shell": True}))
    assert script.startswith("#!/bin/bash -l\n# run: torchrun")
    array = array_script(SweepDir(tmp_path / "s"), "torchrun", [script], None)
    assert array.startswith("#!/bin/bash -l\n") and "exec bash -l " in array
    script = render(torchrun_job(tmp_path / "run"))
    array = array_script(SweepDir(tmp_path / "s"), "torchrun", [script], None)
    assert script.startswith("#!/bin/bash\n#") and array.startswith("#!/bin/bash\n#") and "bash -l" not in array


def test_an_option_without_a_value_is_null_on_the_command_line_too() -> None:
    found = SlurmFlags(sbatch=["hold=null", "--nice=10", "exclusive"]).settings()
    assert found == {"slurm.sbatch.hold": None, "slurm.sbatch.nice": "10", "slurm.sbatch.exclusive": None}
