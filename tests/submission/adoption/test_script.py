"""Scripts of users, and the jobs that they become."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from hpc_rl.cli import app
from hpc_rl.errors import UserError
from hpc_rl.submission.adoption.script import adopt
from hpc_rl.submission.adoption.text import adoption_text
from tests.helpers import hpc_rl

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.sbatch"))
HEAD = "#!/bin/bash\n#SBATCH --gpus-per-node=2\n"


def adopted(script: Path) -> str:
    return adoption_text(adopt(script.read_text(), script.name), script.name, f"{script.stem}.site.yaml")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_scripts_become(script: Path) -> None:
    """UPDATE_GOLDEN=1 writes the files anew."""
    golden = script.with_suffix(".sh")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(adopted(script))
    assert adopted(script) == golden.read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_hpc_rl_accepts_what_is_printed(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash reads the lines, and `hpc-rl submit` takes the words that it makes of them."""
    job = adopt(script.read_text(), script.name)
    text = adopted(script).replace("cd /work/trl &&", "cd . &&")
    folder = tmp_path / (job.folder if job.folder == "lightning" else "")
    for name in ("train.py", "train_ppo.py", "sft.py", "src/train.py", "data/x.jsonl", "grpo.sif/bin/sh"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (tmp_path / "hpc-rl").write_text(f'#!/bin/bash\npwd > {tmp_path}/place\nprintf "%s\\0" "$@" > {tmp_path}/words\n')
    (tmp_path / "hpc-rl").chmod(0o755)
    unknown = dict.fromkeys(("VALUE1", "VALUE2", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "lr"), "1")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), **unknown}
    subprocess.run(["bash", "-e", "-c", text, "x", "a b"], cwd=tmp_path, env=environ, check=True, timeout=60)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert ("a b" in words) == ('"$@"' in text or '"$1"' in text)

    monkeypatch.chdir((tmp_path / "place").read_text().strip())
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setattr("hpc_rl.submission.queue.require_slurm", lambda: None)
    printed, place = io.StringIO(), words.index("--")
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        typer.main.get_command(app).main([*words[:place], "--dry-run", *words[place:]], standalone_mode=False)
    assert shlex.join(words[-2:]) in printed.getvalue().replace(" \\\n", " ")


def test_the_lines_go_to_a_file_and_a_count_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "x.sbatch").write_text(f"{HEAD}#SBATCH --array=1-3\nsrun torchrun --nproc_per_node=gpu train.py\n")
    done = hpc_rl("adopt", "x.sbatch", folder=tmp_path)
    assert done.returncode == 0 and "hpc-rl: 1 part of the script not carried over" in done.stderr
    assert done.stdout.endswith("hpc-rl submit torchrun --nodes 1 --gpus-per-node 2 \\\n    -- train.py\n")
    assert [path.name for path in tmp_path.iterdir()] == ["x.sbatch"], "nothing is written or run"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe", "it is no text file"),
        (b"import torch\n", "is no sbatch script: its first line is neither #!/bin/bash nor #SBATCH"),
        (b"#!/usr/bin/env python\n", "is no sbatch script"),
        (
            b"#!/bin/bash\nexport HPC_RL_RUN_DIR=/x\n",
            "was rendered by hpc-rl: submit it with hpc-rl submit KIND --script",
        ),
        (
            b"#!/bin/bash\necho hi\nsrun ./a.out\n",
            "a program in Python, .*; line 3, `srun ./a.out` starts another",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.sbatch").write_bytes(content)
    done = hpc_rl("adopt", "x.sbatch", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if "still at work" not in line]
    assert len(lines) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(lines[0])


@pytest.mark.parametrize(
    ("lines", "kind", "program"),
    [
        ("python -m torch.distributed.run --nproc_per_node=2 train.py --a", "torchrun", "train.py --a"),
        ("python3 -u -W ignore -m torch.distributed.launch --nproc_per_node 2 train.py", "torchrun", "train.py"),
        (
            "python -m accelerate.commands.launch -m my.train x",
            "torchrun",
            "-m accelerate.commands.launch -m my.train x",
        ),
        ("torchrun --standalone --nproc-per-node gpu -m my.train -m x", "torchrun", "-m my.train -m x"),
        ("singularity run --nv a.sif torchrun train.py", "torchrun", "train.py"),
        ("srun -lu bash -lc 'source env.sh && exec python -u train.py $X'", "torchrun", "train.py ${X}"),
        ("srun sh -c \"RANK=\\$SLURM_PROCID python train.py --r '$R'\"", "torchrun", "train.py --r ${R}"),
        ("CMD='python train.py'; eval $CMD --x", "torchrun", "train.py --x"),
        ("axolotl train c.yaml --launcher torchrun -- --nnodes 2", "torchrun", "axolotl train c.yaml"),
        ("trl vllm-serve &\ntrl grpo --config c.yaml", "torchrun", "trl grpo --config c.yaml"),
        ("srun llamafactory-cli train c.yaml lr=1", "torchrun", "llamafactory-cli train c.yaml lr=1"),
        ("NPROC_PER_NODE=4 swift sft --model m", "torchrun", "swift sft --model m"),
        ("lightning run model --devices=2 x.py", "torchrun", "lightning run model x.py"),
        ("fabric run --strategy=ddp --devices=2 x.py", "torchrun", "fabric run --strategy=ddp x.py"),
        ("deepspeed --hostfile=h --no_local_rank x.py --d z", "torchrun", "deepspeed --no_local_rank x.py --d z"),
        (
            "srun accelerate launch --config_file f.yaml --num_processes $N --machine_rank \\$SLURM_NODEID x.py",
            *("torchrun", "accelerate launch --config_file f.yaml x.py"),
        ),
        (
            "accelerate launch --multi_gpu --mixed_precision bf16 $S a",
            "torchrun",
            "accelerate launch --mixed_precision bf16 ${S} a",
        ),
        ("srun $WRAPPER --label python train.py", "torchrun", "train.py"),
        ("uv run train.py", "torchrun", "train.py"),
        ("conda run -n trl trl sft --lr 1", "torchrun", "trl sft --lr 1"),
        ("python -m pip install x\npython train.py", "torchrun", "train.py"),
        ("python -m verl.trainer.sft_trainer a=1", "torchrun", "-m verl.trainer.sft_trainer a=1"),
        ("conda run -n x --no-capture-output python train.py", "torchrun", "train.py"),
        ("uv run --frozen -m my.train", "torchrun", "-m my.train"),
        ("numactl --membind=0 python train.py || true", "torchrun", "train.py"),
        ("if true; then\n  srun torchrun train.py \\\n    --x\nfi", "torchrun", "train.py --x"),
        ("run() { torchrun train.py; }\nrun", "torchrun", "train.py"),
        ("$LAUNCHER train.py", "torchrun", "train.py"),
        ("python setup.py\nsrun torchrun train.py", "torchrun", "train.py"),
        ("torchrun train.py <options>\nnext <one>", "torchrun", "train.py"),
        ("python -m verl.trainer.main_ppo a=1", "ray", "python -m verl.trainer.main_ppo a=1"),
        ("ray start --head\npython a.py && python b.py", "ray", "python a.py"),
        ("python a.py\nray start --head\npython b.py", "ray", "python b.py"),
    ],
)
def test_programs_are_found_behind_their_launchers(lines: str, kind: str, program: str) -> None:
    job = adopt(f"{HEAD}{lines}\n", "x")
    words = " ".join(job.program).replace("\ue000", "${").replace("\ue001", "}")
    assert (job.kind, words) == (kind, program)


@pytest.mark.parametrize(
    ("lines", "slurm", "lost"),
    [
        ("module load a b\nmodule load c", {"modules": ["a", "b", "c"], "python": "python"}, 0),
        ("module load a\nml c", {"setup": ["ml c"], "modules": ["a"], "python": "python"}, 0),
        ("module use /m\nmodule load a", {"setup": ["module use /m", "module load a"], "python": "python"}, 0),
        ("f() {\n  x\n}\nf > a.json", {"setup": ["f() {", "  x", "}", "f > a.json"], "python": "python"}, 0),
        ("srun -l hostname > hosts.log\nsource a # b", {"setup": ["source a"], "python": "python"}, 0),
        ("module purge\nmodule load a", {"setup": ["module purge", "module load a"], "python": "python"}, 0),
        ("export A=1 B=$HOME/x\nexport C=$A", {"env": {"A": "1", "B": "${HOME}/x", "C": "1"}}, 0),
        ("A=$(date)\nexport B=$A", {"setup": ["A=$(date)", "export B=$A"], "python": "python"}, 0),
        ("export API_TOKEN=abc\nsource activate $1", {}, 2),
        ("export A_TOKEN=abc\nx --t $A_TOKEN\nwandb login abc", {"setup": ["x --t $A_TOKEN"], "python": "python"}, 2),
        ("if a; then cd b; fi", {"setup": ["if a; then cd b; fi"], "python": "python"}, 0),
        ("f() { echo; }\nf x > a.json", {"setup": ["f() { echo; }", "f x > a.json"], "python": "python"}, 0),
        ("x=1\necho > x.log\nexport T=$SLURM_JOB_ID", {"setup": ["export T=$SLURM_JOB_ID"], "python": "python"}, 0),
        ("vllm serve x &\nsrun hostname\nsbatch other.sh", {}, 2),
        ("export MASTER_ADDR=$(hostname -i)\necho $MASTER_ADDR > a\ntrap 'x' USR1", {}, 0),
    ],
)  # fmt: skip
def test_lines_before_the_program(lines: str, slurm: dict[str, object], lost: int) -> None:
    job = adopt(f"{HEAD}{lines}\nsrun torchrun --nproc_per_node 2 train.py\n", "x")
    assert (job.profile["slurm"], len(job.lost)) == (slurm, lost)


def test_text_of_a_script_cannot_leave_its_comment_or_its_word(tmp_path: Path) -> None:
    words = "'$(touch made)' \"a'b\n;touch made #\" `touch made`"
    script = f"{HEAD}srun x $'a\\nb' \"\ntouch made\"\ntorchrun train.py {words}\n"
    text = adoption_text(adopt(script, "x"), "a\ntouch made\n", "x.yaml").replace("hpc-rl", "true")
    environ = {"PATH": "/usr/bin:/bin", "VALUE1": "x"}
    subprocess.run(["bash", "-e", "-c", text], cwd=tmp_path, env=environ, check=True, timeout=60)
    assert not (tmp_path / "made").exists()
    with pytest.raises(UserError):
        adopt("\ue000 \ue001", "x")
