"""What the table of docs/models.md tells is what its checks find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from hpc_rl.formats.model_kind import MIXERS
from tests.marks import long
from tests.models_table import cells
from tests.models_table.cells import installed, read_cells, read_versions, write_cells
from tests.models_table.checks import COLUMNS, Row, Tools, cells_of
from tests.models_table.page import rendered, table_of_page
from tests.rl.rollout.vllm.test_engine import needs_vllm
from tests.small_models.families import FAMILIES

OFTEN = ("gemma2", "deepseek_v3", "granitemoehybrid", "qwen3_5")
"""Families that have windows, capped logits and scores, latent attention, experts, scaled logits, two kinds of layers
with a state, tied weights, and parts for images."""
OFTEN_IN_VLLM = ("gpt_oss", "granitemoehybrid")
"""Families with weights that vLLM writes itself, and with layers that have a state."""
FAST = [name for name in COLUMNS if name != "vllm"]
of_these_versions = pytest.mark.skipif(
    installed("transformers").rpartition(".")[0] != read_versions()["transformers"].rpartition(".")[0],
    reason=f"the table was made with transformers {read_versions()['transformers']}",
)


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    found = Tools()
    yield found
    found.close()


@of_these_versions
@pytest.mark.parametrize("kind", [kind if kind in OFTEN else long(kind) for kind in FAMILIES])
def test_a_family(tmp_path: Path, tools: Tools, kind: str) -> None:
    committed = read_cells()[kind]
    assert cells_of(Row(kind, tmp_path, tools), FAST, {}) == {name: committed[name] for name in FAST}


@of_these_versions
@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind if kind in OFTEN_IN_VLLM else long(kind) for kind in FAMILIES])
def test_a_family_in_vllm(tmp_path: Path, tools: Tools, kind: str) -> None:
    committed = read_cells()[kind]
    assert cells_of(Row(kind, tmp_path, tools), ["vllm"], committed) == {"vllm": committed["vllm"]}


def test_the_page_shows_the_cells() -> None:
    assert table_of_page() == rendered(read_cells()), "run python -m tests.models_table --only-page"


@of_these_versions
def test_cells_that_are_written_again_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed, copy = cells.FILE.read_text(), tmp_path / "cells.json"
    copy.write_text(committed)
    monkeypatch.setattr(cells, "FILE", copy)
    write_cells(read_cells())
    assert json.loads(copy.read_text())["cells"] == json.loads(committed)["cells"]
    assert list(tmp_path.iterdir()) == [copy]


def test_there_is_a_cell_for_each_check_of_each_family() -> None:
    committed = read_cells()
    assert list(committed) == list(FAMILIES) and len(FAMILIES) >= 32
    assert all(list(found) == list(COLUMNS) for found in committed.values())
    assert all(cell.note for found in committed.values() for cell in found.values() if cell.verdict != "yes")


@of_these_versions
def test_every_family_with_a_state_is_in_the_table() -> None:
    tried = {kind.removesuffix("_text") for kind in FAMILIES}
    assert {kind.removesuffix("_text") for kind in MIXERS if kind in CONFIG_MAPPING} <= tried
