"""The way into an image: options of the runtime, and the script that each node's task runs."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.errors import UserError
from hpc_rl.images.run_options import PASSED, job_binds, passed_names, tokenized_folder, unpacks
from hpc_rl.images.runtimes import RUNTIMES, ContainerRuntime, runtime_of
from hpc_rl.run_dir import TOKENIZED, RunDir
from hpc_rl.submission.job import Job
from hpc_rl.submission.preflight import checks
from hpc_rl.submission.script.render import render, render_container
from tests.fake_apptainer import FakeApptainer, sif_bytes
from tests.submission.script.test_render import GOLDEN, NASTY, check_shell

PWD = Path("/home/me")


def image_job(run_dir: Path, working_dir: Path = Path("/"), kind: str = "torchrun", **flags: Any) -> Job:
    settings = {"container.image": "/images/x.sif", "container.unpack": "never", **flags}
    return Job(kind, compose(kind, [], settings), RunDir(run_dir), working_dir, ("train.py",))


def options_of(**settings: Any) -> list[list[str]]:
    config = image_job(PWD, **settings).config
    return runtime_of(config.container).options(config, PWD, [])


def test_variables_that_configure_the_job_reach_the_image() -> None:
    names = ["TQ_NUM_THREADS", "VLLM_LOGGING_LEVEL", "SGLANG_LOG_MS", "NCCL_DEBUG", "HF_HOME"]
    assert [name for name in names if not any(fnmatchcase(name, pattern) for pattern in PASSED)] == []
    assert not any(fnmatchcase("LD_LIBRARY_PATH", pattern) for pattern in PASSED)


def test_the_key_of_a_server_reaches_the_image() -> None:
    openai = {"rollout.name": "openai", "rollout.openai.base_url": "http://x/v1", "trainer.device": "cpu"}
    needed = {"model.path": "m", "data.files": ["x.jsonl"], "data.prompt_key": "q"}
    with_key = compose("generate", [], {**needed, **openai, "rollout.openai.key_variable": "LLM_API_KEY"})
    assert passed_names(with_key)[-1] == "LLM_API_KEY"
    assert passed_names(compose("generate", [], {**needed, **openai})) == list(PASSED)


def test_exec_options_are_these() -> None:
    settings = {"container.options": ["--nvccli"], "trainer.device": "cuda"}
    config = image_job(PWD, **settings).config
    options = [
        word
        for words in runtime_of(config.container).options(config, PWD, ["/home/me", "/data:/data:ro"])
        for word in words
    ]
    gpu = ["--nvccli", "--nv"]
    bound = ["--bind", "/home/me", "--bind", "/data:/data:ro"]
    assert options == ["--cleanenv", "--no-home", *gpu, "--pwd", "/home/me", *bound]
    amd = options_of(**{"container.gpu": "rocm"})
    assert ["--rocm"] in amd and ["--nv"] not in amd
    cpu = options_of(**{"trainer.device": "cpu"})
    assert cpu == [["--cleanenv"], ["--no-home"], ["--pwd", "/home/me"]]


def test_pyxis_options_are_these() -> None:
    settings = {"container.runtime": "pyxis", "container.image": "registry.example.org#group/image:1"}
    settings |= {"slurm.env": {"MY": "1"}, "container.env": ["LAB", "OUR_*"]}
    pyxis_options = RUNTIMES["pyxis"].srun_options
    assert pyxis_options is not None
    image = settings["container.image"]
    assert pyxis_options(image_job(PWD, **settings).config, image, PWD, ["/home/me", "/a:/b:ro"]) == [
        "--container-image=registry.example.org#group/image:1",
        "--container-mounts=/home/me:/home/me,/a:/b:ro",
        "--container-workdir=/home/me",
        "--no-container-mount-home",
        "--container-env=MY,LAB",
    ]


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("container-torchrun", "torchrun", {"container.unpack": "auto"}),
        (
            "container-pyxis",
            "ray",
            {"container.runtime": "pyxis", "container.image": "registry.example.org#group/image:1"},
        ),
    ],
)
def test_golden(name: str, kind: str, more: dict[str, Any]) -> None:
    settings = {"slurm.time": "24:00:00", "trainer.nnodes": 2, "trainer.n_gpus_per_node": 4, "trainer.device": "cuda"}
    settings |= {"container.binds": ["/scratch/my data:/data:ro"], "container.env": ["LAB_*"], "slurm.env": {"MY": "1"}}
    script = render(image_job(Path("/shared/me/runs/first"), PWD, kind, **settings, **more))
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()
    check_shell(script)


def test_what_the_job_needs_is_bound_once(tmp_path: Path) -> None:
    work, data, real, rewards = (tmp_path / name for name in ("work", "data", "real", "rewards"))
    for folder in (work / "inner", data, real, rewards):
        folder.mkdir(parents=True)
    for file in (data / "train.jsonl", rewards / "score.py"):
        file.write_text("")
    (work / "model").symlink_to(real)
    values = {"data.train_files": [str(data / "train.jsonl"), "inner"], "model.path": "model"}
    values |= {"reward.function": f"{rewards}/score.py:score", "container.binds": ["/scratch"]}
    config = compose("ppo", [], values)
    found = job_binds(config, work / "runs" / "first", work, ("python", str(data)))
    assert found == [str(data), str(real), str(rewards), str(work), "/scratch"]
    mixed = compose("ppo", [], {**values, "data.train_files": {str(data / "train.jsonl"): 0.7, "inner": 0.3}})
    assert str(data / "train.jsonl") in job_binds(mixed, work / "runs" / "first", work)
    (work / "chats").symlink_to(data)
    named = compose("ppo", [], {**values, "data.train_files": {"chats": 0.7, "inner": 0.3}})
    assert str(data) in job_binds(named, work / "runs" / "first", work)
    with pytest.raises(UserError, match="a,b cannot be bound into an image: its path contains a colon or a comma"):
        job_binds(config, work, tmp_path / "a,b")


@pytest.mark.parametrize(
    ("time", "unpack", "wanted"),
    [
        ("0:30:00", "auto", False),
        ("1:00:00", "auto", False),
        ("1:00:01", "auto", True),
        (None, "auto", True),
        ("UNLIMITED", "auto", True),
        ("0:30:00", "always", True),
        (None, "never", False),
    ],
)
def test_long_jobs_want_a_copy(time: str | None, unpack: str, wanted: bool) -> None:
    assert unpacks(image_job(PWD, **{"slurm.time": time, "container.unpack": unpack}).config) is wanted


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"container.binds": ["/a,/b"]}, r"not of the form SRC"),
        ({"container.env": ["A B"]}, "not the name of an environment variable"),
        ({"container.imgae": "x"}, r"did you mean container\.image\?"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        compose("torchrun", [], settings)


def test_a_runtime_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(UserError, match=r"'docker': choose one of auto, apptainer, singularity, pyxis$"):
        checks.check(image_job(PWD, **{"container.runtime": "docker"}))


@pytest.mark.parametrize(("name", "row"), RUNTIMES.items())
def test_rows_of_the_table_are_complete(name: str, row: ContainerRuntime) -> None:
    """A row is called either by container.sh or by srun."""
    assert bool(row.programs) == row.has_script == bool(row.bind and row.workdir and row.env_file)
    assert row.srun_options is not None or row.env_file.endswith((" ", "=")), name


def test_the_login_node_looks_at_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"image /images/x\.sif: no such file"):
        checks.check(image_job(tmp_path / "run", tmp_path))
    (tmp_path / "x.sif").write_bytes(sif_bytes())
    good = {"container.image": "x.sif", "container.arch": "amd64", "container.binds": ["/on/the/nodes"]}
    notes = checks.check(image_job(tmp_path / "run", tmp_path, **good))
    assert "needed on the nodes: /on/the/nodes" in notes[0]
    assert "no apptainer and no singularity on PATH here" in notes[1]
    other = {**good, "container.arch": "arm64"}
    with pytest.raises(UserError, match="is for amd64, but the nodes are arm64"):
        checks.check(image_job(tmp_path / "run", tmp_path, **other))


KEPT = f"hpc-rl-cache-{os.getuid()}"


class Inside:
    """container.sh of a job, with a fake apptainer on PATH."""

    def __init__(self, tmp: Path, **flags: Any) -> None:
        self.tmp = tmp
        (tmp / "x.sif").write_bytes(sif_bytes())
        (tmp / "local").mkdir()
        plain = {name: os.environ[name] for name in ("PATH", "HOME")}
        slurm = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "node[1-2],gpu1"}
        self.fake = FakeApptainer(tmp / "bin", {**plain, **slurm, "TMPDIR": str(tmp / "local"), "SECRET": "no"})
        self.environ = self.fake.environ
        job = image_job(tmp / "run", tmp, **{"container.image": str(tmp / "x.sif"), **flags})
        self.script = tmp / "container.sh"
        self.script.write_text(render_container(job))
        check_shell(self.script.read_text())
        self.command = ["bash", str(self.script), "python3", "-m", "some thing", "a b;$HOME"]

    def run(self, **environ: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command, env={**self.environ, **environ}, capture_output=True, text=True, timeout=600, check=False
        )
        assert {path.name for path in (self.tmp / "local").iterdir()} <= {KEPT}
        return done


def test_the_command_runs_with_a_tmp_of_its_own_and_named_variables_only(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    inside = Inside(tmp_path, **{"slurm.env": {"MY_VALUE": "as exported"}, "container.env": ["LAB_*"]})
    values = {"MY_VALUE": NASTY, "LAB_X": "1", "HF_TOKEN": "hf_secret", "HF_HOME": str(cache), "EMPTY_": ""}
    assert inside.run(**values).returncode == 0
    call = inside.fake.calls("exec")[0]
    argv = call["argv"]
    assert argv[-7:] == [str(tmp_path / "x.sif"), "env", "HOME=/tmp", "python3", "-m", "some thing", "a b;$HOME"]
    own = argv[2].removesuffix("/tmp:/tmp")
    assert Path(own).name.startswith(f"{os.getuid()}.7.image.") and ["--bind", str(cache)] == argv[-11:-9]
    assert call["env"]["APPTAINER_NO_EVAL"] == "1"
    assert call["env_mode"] == "0o600" and "hf_secret" not in " ".join(argv)
    read = "set -a; source /dev/stdin; exec env --null"
    said = subprocess.run(
        ["bash", "-c", read], input=call["env_file"].encode(), env={"PATH": os.environ["PATH"]},
        capture_output=True, check=True, timeout=600,
    ).stdout.decode()  # fmt: skip
    found = dict(item.split("=", 1) for item in said.split("\0") if item)
    wanted = {name: value for name, value in values.items() if name != "EMPTY_"}
    assert {name: found[name] for name in wanted} == wanted
    assert found["SLURM_JOB_NODELIST"] == "node[1-2],gpu1"
    assert not {"SECRET", "EMPTY_", "TMPDIR", "HOME"} & found.keys()


def test_what_killed_jobs_left_is_removed_and_no_other_folder(tmp_path: Path) -> None:
    inside = Inside(tmp_path)
    local = tmp_path / "local"
    names = ("abandoned", "held", "new")
    abandoned, held, new = (local / f"{os.getuid()}.5.image.{name}" for name in names)
    for folder in (abandoned, held, new):
        (folder / "image").mkdir(parents=True)
    (abandoned / "image").chmod(0o500)
    (abandoned / ".hpc-rl").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".hpc-rl").touch()
    link = local / f"{os.getuid()}.5.image.link"
    link.symlink_to(elsewhere)
    with (held / ".hpc-rl").open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        done = subprocess.run(inside.command, env=inside.environ, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in local.iterdir()} == {held.name, new.name, link.name, KEPT}
    assert (elsewhere / ".hpc-rl").exists() and not (new / ".hpc-rl").exists()


def test_a_request_to_save_while_the_image_is_unpacked_ends_nothing(tmp_path: Path) -> None:
    inside = Inside(tmp_path, **{"container.unpack": "always"})
    programs = tmp_path / "signals"
    programs.mkdir()
    (programs / "df").write_text('#!/bin/bash\nkill -USR2 "$PPID" "$$"\nexec /bin/df "$@"\n')
    (programs / "df").chmod(0o755)
    done = inside.run(PATH=f"{programs}:{inside.environ['PATH']}")
    assert done.returncode == 0 and inside.fake.calls("exec"), done.stderr


def test_the_folder_of_tokenized_data_is_created_and_bound(tmp_path: Path) -> None:
    folder = tmp_path / "not yet" / "there"
    flags = {"kind": "sft", "model.path": "m", "data.train_files": ["a.jsonl"], "cache.data_dir": str(folder)}
    (tmp_path / "work").mkdir()
    inside = Inside(tmp_path / "work", **flags)
    assert inside.run().returncode == 0
    argv = inside.fake.calls("exec")[0]["argv"]
    assert argv[argv.index(str(folder)) - 1] == "--bind" and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.parent.rmdir()
    folder.parent.touch()
    assert inside.run().returncode == 0
    assert str(folder) not in inside.fake.calls("exec")[1]["argv"]


def test_the_folder_beside_the_run_is_bound_if_it_is_outside_of_the_working_folder(tmp_path: Path) -> None:
    def folder(kind: str, run: Path, **more: Any) -> str | None:
        job = image_job(run, Path("/project"), kind, **more)
        return tokenized_folder(job.config, job.run_dir, job.working_dir)

    needed = {"model.path": "m", "data.train_files": ["a.jsonl"]}
    assert folder("sft", Path("/runs/one"), **needed) == f"/runs/{TOKENIZED}"
    assert folder("sft", Path("/project/runs/one"), **needed) is None
    assert folder("sft", Path("/runs/one"), **needed, **{"cache.data_dir": "here"}) is None
    assert folder("torchrun", Path("/runs/one")) is None
    with pytest.raises(UserError, match="/a,b cannot be bound into an image"):
        folder("sft", Path("/runs/one"), **needed, **{"cache.data_dir": "/a,b"})


@pytest.mark.parametrize("code", [1, 75, 137, 255])
def test_exit_codes_pass_through(tmp_path: Path, code: int) -> None:
    done = Inside(tmp_path).run(FAKE_EXEC=str(code))
    assert done.returncode == code
    assert ("or the program ended with 255" in done.stderr) == (code == 255)


def test_a_termination_is_handed_on_and_leaves_nothing(tmp_path: Path) -> None:
    inside = Inside(tmp_path)
    with subprocess.Popen(inside.command, env={**inside.environ, "FAKE_EXEC": "slow"}) as running:
        deadline = time.monotonic() + 600
        while not inside.fake.started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        assert running.wait(600) == 9
    assert {path.name for path in (tmp_path / "local").iterdir()} <= {KEPT}


def on_disk(tmp_path: Path) -> None:
    """Let a folder count as a disk, whatever file system the tests run on."""
    program = tmp_path / "bin" / "stat"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in --file-system) echo ext2/ext3;; *) exec {shutil.which("stat")} "$@";; esac\n'
    )
    program.chmod(0o755)


def test_compiled_kernels_stay_on_the_node_in_a_private_folder(tmp_path: Path) -> None:
    inside = Inside(tmp_path)
    on_disk(tmp_path)
    assert inside.run().returncode == 0
    kept = tmp_path / "local" / KEPT
    assert kept.stat().st_mode & 0o777 == 0o700
    bind = ["--bind", f"{kept}:/tmp/{KEPT}"]
    argv = inside.fake.calls("exec")[0]["argv"]
    assert argv[argv.index(bind[1]) - 1] == bind[0] and argv[2].endswith("/tmp:/tmp")
    kept.chmod(0o755)  # as another user might have made it
    assert inside.run().returncode == 0
    kept.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    kept.symlink_to(tmp_path / "theirs")
    assert inside.run().returncode == 0
    assert [bind[1] in call["argv"] for call in inside.fake.calls("exec")] == [True, False, False]


def test_a_node_that_cannot_run_images_says_so_in_a_line(tmp_path: Path) -> None:
    inside = Inside(tmp_path)
    (tmp_path / "bin" / "apptainer").unlink()
    where = subprocess.run(["bash", "-c", "dirname $(command -v bash)"], capture_output=True, text=True, check=True)
    found = inside.run(PATH=where.stdout.strip())
    if "singularity" not in found.stderr:
        pytest.skip("this machine's own runtime stands beside bash")
    assert found.returncode == 2 and "has no apptainer and no singularity on PATH" in found.stderr


def test_an_image_that_a_node_does_not_see_is_a_line(tmp_path: Path) -> None:
    inside = Inside(tmp_path)
    (tmp_path / "x.sif").unlink()
    done = inside.run()
    assert done.returncode == 2 and f"does not see the image {tmp_path}/x.sif" in done.stderr


def test_a_copy_on_the_nodes_disk_is_used_and_removed(tmp_path: Path) -> None:
    inside = Inside(tmp_path, **{"container.unpack": "auto"})
    done = inside.run()
    assert done.returncode == 0, done.stderr
    build, run = inside.fake.calls("build")[0]["argv"], inside.fake.calls("exec")[0]["argv"]
    assert build[:2] == ["build", "--sandbox"] and build[-1] == str(tmp_path / "x.sif")
    assert build[2] in run and str(tmp_path / "x.sif") not in run


def test_no_copy_is_made_where_the_kernel_mounts_images(tmp_path: Path) -> None:
    conf = tmp_path / "apptainer.conf"
    facts = f"APPTAINER_SUID_INSTALL=1\nAPPTAINER_CONF_FILE={conf}"
    inside = Inside(tmp_path, **{"container.unpack": "auto"})
    for rule, copies in (("yes", 0), ("iflimited", 1)):
        conf.write_text(f"allow setuid-mount squashfs = {rule}\n")
        inside.run(FAKE_BUILDCFG=facts)
        assert len(inside.fake.calls("build")) == copies


def test_a_copy_that_fails_does_not_cost_the_job(tmp_path: Path) -> None:
    inside = Inside(tmp_path, **{"container.unpack": "always"})
    done = inside.run(FAKE_BUILD="255")
    assert done.returncode == 0 and "could not unpack the image and uses the file" in done.stderr
    assert str(tmp_path / "x.sif") in inside.fake.calls("exec")[0]["argv"]
    assert json.loads(inside.fake.log.read_text().splitlines()[0])["argv"][0] == "build"
