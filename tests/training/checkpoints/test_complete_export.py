"""Models with parts for images are trained on text, and exported complete, in the layout of their files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification, AutoTokenizer

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.checkpoints.export import export
from hpc_rl.training.models.causal_lm import causal_lm
from hpc_rl.training.models.loading import load_sharded, weights_of
from tests.finetune.jobs import ALONE, run_here, run_job
from tests.finetune.test_preferences import rows
from tests.helpers import write_chats
from tests.marks import long
from tests.small_models.families import make_model
from tests.small_models.wrappers import is_of_language, make_wrapper, read_files

pytest.importorskip("transformers.models.gemma4", reason="older versions have fewer of these models")
KINDS = ("gemma3", "mistral3", "qwen3_5")
MORE = (
    *("gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "idefics3", "internvl", "lfm2_vl", "llava"),
    *("llava_next", "llava_onevision", "ovis2", "qwen2_5_vl", "qwen2_vl", "qwen3_5_moe", "qwen3_vl"),
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
    again.hf.eval().set_attn_implementation("eager")
    assert torch.allclose(logits(again.hf), logits(whole), atol=1e-4)
    assert weights_of(again.hf).keys() == trained.keys()


def preferences(base: Path, folder: Path, kind: str) -> list[str]:
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps({**row, "margin": 0}) + "\n" for row in rows()[:8]))
    own = [word for word in options(base, folder) if not word.startswith("data.train_files")]
    return ["--kind", kind, *own, f"data.train_files={data}", "data.max_length=256"]


def run_folder(path: Path) -> Path:
    path.mkdir()
    (path / "stop").touch()
    return path


@pytest.mark.parametrize("kind", ["qwen3_5", *(long(kind) for kind in ("gemma3", "qwen3_5_moe", "qwen3_vl"))])
def test_two_ranks_resume_and_what_they_export_is_trained_again(tmp_path: Path, kind: str) -> None:
    """SFT on two ranks that stop and resume, then DPO with adapters from what they exported, merged."""
    base, first = make_wrapper(tmp_path / "base", kind), run_folder(tmp_path / "sft")
    assert [code for code, _, _ in run_job(options(base, tmp_path), first, ranks=2)] == [EXIT_STOPPED] * 2
    (first / "stop").unlink()
    results = run_job(options(base, tmp_path), first, ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming after step 1" in results[0][1]
    assert_complete(first / "model", base)
    second = tmp_path / "dpo"
    assert run_here(preferences(first / "model", tmp_path, "dpo"), second, "model.lora={rank: 2}") == 0
    assert_complete(second / "model", first / "model")
    before, after = read_files(first / "model"), read_files(second / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(is_of_language(name) and "layers" in name for name in changed)


def test_adapters_have_the_names_of_the_wrapper(tmp_path: Path) -> None:
    """They name layers of the language model only, also where the tower has layers of the same names."""
    base, run = make_wrapper(tmp_path / "base", "gemma3"), tmp_path / "run"
    lora = ["model.lora={rank: 2, merge: false}", "trainer.total_training_steps=1"]
    assert run_here(options(base, tmp_path), run, *lora) == 0
    whole = AutoModelForImageTextToText.from_pretrained(base)
    layers = {name for name, module in whole.named_modules() if isinstance(module, torch.nn.Linear)}
    settings = json.loads((run / "model" / "adapter_config.json").read_text())
    targets = set(settings["target_modules"])
    assert targets <= layers and all(name.startswith("model.language_model.layers.") for name in targets)
    assert {name for name in layers if name.rpartition(".")[2] in ("q_proj", "v_proj")} > {
        name for name in targets if name.rpartition(".")[2] in ("q_proj", "v_proj")
    }
    stored = load_file(run / "model" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in stored} == targets
    again = tmp_path / "again"
    more = [f"model.lora={{path: {run / 'model'}}}", "trainer.total_training_steps=1"]
    assert run_here(options(base, tmp_path), again, *more) == 0
    assert_complete(again / "model", base)


def test_an_export_needs_the_model_that_training_started_from(tmp_path: Path) -> None:
    base, run = make_wrapper(tmp_path / "base", "mistral3"), tmp_path / "run"
    assert run_here(options(base, tmp_path), run, "trainer.total_training_steps=1", "trainer.export=false") == 0
    base.rename(tmp_path / "moved")
    with pytest.raises(
        UserError, match=r"copies 15 weights .* multi_modal_projector.* there is no such folder; .* --base"
    ):
        export(run, tmp_path / "out")
    make_wrapper(base, "mistral3", num_hidden_layers=1)
    with pytest.raises(UserError, match="it is another model by now"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "out", base=str(tmp_path / "moved"))
    assert_complete(tmp_path / "out", tmp_path / "moved")


def test_several_processes_write_a_complete_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_rl.training.checkpoints import export as exporting

    base, run, out = make_wrapper(tmp_path / "base", "qwen3_5_moe"), tmp_path / "run", tmp_path / "out"
    assert run_here(options(base, tmp_path), run, "trainer.total_training_steps=1") == 0
    monkeypatch.setattr(exporting, "_FILE_BYTES", 40_000)
    written = []
    with exporting.new_folder(run, out) as (path, partial):
        for rank in range(3):
            before = set(partial.glob("*.safetensors"))
            exporting.write_weights(path, partial, "float32", rank, 3)
            written.append(len(set(partial.glob("*.safetensors")) - before))
    assert min(written) > 0
    assert_complete(out, base)
    found, expected = read_files(out), read_files(run / "model")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_reward_model_is_the_language_model_alone(tmp_path: Path) -> None:
    base, run = make_wrapper(tmp_path / "base", "gemma3"), tmp_path / "run"
    assert run_here(preferences(base, tmp_path, "rm"), run) == 0
    model, info = AutoModelForSequenceClassification.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.model_type == "gemma3_text" and not any("vision" in name for name in model.state_dict())


def test_a_layer_that_predicts_several_tokens_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in DeepSeek V3: a layer after the last one, beside experts that transformers merges."""
    base = make_model(tmp_path / "base", "deepseek_v3")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    assert run_here(options(base, tmp_path), tmp_path / "run", "trainer.total_training_steps=1") == 0
    assert "also has model.layers.2 (" in capsys.readouterr().out
    before, after = read_files(base), read_files(tmp_path / "run" / "model")
    assert after.keys() == before.keys() and "model.layers.1.mlp.experts.3.up_proj.weight" in before
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(name.startswith("model.layers.2.") for name in changed)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["num_nextn_predict_layers"] == 1
