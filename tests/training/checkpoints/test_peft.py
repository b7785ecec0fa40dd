"""peft loads exported adapters, and adapters that peft has trained can be continued: `make test-peft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hpc_rl.config.training.common import LoraConfig, ModelConfig, TrainingConfig
from hpc_rl.training.checkpoints.export import export
from hpc_rl.training.models.causal_lm import causal_lm
from hpc_rl.training.models.loading import load_sharded, trained_weights
from hpc_rl.training.parallel.distributed import World
from tests.finetune import test_preferences as pairs
from tests.finetune.jobs import run_here

peft = pytest.importorskip("peft", reason="peft is not installed: make test-peft")
ALONE = World(rank=0, size=1, device=torch.device("cpu"))
IDS = torch.arange(4, 40)[None]
folder = pairs.folder
AUTO: dict[str, Any] = {"dpo": AutoModelForCausalLM, "rm": AutoModelForSequenceClassification}


@pytest.mark.parametrize("kind", ["dpo", "rm"])
@pytest.mark.parametrize("targets", ["[]", "[q_proj, model.layers.1.mlp.up_proj]"])
def test_peft_computes_the_same_as_the_merged_model(folder: Path, tmp_path: Path, kind: str, targets: str) -> None:
    name = {"dpo": "simpo", "rm": "pairs"}[kind]
    lora = f"model.lora={{rank: 3, alpha: 12, target_modules: {targets}}}"
    base = ["--kind", kind, *pairs.overrides(folder, kind, name), lora, "trainer.total_training_steps=3"]
    assert run_here(base, tmp_path / "run") == 0
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    export(tmp_path / "run", tmp_path / "adapters", merge=False)
    options = {"num_labels": 1} if kind == "rm" else {}
    plain = AUTO[kind].from_pretrained(folder / "model", **options)
    plain.config.pad_token_id = 0
    before = plain(IDS).logits
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    merged = AUTO[kind].from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(loaded(IDS).logits, merged(IDS).logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(loaded(IDS).logits, before, atol=1e-3)


def test_training_continues_from_adapters_of_peft(folder: Path, tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), settings)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path)
    config = ModelConfig(path=str(folder / "model"), lora=LoraConfig(path=str(tmp_path)))
    ours = load_sharded(causal_lm(config), ALONE, TrainingConfig())
    assert ours.adapters is not None and (ours.adapters.rank, ours.adapters.alpha) == (2, 6.0)
    expected = theirs.state_dict()
    for name, weight in trained_weights(ours).items():
        theirs_name = name.replace(".lora_A.weight", ".lora_A.default.weight").replace("_B.weight", "_B.default.weight")
        assert torch.equal(weight, expected[f"base_model.model.{theirs_name}"]), name
