import re
from pathlib import Path

import pytest

from hpc_rl.adapters.adapter import ProgramPlace
from hpc_rl.adapters.launchers import launcher_conflicts, without_launcher
from hpc_rl.adapters.program import LAUNCHED, Program
from hpc_rl.adapters.saved import Checkpoint, record_saved
from hpc_rl.adapters.table import choose
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir


def command(text: str, folder: Path = Path("/nowhere")) -> str:
    """Return the name of the adapter, and what the ranks run, with LAUNCHED for our module."""
    program = without_launcher(Program(tuple(text.split()), folder))
    row = choose("auto", "torchrun", program)
    return f"{row.name}: {' '.join(row.command(program))}".replace(LAUNCHED, "LAUNCHED")


@pytest.mark.parametrize(
    ("typed", "run"),
    [
        ("x.py --lr 1", "generic: x.py --lr 1"),
        ("python -u x.py a", "generic: x.py a"),
        ("/opt/bin/python3.11 -m pkg.mod a=1", "generic: -m pkg.mod a=1"),
        ("torchrun --nproc-per-node 8 --nnodes=2 x.py a", "generic: x.py a"),
        ("/venv/bin/torchrun --standalone -m pkg.mod -m b", "generic: -m pkg.mod -m b"),
        ("python -m torch.distributed.run --nnodes 2 x.py", "generic: x.py"),
        ("deepspeed --num_gpus 8 x.py --d z.json", "generic: -m LAUNCHED deepspeed --num_gpus 8 -- x.py --d z.json"),
        ("fabric run --strategy=ddp x.py", "generic: -m LAUNCHED fabric --strategy=ddp -- x.py"),
        (
            "accelerate launch --config_file f.yaml x.py a",
            "generic: -m LAUNCHED accelerate --config_file f.yaml -- x.py a",
        ),
        (
            "accelerate launch -m axolotl.cli.train c.yml",
            "axolotl: -m LAUNCHED accelerate -- -m axolotl.cli.train c.yml",
        ),
        ("python -m accelerate.commands.launch x.py", "generic: -m LAUNCHED accelerate -- x.py"),
        ("trl sft --output_dir o", "trl: -m LAUNCHED trl -- -m trl.scripts.sft --output_dir o"),
        ("trl dpo --accelerate_config zero2 --x 1", "trl: -m LAUNCHED trl zero2 -- -m trl.scripts.dpo --x 1"),
        ("axolotl train c.yml --lr 1 --launcher torchrun -- --x", "axolotl: -m axolotl.cli.train c.yml --lr 1"),
        ("axolotl train --launcher=python c.yml", "axolotl: -m axolotl.cli.train c.yml"),
        ("llamafactory-cli train c.yaml a=1", "llamafactory: -m llamafactory.launcher c.yaml a=1"),
        ("lmf train --stage sft", "llamafactory: -m llamafactory.launcher --stage sft"),
        ("swift sft c.yaml --lr 1", "ms-swift: -m LAUNCHED swift -- -m swift.cli.sft c.yaml --lr 1"),
        ("swift rlhf --rlhf_type dpo", "ms-swift: -m LAUNCHED swift -- -m swift.cli.rlhf --rlhf_type dpo"),
        ("", "generic: "),
    ],
)
def test_what_the_ranks_run(typed: str, run: str) -> None:
    assert command(typed) == run


def test_a_script_is_recognised_behind_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("from trl import SFTTrainer\n")
    (tmp_path / "sft.yaml").write_text("accelerate_config: fsdp2\noutput_dir: here\n")
    for launcher in ("torchrun --nnodes 2", "accelerate launch --num_processes 4", "deepspeed"):
        assert command(f"{launcher} x.py", tmp_path).startswith("trl: ")
    run = command("trl sft --config sft.yaml", tmp_path)
    assert run == "trl: -m LAUNCHED trl fsdp2 -- -m trl.scripts.sft --config sft.yaml"
    again = Program(tuple(run.removeprefix("trl: ").replace("LAUNCHED", LAUNCHED).split()), tmp_path)
    assert (again.module, again.settings("config")["output_dir"]) == ("trl.scripts.sft", "here")
    assert choose("auto", "torchrun", again).folder(again) == tmp_path / "here"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("torchrun --nnodes 2 ./train", "torchrun: no program found among '--nnodes 2 ./train'"),
        ("torchrun -m --nnodes 2 pkg.mod", "write -m right before the module"),
        ("accelerate launch --tpu x.py", "accelerate launch --tpu: a job starts Python on GPUs itself"),
    ],
)
def test_launchers_that_cannot_be_left_out(typed: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        command(typed)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "torchrun --nnodes 4 x.py",
            "--nnodes 4, but the job has 2 nodes: leave the option out, or submit with --nodes 4",
        ),
        (
            "torchrun --nproc-per-node=2 -m x",
            "--nproc-per-node 2, but the job has 8 GPUs per node: .* --gpus-per-node 2",
        ),
        ("python -m torch.distributed.run --nnodes=2 --nproc_per_node 4 x.py", "--nproc_per_node 4, but"),
        ("accelerate launch --num_machines 1 x.py", "--num_machines 1, but the job has 2 nodes"),
        (
            "accelerate launch --num_processes 8 x.py",
            "--num_processes 8, but the job has 16 processes, one for each GPU: leave the option out",
        ),
        ("deepspeed --num_nodes 2 --num_gpus 4 x.py", "--num_gpus 4, but"),
        ("fabric run --devices=4 --num-nodes=2 x.py", "--devices 4, but"),
        ("axolotl train c.yml --launcher torchrun -- --nnodes 3", "--nnodes 3, but"),
        *[
            (agreeing, "")
            for agreeing in (
                "torchrun --nnodes 2 --nproc-per-node gpu x.py --nnodes 4",
                "torchrun --nnodes=1:4 --nproc-per-node=8 x.py",
                "accelerate launch --num_processes 16 --num_machines=2 x.py",
                "fabric run --devices auto x.py",
                "x.py --nnodes 4",
                "x.py -- --nnodes 4",
                "",
            )
        ],
    ],
)
def test_a_launcher_that_requests_other_ranks_than_the_job_has(typed: str, said: str) -> None:
    place = ProgramPlace(RunDir(Path("run")), nodes=2, processes=8)
    found = "\n".join(launcher_conflicts(Program(tuple(typed.split())), place))
    assert re.fullmatch(f"{said}.*" if said else "", found)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("axolotl preprocess c.yml", "only `axolotl train CONFIG.yml` can be a job"),
        ("axolotl train c.yml --sweep s.yml", "--sweep: Axolotl would start"),
        ("axolotl train ray.yml", "use_ray: Axolotl would start"),
        ("llamafactory-cli webui", "only `llamafactory-cli train CONFIG.yaml` can be a job"),
        ("llamafactory-cli train rm.yml", "stage rm: LLaMA-Factory cannot resume it"),
        ("llamafactory-cli train c.yml", "USE_V1=1 is set"),
        ("swift deploy --x 1", "only `swift pt`, `swift sft` or `swift rlhf` can be a job"),
        ("swift sft --use_ray true", "use_ray: ms-swift would start a cluster"),
        ("trl vllm-serve --model m", "trl vllm_serve is no training"),
    ],
)
def test_conflicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, said: str) -> None:
    monkeypatch.setenv("USE_V1", "1")
    (tmp_path / "ray.yml").write_text("use_ray: true\n")
    (tmp_path / "rm.yml").write_text("stage: rm\n")
    program = Program(tuple(typed.split()), tmp_path)
    row = choose("auto", "torchrun", program)
    program = Program(tuple(row.command(program)), tmp_path)
    assert said in "\n".join(row.conflicts(program, ProgramPlace(RunDir(tmp_path))))


@pytest.mark.parametrize(
    ("typed", "first", "nothing_saved", "saved"),
    [
        ("-m axolotl.cli.train c.yml", "", "", "--resume-from-checkpoint {}"),
        (
            "-m llamafactory.launcher c.yml",
            *("", "overwrite_output_dir=true", "overwrite_output_dir=false resume_from_checkpoint={}"),
        ),
        (
            "-m llamafactory.launcher --stage sft",
            *("", "--overwrite_output_dir true", "--overwrite_output_dir false --resume_from_checkpoint {}"),
        ),
        ("-m swift.cli.sft --output_dir o", "--add_version false", "--add_version false", "--add_version false"),
        ("-m swift.cli.sft --output_dir o --add_version true", "", "", ""),
    ],
)
def test_what_is_added(tmp_path: Path, typed: str, first: str, nothing_saved: str, saved: str) -> None:
    program, run = Program(tuple(typed.split()), tmp_path), RunDir(tmp_path)
    row = choose("auto", "torchrun", program)
    assert " ".join(row.arguments(program, ProgramPlace(run))) == first
    assert " ".join(row.arguments(program, ProgramPlace(run, is_later=True))) == nothing_saved
    record_saved(run, Checkpoint(1, str(tmp_path)))
    assert " ".join(row.arguments(program, ProgramPlace(run, is_later=True))) == saved.format(tmp_path)
