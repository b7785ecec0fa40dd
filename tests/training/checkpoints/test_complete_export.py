"""Models with parts for images are trained on text, and exported complete, in the layout of their files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.models.causal_lm import causal_lm
from hpc_rl.training.models.loading import load_sharded, weights_of
from tests.finetune.jobs import ALONE, run_here
from tests.helpers import write_chats
from tests.marks import long
from tests.tiny_wrappers import is_of_language, make_wrapper, read_files

pytest.importorskip("transformers.models.gemma4", reason="older versions have fewer of these models")
KINDS = ("gemma3", "mistral3", "qwen3_5")
MORE = (
    *("gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "idefics3", "internvl", "lfm2_vl", "llava"),
    *("llava_next", "llava_onevision", "ovis2", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_5_moe", "qwen3_vl"),
    *("qwen3_vl_moe", "smolvlm"),
)


def options(base: Path, folder: Path) -> list[str]:
    return [
        f"model.path={base}",
        f"data.train_files={write_chats(folder / 'train.jsonl', 15)}",
        *("data.train_batch_size=8", "optim.lr=1e-2", "trainer.device=cpu", "trainer.micro_tokens=1024"),
    ]


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return found


def assert_complete(out: Path, base: Path, beside: Iterable[str] = ()) -> None:
    """The folder has all weights of the base, under their names; those that are not of the language are unchanged."""
    before, after = read_files(base), read_files(out)
    assert after.keys() == before.keys()
    other = {name for name in before if not is_of_language(name)}
    assert other >= set(beside) and len(other) > 3
    for name in other:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)), name
    index = out / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(w.nbytes for w in after.values())
    assert (out / "preprocessor_config.json").read_text() == (base / "preprocessor_config.json").read_text()
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (base, out))
    assert ours["architectures"] == theirs["architectures"] and ours["vision_config"] == theirs["vision_config"]
    AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize("kind", [*KINDS, *(long(kind) for kind in MORE)])
def test_sft_and_export(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_wrapper(tmp_path / "base", kind, predicts_several=kind.startswith("qwen3_5"))
    assert run_here(options(base, tmp_path), tmp_path / "run", "trainer.sharding=full") == 0
    assert "which are not loaded and not trained" in capsys.readouterr().out
    out = tmp_path / "run" / "model"
    assert_complete(out, base, ["mtp.fc.weight"] if kind.startswith("qwen3_5") else [])
    whole, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    (part,) = (tmp_path / "run" / "checkpoints").glob("step-*/model")
    trained, found = model_state.read_weights(part), whole.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in trained.items())
    start = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    assert (logits(whole) - logits(start)).abs().max() > 1e-3
    again = load_sharded(causal_lm(ModelConfig(path=str(out), dtype="float32")), ALONE, TrainingConfig())
    again.hf.set_attn_implementation("eager")
    assert torch.allclose(logits(again.hf), logits(whole), atol=1e-4)
    assert weights_of(again.hf).keys() == trained.keys()
