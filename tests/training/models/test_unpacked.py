"""With trainer.packing=false, models train of which packed rows would be wrong."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel.distributed import World
from tests.finetune.jobs import run_here, run_job, series
from tests.helpers import write_chats
from tests.marks import long
from tests.small_models.families import make_model

WORLD = World(0, 1, torch.device("cpu"))
KINDS = ("llama4_text", "bloom", "deepseek_v32", "falcon_mamba", "zamba")


def load(path: str, **options: Any) -> CausalLM:
    config = ModelConfig.model_validate({"path": path, "dtype": "float32", **options})
    return load_sharded(causal_lm(config), WORLD, TrainingConfig(packing=False))


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_refused_in_packed_rows(tmp_path: Path, kind: str) -> None:
    pretrained = causal_lm(ModelConfig(path=str(make_model(tmp_path, kind))))
    with pytest.raises(UserError, match=r"cannot be trained in packed rows: .* use trainer.packing=false: one sample"):
        load_sharded(pretrained, WORLD, TrainingConfig())


@pytest.mark.parametrize("kind", ["llama4_text", *(long(kind) for kind in KINDS if kind != "llama4_text")])
def test_two_ranks_stop_resume_and_export(tmp_path: Path, kind: str) -> None:
    base = [
        f"model.path={make_model(tmp_path / 'base', kind)}",
        f"data.train_files={write_chats(tmp_path / 'train.jsonl', 19)}",
        *("data.train_batch_size=7", "optim.lr=1e-2", "trainer.device=cpu", "trainer.packing=false"),
    ]
    start = partial(run_job, base, tmp_path / "run", "trainer.sharding=full", ranks=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    assert [code for code, _, _ in start()] == [EXIT_STOPPED] * 2
    (tmp_path / "run" / "stop").unlink()
    results = start()
    assert [code for code, _, _ in results] == [0, 0], results
    assert run_here(base, tmp_path / "whole", "trainer.export=false") == 0
    losses = series(tmp_path / "run", "train/loss")
    assert losses == pytest.approx(series(tmp_path / "whole", "train/loss"), abs=1e-3) and losses[-1] < losses[0]
    before, exported = (load(str(folder)) for folder in (tmp_path / "base", tmp_path / "run" / "model"))
    same = [torch.equal(a, b) for a, b in zip(before.hf.parameters(), exported.hf.parameters(), strict=True)]
    assert sum(same) < len(same) / 2


def test_pairs_on_two_ranks(tmp_path: Path) -> None:
    """Both samples of a pair are in one row, and a rank without a pair computes as many passes."""
    pairs = [
        {"prompt": f"{n}?", "chosen": "Yes." * (1 + n % 3), "rejected": "No, " * (n % 4) + "no."} for n in range(9)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    base = [
        *("--kind", "dpo"),
        f"model.path={make_model(tmp_path / 'base', 'falcon_mamba')}",
        f"data.train_files={tmp_path / 'pairs.jsonl'}",
        *("data.train_batch_size=3", "optim.lr=1e-2", "trainer.device=cpu", "trainer.packing=false"),
        "trainer.export=false",
    ]
    results = run_job(base, tmp_path / "two", "trainer.sharding=full", ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    assert run_here(base, tmp_path / "one") == 0
    losses = series(tmp_path / "two", "train/loss")
    assert losses == pytest.approx(series(tmp_path / "one", "train/loss"), abs=1e-4) and losses[-1] < losses[0]


def test_an_encoder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings do not matter: a token must not depend on those after it."""
    monkeypatch.setattr("hpc_rl.formats.model_families.REFUSALS", {})
    path = str(make_model(tmp_path, "bert"))
    with pytest.raises(UserError, match="bert cannot be trained: the hidden states of a token depend on the tokens"):
        load(path)
