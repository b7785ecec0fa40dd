"""`site detect` and the check of a partition on the command line. Slurm's programs print recorded output."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import recorded

ANSWERS = {
    "sinfo": "sinfo",
    "scontrol show config": "show-config",
    "scontrol show partition": "show-partition",
    "sacctmgr": "assoc",
    "ip": "ip-ctl",
}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def login_node(tmp_path: Path) -> Callable[[str], Command]:
    """A login node of a recorded cluster: its programs print the recorded output and log their calls."""

    def of(cluster: str) -> Command:
        programs, home = tmp_path / "bin", tmp_path / "home"
        for folder in (programs, home):
            folder.mkdir(exist_ok=True)
        for file in ANSWERS.values():
            (tmp_path / f"{file}.out").write_text(recorded(cluster, file))
        for program in ("sinfo", "scontrol", "sacctmgr", "ip", "srun", "sbatch"):
            cases = [(words, file) for words, file in ANSWERS.items() if words.split()[0] == program]
            shown = "".join(f'*"{" ".join(w.split()[1:])}"*) cat {tmp_path}/{file}.out;; ' for w, file in cases)
            text = f'#!/bin/sh\necho {program} "$@" >> {tmp_path}/calls\ncase "$*" in {shown or "*) ;;"} esac\n'
            (programs / program).write_text(text)
            (programs / program).chmod(0o755)

        def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
            kept = {name: value for name, value in os.environ.items() if name not in ("HPC_RL_SITE", "MODULEPATH")}
            environ = {**kept, "HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin"}
            command = [sys.executable, "-m", "hpc_rl.cli", *arguments]
            settings: dict[str, object] = {"stdin": subprocess.DEVNULL, "capture_output": True, **options}
            return subprocess.run(command, cwd=tmp_path, env=environ, text=True, timeout=600, check=False, **settings)  # type: ignore[call-overload,no-any-return]

        return run

    return of


def calls(tmp_path: Path) -> list[str]:
    return sorted((tmp_path / "calls").read_text().splitlines())


def test_detect_asks_each_program_once_and_never_replaces(login_node: Callable[[str], Command], tmp_path: Path) -> None:
    hpc_rl = login_node("typed-gres-22.05.8")
    done = hpc_rl("site", "detect")
    assert (done.returncode, "--yes chooses gpu" in done.stderr) == (2, True)
    assert not list((tmp_path / "home").iterdir())
    (tmp_path / "calls").unlink()
    done = hpc_rl("site", "detect", "--yes")
    assert done.returncode == 0 and "partition gpu, default account" in done.stdout, done.stderr
    asked = [line.split()[0] + (" " + line.split()[2] if "scontrol" in line else "") for line in calls(tmp_path)]
    assert asked == ["ip", "sacctmgr", "sbatch", "sbatch", "scontrol config", "scontrol partition", "sinfo", "srun"]
    profile = tmp_path / "home/.config/hpc-rl/site.yaml"
    profile.write_text("slurm: {partition: mine}\n")
    refused = hpc_rl("site", "detect", "--yes")
    assert refused.returncode == 2 and "exists already: --force replaces it" in refused.stderr
    assert profile.read_text() == "slurm: {partition: mine}\n"
    assert hpc_rl("site", "detect", "--yes", "--force").returncode == 0
    shown = hpc_rl("site", "show").stdout
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("slurm.partition")] == ["16"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    blocked = hpc_rl("site", "detect", "--yes", "--out", "file/site.yaml")
    assert blocked.returncode == 2 and "cannot be written" in blocked.stderr and "Traceback" not in blocked.stderr
    assert "is a folder" in hpc_rl("site", "detect", "--yes", "--out", "folder").stderr


def test_detect_asks_for_partition_and_account(login_node: Callable[[str], Command], tmp_path: Path) -> None:
    hpc_rl = login_node("typed-gres-22.05.8")
    ours, theirs = pty.openpty()
    os.write(ours, b"nowhere\nmixed\nteaching\n")
    done = hpc_rl("site", "detect", "--out", "site.yaml", stdin=theirs)
    assert "partition (gpu, mixed, devel, cpu) [gpu]" in done.stderr and "'nowhere' is not in the list" in done.stderr
    assert "partition mixed, account teaching" in done.stdout
    assert "  account: teaching\n" in (tmp_path / "site.yaml").read_text()


def test_a_partition_that_cannot_give_says_what_it_can(login_node: Callable[[str], Command], tmp_path: Path) -> None:
    hpc_rl = login_node("typed-gres-22.05.8")
    (tmp_path / "train.py").write_text("")
    (tmp_path / "site.yaml").write_text("slurm: {partition: gpu, gpu_type: a100}\n")
    dry = ["submit", "torchrun", "--dry-run"]
    for arguments, said in (
        (
            ["--gpus-per-node", "8"],
            "partition gpu cannot provide 1 node with 8 a100 and 2 CPUs: it has 2 nodes with 2 a100",
        ),
        (["--time", "3-00:00:00"], "partition gpu ends jobs after 2-00:00:00, and --time is 3-00:00:00"),
        (["--partition", "gpuu"], "partition gpuu does not exist"),
    ):
        done = hpc_rl(*dry, *arguments, "--", "train.py")
        assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    (tmp_path / "calls").unlink()
    assert hpc_rl(*dry, "--gpus-per-node", "2", "--", "train.py").returncode == 0
    asked = [line.split()[0] for line in calls(tmp_path)]
    assert asked.count("sinfo") == 1  # for the GPUs of a node, and for limits
    assert set(asked) <= {"sinfo", "scontrol"}  # on a local disk: whether this machine is itself a node
    assert hpc_rl(*dry, "--time", "3-00:00:00", "--qos", "long", "--", "train.py").returncode == 0
    assert hpc_rl(*dry, "--gpus-per-node", "8", "--sbatch", "reservation=x", "--", "train.py").returncode == 0


def test_without_slurm_detection_is_a_line(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": "/nonexistent", "HOME": str(tmp_path)}
    done = helpers.hpc_rl("site", "detect", "--yes", folder=tmp_path, environ=environ)
    assert done.returncode == 2 and done.stderr.startswith("hpc-rl: there is no sinfo on PATH")
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_wrong_profile_is_a_line_with_its_place_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("slurm:\n  partion: gpu\n")
    for arguments in (["submit", "torchrun", "--local"], ["config", "torchrun"], ["site", "show"]):
        done = helpers.hpc_rl(*arguments, folder=tmp_path)
        assert done.returncode == 2
        expected = "hpc-rl: site.yaml, line 2: slurm.partion: unknown key; did you mean slurm.partition?\n"
        assert done.stderr == expected
    assert [path.name for path in tmp_path.iterdir()] == ["site.yaml"]


def test_a_profile_is_an_option_not_an_override(tmp_path: Path) -> None:
    done = helpers.hpc_rl("config", "torchrun", "site=typed-gres", folder=tmp_path)
    assert done.returncode == 2 and "choose a site profile with --site typed-gres" in done.stderr


def test_a_profile_that_sbatch_refuses_or_cannot_judge_is_written_with_a_message(
    login_node: Callable[[str], Command], tmp_path: Path
) -> None:
    hpc_rl = login_node("typed-gres-22.05.8")
    sbatch = tmp_path / "bin" / "sbatch"
    needs = "teaching"
    sbatch.write_text(
        "#!/bin/sh\ncat > script\ngrep -q -- --account=$(cat needs) script && exit 0\n"
        "echo 'sbatch: error: state a valid project' >&2\nexit 1\n"
    )
    (tmp_path / "needs").write_text(needs)
    done = hpc_rl("site", "detect", "--yes", "--out", "site.yaml")
    assert done.returncode == 0 and "partition gpu, account teaching" in done.stdout and done.stderr == ""
    (tmp_path / "needs").write_text("nobodys")
    done = hpc_rl("site", "detect", "--yes", "--force", "--out", "site.yaml")
    assert "sbatch refuses a test job with this profile: state a valid project; edit site.yaml" in done.stderr
    text = (tmp_path / "site.yaml").read_text()
    assert "# sbatch refuses a test job with these settings: state a valid project" in text and "  # account: " in text
    sbatch.write_text("#!/bin/sh\nexit 124\n")
    done = hpc_rl("site", "detect", "--yes", "--force", "--out", "site.yaml")
    assert done.returncode == 0 and "the profile has not been tried: sbatch --test-only does not answer" in done.stderr


def test_another_partition_is_taken_if_sbatch_refuses_every_job_in_the_first(
    login_node: Callable[[str], Command], tmp_path: Path
) -> None:
    hpc_rl = login_node("typed-gres-26.05.5")
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\ncat > script\ngrep -q -- --partition=gpu script || exit 0\n"
        "echo 'sbatch: error: this partition is for another project' >&2\nexit 1\n"
    )
    done = hpc_rl("site", "detect", "--yes", "--out", "site.yaml")
    assert done.returncode == 0 and "partition mixed" in done.stdout, done.stderr
    assert "refuses all test jobs in partition gpu" in done.stderr and "another project" in done.stderr
    assert "  partition: mixed\n" in (tmp_path / "site.yaml").read_text()


def test_the_cluster_of_a_variable_is_detected_tried_and_written(
    login_node: Callable[[str], Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "far")
    hpc_rl = login_node("typed-gres-26.05.5")
    assert hpc_rl("site", "detect", "--yes", "--out", "site.yaml").returncode == 0
    for line in calls(tmp_path):
        if line.split()[0] in ("sinfo", "scontrol", "sbatch"):
            assert "--clusters=far" in line
    assert "  sbatch: {clusters: far}\n" in (tmp_path / "site.yaml").read_text()
    monkeypatch.setenv("SLURM_CLUSTERS", "far,near")
    refused = hpc_rl("site", "detect", "--yes", "--force", "--out", "site.yaml")
    assert refused.returncode == 2 and "names several clusters (far,near): set it to one of them" in refused.stderr
