"""Sizes and times as sbatch reads them."""

from __future__ import annotations

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.slurm import NodeConfig, memory_mb, walltime_s


@pytest.mark.parametrize(
    ("text", "size"),
    [("64G", 65536), ("64GB", 65536), ("64g", 65536), ("1T", 1048576), ("500", 500), ("500M", 500), ("2048K", 2),
     ("0", 0), ("64 G", None), ("1.5G", None), ("-5", None), ("64Gi", None), ("5P", None), ("", None), ("G", None),
     ("9223372036854775807", 2**63), ("9223372036854775808", None)],
)  # fmt: skip
def test_sizes_are_those_that_sbatch_accepts(text: str, size: int | None) -> None:
    assert memory_mb(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("1:00:00", 3600), ("2-12", 216000), ("1-0:30", 88200), ("UNLIMITED", None)],
)
def test_times(text: str, seconds: int | None) -> None:
    assert walltime_s(text) == seconds


@pytest.mark.parametrize("where", ["override", "profile"])
def test_null_removes_a_section_a_table_or_a_list_of_the_profile(where: str) -> None:
    site = {"slurm.node.gpus": 4, "slurm.modules": ["cuda"], "slurm.sbatch.reservation": "x", "slurm.partition": "gpu"}
    keys = ["slurm.node", "slurm.modules", "slurm.sbatch", "slurm.partition"]
    if where == "override":
        config = compose("torchrun", [f"{key}=null" for key in keys], site=site)
    else:
        config = compose("torchrun", site=dict.fromkeys(keys))
    slurm = config.slurm
    assert (slurm.node, slurm.modules, slurm.sbatch, slurm.partition) == (NodeConfig(), [], {}, None)
