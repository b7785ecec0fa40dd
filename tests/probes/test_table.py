"""The table of the training checks: which apply to a job, and what each line says."""

import importlib
import inspect
from typing import get_args

import pytest

from hpc_rl.config.engines import ENGINES
from hpc_rl.config.training import TrainingConfig
from hpc_rl.probes.acceptance.bench import Layout
from hpc_rl.probes.acceptance.network import BETWEEN, WITHIN, rank_groups
from hpc_rl.probes.acceptance.placements import Placing, placings, splits
from hpc_rl.probes.acceptance.session import function_of
from hpc_rl.probes.acceptance.table import CHECKS, MODELS, rows
from hpc_rl.rl.weights.transfers import WEIGHT_TRANSFERS

EVERYTHING = frozenset({"liger_kernel", "ray", "vllm", "sglang", "tensordict"})
GPUS = Layout("cuda", 2, 8, EVERYTHING)
CPU = Layout("cpu", 1, 1, EVERYTHING)


def reasons(layout: Layout) -> dict[str, str | None]:
    return {row.name: row.reason for row in rows(layout)}


def test_on_two_nodes_of_gpus_everything_runs() -> None:
    assert set(reasons(GPUS).values()) == {None}


@pytest.mark.parametrize("case", CHECKS, ids=lambda case: case.name)
def test_each_row_says_what_a_failure_means_and_names_its_function(case: object) -> None:
    row = next(row for row in rows(GPUS) if row.case is case)
    parameters = list(inspect.signature(function_of(row)).parameters)
    assert len(parameters) == (3 if row.case.launcher == "torchrun" else 2)
    assert len(row.case.meaning) > 20 and row.case.setting
    names = [other.name for other in rows(GPUS)]
    assert row.after == "" or names.index(row.after) < names.index(row.name)


def test_one_process_on_a_cpu_skips_what_needs_more() -> None:
    found = reasons(CPU)
    assert found[MODELS] is None and found["packing"] is None and found["log-probabilities (vllm)"] is None
    assert found["sharding (full)"] == "needs 2 processes"
    assert found[f"bandwidth ({WITHIN})"] == "needs 2 processes on a node"
    assert found[f"bandwidth ({BETWEEN})"] == "needs 2 nodes"
    assert found["sleep and wake"] == found["compile"] == "applies to GPUs only"
    assert found["weight transfer (hf, other devices, host)"] is not None


def test_missing_packages_are_named() -> None:
    assert reasons(Layout("cuda", 1, 8, frozenset({"ray", "tensordict"})))["tensor parallel 2"] == "not installed: vllm"
    found = reasons(Layout("cuda", 1, 8, frozenset()))
    assert found["liger"] == "not installed: liger-kernel"
    assert found["speed of PPO"] == "not installed: ray, tensordict" and found["packing"] is None


def test_sharding_modes_and_transfers_come_from_their_tables() -> None:
    names = reasons(GPUS)
    modes = set(get_args(TrainingConfig.model_fields["sharding"].annotation)) - {"auto"}
    assert {name for name in names if name.startswith("sharding")} == {f"sharding ({mode})" for mode in modes}
    assert {placing.transfer for placing in placings("cuda")} >= WEIGHT_TRANSFERS.keys()
    assert {placing.engine for placing in placings("cuda")} == {
        name for name, spec in ENGINES.items() if "cuda" in spec.dtypes
    }


def test_placements_have_settings_that_fit_the_layout() -> None:
    other = Placing.of_name("vllm, other devices, nccl", "cuda")
    assert other.settings(GPUS)["pools.spec"] == {"trainer": [7, 7], "engines": [1, 1]}
    assert splits(Layout("cuda", 3, 1, EVERYTHING)) == {"trainer": [1, 1], "engines": [1]}
    assert splits(CPU) is None
    assert "pools.spec" not in Placing.of_name("vllm, same devices, ipc", "cuda").settings(GPUS)


def test_the_lines_carry_meaning_and_setting_from_the_start() -> None:
    line = next(row for row in rows(CPU) if row.name == "packing").line()
    assert (line.state, line.setting) == ("planned", "trainer.packing=false for supervised fine-tuning")
    skipped = next(row for row in rows(CPU) if row.name == "compile").line()
    assert (skipped.state, skipped.found) == ("skipped", "applies to GPUs only")


def test_groups_of_ranks() -> None:
    assert rank_groups(2, 3, WITHIN) == [[0, 1, 2], [3, 4, 5]]
    assert rank_groups(2, 3, BETWEEN) == [[0, 3], [1, 4], [2, 5]]


def test_the_reward_has_a_signal() -> None:
    reward = importlib.import_module("hpc_rl.probes.acceptance.rewards").characters
    assert len({reward(text, None) for text in ("a", "b", "ab", "")}) == 4
