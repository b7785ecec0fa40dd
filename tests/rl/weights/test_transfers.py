"""The table of weight transfers."""

from __future__ import annotations

import importlib
import inspect

import pytest

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.rl.weights.transfers import WEIGHT_TRANSFERS, Opener, choose_transfer


@pytest.mark.parametrize("name", WEIGHT_TRANSFERS)
def test_every_row_names_a_module_with_an_opener(name: str) -> None:
    module = importlib.import_module(WEIGHT_TRANSFERS[name].module)
    expected = [*inspect.signature(Opener.__call__).parameters][1:]
    assert [*inspect.signature(module.open_sender).parameters] == expected


@pytest.mark.parametrize("engine", [name for name, spec in ENGINES.items() if spec.transfers])
def test_every_engine_has_a_transfer_for_every_placement(engine: str) -> None:
    spec = ENGINES[engine]
    assert set(spec.transfers) <= WEIGHT_TRANSFERS.keys()
    for device in spec.dtypes:
        for shared in (True, False):
            assert choose_transfer(spec.transfers, device, shared) in spec.transfers


def test_transfers_follow_the_placement() -> None:
    vllm, hf = ENGINES["vllm"].transfers, ENGINES["hf"].transfers
    assert [choose_transfer(vllm, "cuda", shared) for shared in (True, False)] == ["ipc", "nccl"]
    assert [choose_transfer(vllm, "cpu", shared) for shared in (True, False)] == ["host", "host"]
    assert [choose_transfer(hf, "cuda", shared) for shared in (True, False)] == ["host", "host"]
