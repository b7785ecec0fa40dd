from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hpc_rl.errors import UserError
from hpc_rl.rl.carriers.base import AtOnce, dealt_shards
from hpc_rl.rl.carriers.carriers import needed_by_driver
from hpc_rl.rl.carriers.queue_client import refuse_other_version
from hpc_rl.rl.carriers.through_ray import RayCarrier
from hpc_rl.rl.dealing import Deal, deal_step
from hpc_rl.rl.experience import jagged, jagged_rows
from tests.rl.ppo_config import ppo_config


def experience() -> tuple[TensorDict, Deal]:
    prompts = [np.arange(n, dtype=np.int32) for n in (3, 1, 2)]
    responses = [np.arange(n, dtype=np.int32) + 10 for n in (2, 4, 1)]
    columns = {"prompt_ids": jagged_rows(prompts), "response_ids": jagged_rows(responses)}
    deal = deal_step(np.array([5, 5, 3]), np.array([2, 4, 1]), None, 2, 8)
    return TensorDict(columns, batch_size=[3]), deal


def test_calls_of_ray_contain_shards_and_columns() -> None:
    step, deal = experience()
    parcels = RayCarrier().shards(step, deal)
    for parcel, expected in zip(parcels, dealt_shards(step, deal), strict=True):
        np.testing.assert_array_equal(parcel.open().tokens, expected.tokens)
        assert parcel.open().mini_batches == expected.mini_batches
    column = jagged(torch.arange(7.0), torch.tensor([2, 4, 1]))
    parts = [parcel.open()["advantages"] for parcel in RayCarrier().columns(deal, {"advantages": column})]
    np.testing.assert_array_equal(deal.join(parts), np.arange(7.0))
    assert RayCarrier().kept(deal, torch.tensor([2, 4, 1])) is None
    np.testing.assert_array_equal(AtOnce().send(parts[0]), parts[0])


@pytest.mark.parametrize(
    "options, expected",
    [
        ((), set()),
        (("algorithm.kl.where=loss", "algorithm.kl.coef=0.1", "algorithm.kl.estimator=k3"), set()),
        (("algorithm.kl.where=reward", "algorithm.kl.coef=0.1"), {"old_logprobs", "ref_logprobs"}),
        (("algorithm.tis_cap=2",), {"old_logprobs"}),
        (("rollout.calculate_log_probs=true",), {"old_logprobs"}),
        (("teacher.path=/teacher",), {"old_logprobs"}),
    ],
)
def test_columns_that_the_driver_needs(options: tuple[str, ...], expected: set[str]) -> None:
    assert needed_by_driver(ppo_config(*options)) == expected | {"values", "teacher_logprobs"}


@pytest.mark.parametrize("version", ["0.1.10", "0.1.12", "1.0"])
def test_another_version_is_refused(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version, tmp_path, monkeypatch)
    with pytest.raises(
        UserError, match=rf"needs TransferQueue >= 0\.1\.11, < 0\.1\.12, and this Python has {version}:"
    ):
        refuse_other_version()


@pytest.mark.parametrize("version", ["0.1.11", "0.1.11.post1"])
def test_versions_that_work(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version, tmp_path, monkeypatch)
    refuse_other_version()


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match=r"this Python has none: install it by pip install '\.\[transfer-queue\]'"):
        refuse_other_version()


def install(version: str, folder: Path, monkeypatch: Any) -> None:
    """Put what pip records about an installed package in front of all others."""
    record = folder / f"transferqueue-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: TransferQueue\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
