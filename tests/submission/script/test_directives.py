"""Variables of sbatch next to the options of a script."""

from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.sites.profile import load_profile
from hpc_rl.submission.executor import ScriptExecutor
from hpc_rl.submission.script.directives import directives, environment_notes, option_of, overruled
from tests.fake_slurm import fake_slurm

SCRIPT = """#!/bin/bash
# a comment
#SBATCH --partition=gpu
#SBATCH -t 1:00:00
#SBATCH --mem=64G
#SBATCH --gpus-per-node=a100:2
#SBATCH --output="/a b/job-%j.log"
#SBATCH --requeue
#SBATCH --account=mine

echo ready
#SBATCH --qos=late
"""


def test_the_options_of_a_script() -> None:
    found = [option_of(line) for line in directives(SCRIPT)]
    assert found == ["partition", "time", "mem", "gpus-per-node", "output", "requeue", "account"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SBATCH_PARTITION", "debug", "the job has --partition=gpu"),
        ("SBATCH_TIMELIMIT", "5", "the job has -t 1:00:00"),
        ("SBATCH_MEM_PER_CPU", "4G", "the job has --mem=64G"),
        ("SBATCH_MEM_PER_NODE", "4G", "the job has --mem=64G"),
        ("SBATCH_OUTPUT", "x", "the job has --output=/a b/job-%j.log"),
        ("SBATCH_NO_REQUEUE", "1", "the job has --requeue"),
        ("SBATCH_GPUS", "8", "the job has --gpus-per-node=a100:2"),
        ("SBATCH_GRES", "gpu:8", "the job has --gpus-per-node=a100:2"),
        ("SBATCH_GRES", "nvme:1", None),
        ("SBATCH_QOS", "long", None),
        ("SBATCH_RESERVATION", "course", None),
        ("SBATCH_ACCOUNT", "other", "the job has --account=mine"),
        ("SBATCH_WAIT", "1", "hpc-rl submit --wait waits"),
        ("SBATCH_ERROR", "x", "the log of the job has its errors too"),
        ("SBATCH_ARRAY_INX", "1-3", "hpc-rl sweep makes arrays"),
    ],
)
def test_what_the_script_states_wins(name: str, value: str, reason: str | None) -> None:
    environ = {name: value, "SLURM_CONF": "/x", "PATH": "/bin"}
    assert overruled(environ, SCRIPT) == ({} if reason is None else {name: reason})
    (note,) = environment_notes(environ, SCRIPT)
    assert note.startswith("from the environment: --" if reason is None else f"{name}={value} is ignored: {reason}")
    assert f"({name})" in note or reason is not None


def test_an_array_of_the_script_and_equal_values() -> None:
    script = "#!/bin/bash\n#SBATCH --array=1-2\n#SBATCH --account=mine\n"
    environ = {"SBATCH_ARRAY_INX": "7", "SBATCH_ACCOUNT": "mine", "SBATCH_WCKEY": "a"}
    assert overruled(environ, script)["SBATCH_ARRAY_INX"] == "the job has --array=1-2"
    assert environment_notes(environ, script) == [
        "from the environment: --account=mine (SBATCH_ACCOUNT), --wckey=a (SBATCH_WCKEY)",
        "SBATCH_ARRAY_INX=7 is ignored: the job has --array=1-2",
    ]
    assert environment_notes({"HOME": "/", "SBATCH_OF_MY_OWN": "1"}, script) == []


def test_sbatch_gets_only_variables_that_the_script_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "sbatch").write_text(f'#!/bin/sh\nenv > {tmp_path}/seen\necho "Submitted batch job 7"\n')
    for name in ("SBATCH_PARTITION", "SBATCH_WAIT", "SBATCH_RESERVATION", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "1")
    ScriptExecutor(tmp_path, SCRIPT).submit_script()
    seen = [line for line in (tmp_path / "seen").read_text().splitlines() if line.startswith(("SBATCH_", "SLURM_N"))]
    assert seen == ["SBATCH_RESERVATION=1"]


@pytest.mark.parametrize(
    ("said", "starts"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account", "sbatch refused the job: Batch job"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "sbatch cannot reach Slurm (Unable"),
        ("sbatch: fatal: Could not establish a configuration source", "sbatch cannot reach Slurm (fatal: Could"),
    ],
)
def test_a_refusal_is_told_from_a_slurm_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, starts: str
) -> None:
    (fake_slurm(tmp_path, monkeypatch) / "sbatch").write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    with pytest.raises(UserError) as error:
        ScriptExecutor(tmp_path, SCRIPT).submit_script()
    assert str(error.value).startswith(starts)
    assert ("add --local" in str(error.value)) == ("cannot reach" in starts)


def test_variables_are_below_every_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"SBATCH_PARTITION": "debug", "SBATCH_ACCOUNT": "mine", "SBATCH_TIMELIMIT": "60", "SBATCH_EXPORT": "NONE"}
    (tmp_path / "here.yaml").write_text("slurm: {partition: gpu}\n")
    found = load_profile("./here.yaml", environ)
    assert found.values == {"slurm.partition": "gpu", "slurm.account": "mine", "slurm.time": "60"}
    assert str(found.origins["slurm.account"]) == "$SBATCH_ACCOUNT"
