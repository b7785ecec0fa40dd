"""The table of the training checks: which apply to a job, and what each line says."""

import importlib
import inspect
from typing import get_args

import pytest

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.formats.layouts import WITHOUT_CHECK, Covered
from hpc_rl.probes.acceptance.bench import Layout
from hpc_rl.probes.acceptance.network import BETWEEN, WITHIN, rank_groups
from hpc_rl.probes.acceptance.placements import parallel_placing, placings, splits
from hpc_rl.probes.acceptance.session import function_of
from hpc_rl.probes.acceptance.table import CHECKS, MODELS, compiled_of, placing_of, rows
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
    without = reasons(Layout("cuda", 1, 8, frozenset({"ray", "tensordict"})))
    assert without["tensor parallel (2, same devices)"] == "not installed: vllm"
    found = reasons(Layout("cuda", 1, 8, frozenset()))
    assert found["liger"] == "not installed: liger-kernel"
    assert found["speed of PPO"] == "not installed: ray, tensordict" and found["packing"] is None


def test_sharding_modes_and_transfers_come_from_their_tables() -> None:
    names = reasons(GPUS)
    modes = set(get_args(TrainingConfig.model_fields["sharding"].annotation)) - {"auto"}
    assert {name for name in names if name.startswith("sharding")} == {f"sharding ({mode})" for mode in modes}
    assert {placing.transfer for placing in placings(GPUS)} >= WEIGHT_TRANSFERS.keys()
    assert {placing.engine for placing in placings(GPUS)} == {
        name for name, spec in ENGINES.items() if "cuda" in spec.dtypes
    }


def test_placements_have_settings_that_fit_the_layout() -> None:
    other = placing_of(GPUS, "vllm, other devices, nccl, 7 + 1").settings(GPUS)
    assert other["pools.spec"] == {"trainer": [7, 7], "engines": [1, 1]}
    assert "pools.spec" not in placing_of(GPUS, "vllm, same devices, ipc").settings(GPUS)


@pytest.mark.parametrize(
    ("nodes", "processes", "counts"), [(2, 2, "1 + 1"), (2, 1, "1 + 1"), (3, 1, "2 + 1"), (2, 4, "3 + 1")]
)
def test_the_names_of_placements_count_a_node_or_all_nodes(nodes: int, processes: int, counts: str) -> None:
    names = [placing.name for placing in placings(Layout("cpu", nodes, processes, EVERYTHING))]
    assert f"hf, other devices, host, {counts}" in names


@pytest.mark.parametrize(
    ("nodes", "processes", "found"),
    [
        (1, 1, [((1,), ())]),
        (2, 1, [((1,), (1,))]),
        (3, 1, [((1, 1), (1,))]),
        (1, 2, [((1,), (1,))]),
        (1, 3, [((2,), (1,))]),
        (1, 4, [((3,), (1,)), ((2,), (2,))]),
        (1, 8, [((7,), (1,)), ((4,), (4,))]),
        (2, 4, [((3, 3), (1, 1)), ((2, 2), (2, 2))]),
    ],
)
def test_which_devices_are_the_engines(nodes: int, processes: int, found: object) -> None:
    assert splits(Layout("cuda", nodes, processes, EVERYTHING)) == found


@pytest.mark.parametrize(
    ("processes", "size", "shared", "found"),
    [
        (2, 2, True, ((2,), None)),
        (3, 2, True, None),
        (2, 2, False, None),
        (3, 2, False, ((1,), (2,))),
        (4, 2, False, ((2,), (2,))),
        (8, 2, False, ((4,), (4,))),
        (4, 4, True, ((4,), None)),
        (4, 4, False, None),
        (6, 4, False, ((2,), (4,))),
        (8, 4, False, ((4,), (4,))),
    ],
)
def test_where_engines_with_tensor_parallelism_are(processes: int, size: int, shared: bool, found: object) -> None:
    placing = parallel_placing(Layout("cuda", 1, processes, EVERYTHING), size, shared)
    assert (placing and (placing.trainers, placing.engines)) == found
    if placing is not None:
        assert placing.settings(GPUS)["rollout.tensor_parallel_size"] == size


def covers(nodes: int, processes: int, device: str = "cuda") -> dict[str, list[Covered]]:
    return {row.name: list(row.covers) for row in rows(Layout(device, nodes, processes, EVERYTHING)) if row.covers}


def test_two_gpus_cover_the_default_of_grpo_and_nccl() -> None:
    assert covers(1, 2) == {
        "sharding (full)": [Covered.SHARDED],
        "sequence parallel (2)": [Covered.SEQUENCE_2],
        "checkpoint and resume": [Covered.RESUMED],
        "weight transfer (vllm, same devices, ipc)": [Covered.IPC_2],
        "weight transfer (vllm, other devices, nccl, 1 + 1)": [Covered.NCCL_1],
        "tensor parallel (2, same devices)": [Covered.IPC_TP2],
        "compiled engines (tensor parallel 1)": [Covered.COMPILED_2],
    }


def test_four_gpus_cover_three_ranks_with_one_engine_and_two_engines_of_two_gpus() -> None:
    found = covers(1, 4)
    assert found["weight transfer (vllm, other devices, nccl, 3 + 1)"] == [Covered.NCCL_3]
    assert found["weight transfer (vllm, other devices, nccl, 2 + 2)"] == [Covered.NCCL_2_2]
    assert found["weight transfer (hf, other devices, host, 3 + 1)"] == [Covered.HOST_3]
    assert found["tensor parallel (2, same devices)"] == [Covered.IPC_TP2_2]
    assert found["tensor parallel (2, other devices)"] == [Covered.NCCL_TP2]
    assert found["compiled engines (tensor parallel 2)"] == [Covered.COMPILED_TP2_2]
    assert "tensor parallel (4, other devices)" not in found


def test_one_gpu_and_cpus_cover_what_they_can() -> None:
    assert covers(1, 1) == {
        "loss and gradients": [Covered.ONE_RANK],
        "weight transfer (vllm, same devices, ipc)": [Covered.IPC_1],
    }
    assert set(covers(1, 4, "cpu")) == {
        *("sharding (full)", "sequence parallel (2)", "sequence parallel (4)", "checkpoint and resume"),
        "weight transfer (hf, other devices, host, 3 + 1)",
    }


def test_every_layout_has_a_check_or_is_said_to_have_none() -> None:
    layouts = [(nodes, processes) for nodes in (1, 2, 3) for processes in (1, 2, 4, 8)]
    found = {layout for one in layouts for row in covers(*one).values() for layout in row}
    assert found == set(Covered) - set(WITHOUT_CHECK)


def test_compiled_engines_with_tensor_parallelism_are_at_least_two() -> None:
    assert compiled_of(Layout("cuda", 1, 2, EVERYTHING), "tensor parallel 2") is None
    assert compiled_of(Layout("cuda", 1, 2, EVERYTHING), "tensor parallel 1") is not None


def test_the_lines_carry_meaning_and_setting_from_the_start() -> None:
    line = next(row for row in rows(CPU) if row.name == "packing").line()
    assert (line.state, line.setting) == ("planned", "trainer.packing=false for supervised fine-tuning")
    skipped = next(row for row in rows(CPU) if row.name == "compile").line()
    assert (skipped.state, skipped.found) == ("skipped", "applies to GPUs only")
    covering = next(row for row in rows(GPUS) if row.name == "sharding (hybrid)").line()
    assert covering.covers == ("training with hybrid sharding over 2 or more nodes of 2 or more ranks",)


def test_groups_of_ranks() -> None:
    assert rank_groups(2, 3, WITHIN) == [[0, 1, 2], [3, 4, 5]]
    assert rank_groups(2, 3, BETWEEN) == [[0, 3], [1, 4], [2, 5]]


def test_the_reward_has_a_signal() -> None:
    reward = importlib.import_module("hpc_rl.probes.acceptance.rewards").characters
    assert len({reward(text, None) for text in ("a", "b", "ab", "")}) == 4
