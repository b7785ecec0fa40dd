"""#SBATCH lines in all their forms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.submission.adoption.directives import Adoption, adopt_options, sbatch_options

SHORT = {"partition": "p", "account": "A", "time": "t", "nodes": "N", "job-name": "J", "output": "o", "qos": "q"}
NAMES = [*SHORT, "comment", "mail-type", "gres", "signal", "reservation"]
VALUES = st.from_regex(r"[A-Za-z0-9_./@%:][A-Za-z0-9_./@%: =,#-]*[A-Za-z0-9]", fullmatch=True)
FLAGS = st.sampled_from([("exclusive", None), ("requeue", None), ("exclusive", "user"), ("H", None)])


def adopted(*lines: str) -> Adoption:
    return adopt_options(list(sbatch_options("#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines))))


@given(st.lists(st.tuples(st.sampled_from(NAMES), VALUES) | FLAGS, min_size=1, max_size=6), st.data())
def test_every_form_of_an_option_is_read(options: list[tuple[str, str | None]], data: st.DataObject) -> None:
    script, line = "#!/bin/bash -l\n# a comment\n\n", ""
    for name, value in options:
        quoted = value is not None and (" " in value or "#" in value or data.draw(st.booleans()))
        text = f'"{value}"' if quoted else value
        forms = [f"--{name}={text}"] if text else [f"--{name}" if len(name) > 1 else f"-{name}"]
        if text and name != "exclusive":
            letter = SHORT.get(name)
            forms += [f"--{name} {text}", *([f"-{letter} {text}", f"-{letter}{text}"] if letter else [])]
        line += " " + data.draw(st.sampled_from(forms))
        if data.draw(st.booleans()):
            script, line = f"{script}#SBATCH{line}{data.draw(st.sampled_from(['', '  # why']))}\n", ""
    script += f"#SBATCH{line}\n##SBATCH --nodes=9\necho\n#SBATCH --nodes=8\n"
    expected = [("hold" if name == "H" else name, value) for name, value in options]
    assert [(name, value) for _, name, value in sbatch_options(script)] == expected


@pytest.mark.parametrize(
    ("lines", "flags", "slurm"),
    [
        (["--ntasks=8 --ntasks-per-node=4"], {}, {}),
        (["-n 4 -N2 -c 8"], {"cpus-per-task": "16"}, {}),
        (["--mem=64G -t 1-0"], {"mem": "64G", "time": "1-0"}, {}),
        (["--time=2:00"], {"time": "2:00"}, {"warning_s": 60}),
        (["--cpus-per-task=4 --mem-per-cpu=2G"], {"cpus-per-task": "4", "mem": "8192M"}, {"mem_option": "mem-per-cpu"}),
        (["--gpus-per-node=2 --mem-per-gpu=1G"], {"mem": "2048M"}, {"mem_option": "mem-per-gpu"}),
        (["--cpus-per-gpu=8"], {}, {"cpus_per_gpu": 8}),
        (["--exclusive", "--no-requeue"], {}, {"exclusive": True, "requeue": False}),
        (["--exclusive=user"], {}, {"sbatch": {"exclusive": "user"}}),
        (["--signal=B:USR1@600"], {}, {"warning_s": 600}),
        (["--licenses=a:1 --hold"], {}, {"sbatch": {"licenses": "a:1", "hold": None}}),
        (["-p a", "-p b -q high -C 'a&b'"], {}, {"partition": "b", "qos": "high", "constraint": "a&b"}),
        (["--out=x --err=y"], {}, {}),
    ],
)  # fmt: skip
def test_what_options_become(lines: list[str], flags: dict[str, str], slurm: dict[str, Any]) -> None:
    job = adopted(*lines)
    assert (job.flags, job.profile["slurm"], job.lost) == (flags, slurm, [])


@pytest.mark.parametrize(
    ("line", "gpus", "slurm"),
    [
        ("--gpus-per-node=a100:4", 4, {"gpu_type": "a100"}),
        ("--gres=gpu", 1, {"gpu_option": "gres"}),
        ("--gres=gpu:2", 2, {"gpu_option": "gres"}),
        ("--gres=gpu:a100_1g.5gb", 1, {"gpu_option": "gres", "gpu_type": "a100_1g.5gb"}),
        ("--gres=disk:5,gpu:v100:2(S:0)", 2, {"gpu_option": "gres", "gpu_type": "v100", "sbatch": {"gres": "disk:5"}}),
        ("--gres=disk:5", None, {"sbatch": {"gres": "disk:5"}}),
        ("--gpus-per-task=l40s:1 --ntasks-per-node=4", 4, {"gpu_option": "gpus-per-task", "gpu_type": "l40s"}),
        ("-G 8 -N 2", 4, {}),
        ("--gres=gpu:0", 0, {"gpu_option": "gres"}),
    ],
)
def test_gpus_of_a_node(line: str, gpus: int | None, slurm: dict[str, Any]) -> None:
    job = adopted(line)
    assert (job.gpus, job.profile["slurm"]) == (gpus, slurm)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--array=0-3%2", "submit one run for each value"),
        ("--export=NONE", "no option of hpc-rl's jobs"),
        ("--nodes=2-4", "2 is used"),
        ("--nodes=$N", "not a number"),
        ("--mem=lots", "not of a form"),
        ("--ntasks-per-socket=2", "no option of hpc-rl's jobs"),
        ("-J 'my job'", "a name has letters"),
        ("train.py", "not of a form"),
    ],
)
def test_what_cannot_be_carried_over_is_listed(line: str, message: str) -> None:
    (lost,) = adopted(line).lost
    assert lost.startswith("line 2, ") and message in lost
