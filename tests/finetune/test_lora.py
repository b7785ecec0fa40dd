"""Training of adapters: gradients of a plain loop however the work is split, exact resuming, and a free reference."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hpc_rl.config.compose import compose
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.errors import EXIT_STOPPED, AgreedError, UserError
from hpc_rl.finetune import reference
from hpc_rl.finetune.trainer import load, step
from hpc_rl.run_dir import RunDir
from hpc_rl.training.checkpoints import checkpoint, folders, model_state
from hpc_rl.training.checkpoints.export import export
from hpc_rl.training.models import loading, lora
from hpc_rl.training.perf import Clock
from tests.finetune import test_preferences as pairs
from tests.finetune.jobs import ALONE, run_here, run_job, run_several, series
from tests.helpers import write_chats
from tests.marks import long

LORA = ["model.lora={rank: 3, alpha: 12}"]
SCALE = 4.0
KINDS = ("sft", "dpo", "rm")
SPLITS = {
    "packed": [],
    "unpacked": ["trainer.packing=false", "model.enable_gradient_checkpointing=true"],
    "many micro-batches": ["trainer.micro_tokens=512"],
}
folder = pairs.folder


def overrides(folder: Path, kind: str) -> list[str]:
    if kind != "sft":
        name = {"dpo": "sigmoid", "rm": "pairs"}[kind]
        return [*(word for word in pairs.overrides(folder, kind, name) if not word.startswith("ref.path")), *LORA]
    return [
        f"model.path={folder / 'model'}",
        f"data.train_files={write_chats(folder / 'train.jsonl', 31)}",
        f"data.val_files={write_chats(folder / 'val.jsonl', 9)}",
        *("data.train_batch_size=8", "optim.lr=1e-2", "trainer.device=cpu", "trainer.total_epochs=2"),
        *("data.max_length=256", "trainer.micro_tokens=1024", "trainer.test_freq=3", "trainer.export=false"),
        *LORA,
    ]


def config_of(kind: str, words: list[str]) -> FinetuneConfig:
    config = compose(kind, words)
    assert isinstance(config, FinetuneConfig)
    return config


class Sum(nn.Module):
    """weight + scale * B A, as a parametrization of a weight."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + SCALE * self.up @ self.down


def plain_model(folder: Path, kind: str, trained: dict[str, torch.Tensor]) -> tuple[Any, dict[str, nn.Parameter]]:
    """Return transformers' own model with these adapters in its weights, and its adapters by our names."""
    auto = AutoModelForSequenceClassification if kind == "rm" else AutoModelForCausalLM
    options = {"num_labels": 1} if kind == "rm" else {}
    model = auto.from_pretrained(folder / "model", attn_implementation="eager", **options)
    named: dict[str, nn.Parameter] = {}
    for name, down in trained.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            added = Sum(down, trained[f"{layer}.lora_B.weight"])
            parametrize.register_parametrization(model.get_submodule(layer), "weight", added)
            named |= {name: added.down, f"{layer}.lora_B.weight": added.up}
        elif "lora_" not in name:
            model.get_parameter(name).data = trained[name].clone()
            named[name] = model.get_parameter(name)
    return model, named


def plain_sft(model: Any, batch: list[Any]) -> torch.Tensor:
    found = [pairs.logprobs(model, sample) for sample in batch]
    return -sum((total for total, _ in found), torch.zeros(())) / sum(count for _, count in found)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_those_of_a_plain_loop(folder: Path, tmp_path: Path, kind: str) -> None:
    for split, more in SPLITS.items():
        config = config_of(kind, [*overrides(folder, kind), *more])
        state = load(config, RunDir(tmp_path / split), ALONE)
        torch.manual_seed(1)
        named = dict(state.model.hf.named_parameters())
        for name, parameter in named.items():  # B and a new head are 0: nothing before them would have a gradient
            if parameter.requires_grad and not name.endswith("lora_A.weight"):
                nn.init.normal_(parameter, std=0.3)
        trained = {key: one.detach().clone() for key, one in named.items() if one.requires_grad}
        assert all(".lora_" in key or key == "score.weight" for key in trained)
        gradients: dict[str, torch.Tensor] = {}

        def note(*_: Any, named: Any = named, gradients: Any = gradients) -> None:
            gradients.update({key: one.grad.clone() for key, one in named.items() if one.grad is not None})

        state.optimizer.register_step_pre_hook(note)
        order = np.random.default_rng([config.trainer.seed, 0]).permutation(len(state.data.items))
        batch = [state.data.items[index] for index in order[:8]]
        found = step(state.__class__(**{**vars(state), "config": config.updated("optim.clip_grad", 0.0)}), Clock())
        plain, own = plain_model(folder, kind, trained)
        if kind == "sft":
            expected = plain_sft(plain, batch)
        elif kind == "dpo":
            base = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
            expected = pairs.plain_dpo("sigmoid", config, plain, base, batch)
        else:
            expected = pairs.plain_rm("pairs", plain, batch)
        expected.backward()
        assert found["train/loss"] == pytest.approx(expected.item(), abs=1e-4), split
        assert gradients.keys() == own.keys() == trained.keys()
        assert max(float(one.abs().max()) for one in gradients.values()) > 1e-2
        for key, one in own.items():
            torch.testing.assert_close(gradients[key], one.grad, atol=1e-4, rtol=1e-4, msg=f"{split}: {key}")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {kind: tmp_path_factory.mktemp("runs") / kind for kind in KINDS}
    for kind, run in runs.items():
        assert run_here(["--kind", kind, *overrides(folder, kind)], run) == 0
        assert series(run, "train/loss")[-1] < series(run, "train/loss")[0]
    return runs


def same_as(expected: Path, found: Path) -> None:
    records = map(json.loads, (expected / "metrics.jsonl").read_text().splitlines())
    names = {name for record in records for name in record if name.startswith(("train/", "val/"))}
    assert {"train/loss", "train/grad_norm", "val/loss"} <= names
    for name in names:
        assert series(found, name) == pytest.approx(series(expected, name), abs=1e-4), name


@pytest.mark.parametrize("kind", [long("sft"), "dpo", long("rm")])
def test_two_ranks(folder: Path, tmp_path: Path, uninterrupted: dict[str, Path], kind: str) -> None:
    base = ["--kind", kind, *overrides(folder, kind)]
    splits = {"full": [], "none": ["trainer.sharding=none", "trainer.packing=false"]}
    if kind == "dpo":
        splits["live"] = ["ref.precompute_logprobs=false", "trainer.sharding=gradients"]
    results = run_several([(base, tmp_path / split, more) for split, more in splits.items()], ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    for split in splits:
        same_as(uninterrupted[kind], tmp_path / split)


@pytest.mark.parametrize("kind", ["sft", long("dpo"), long("rm")])
def test_stopped_on_two_ranks_and_resumed_on_one(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, Path], kind: str
) -> None:
    base = ["--kind", kind, *overrides(folder, kind), "trainer.total_training_steps=3"]
    expected = tmp_path / "expected"
    assert run_here(base, expected) == 0
    run = tmp_path / "run"
    (run).mkdir()
    (run / "stop").touch()
    codes = [run_job(base, run, ranks=2) for _ in range(2 if kind == "dpo" else 1)]  # DPO stops before its first step
    assert all(code == EXIT_STOPPED for results in codes for code, _, _ in results), codes
    (run / "stop").unlink()
    assert run_here(base, run) == 0
    same_as(expected, run)
    (path, _), (other, _) = (checkpoint.newest(one / "checkpoints") or (Path(), None) for one in (run, expected))
    ours, theirs = (model_state.read_weights(one / folders.MODEL) for one in (path, other))
    assert ours.keys() == theirs.keys()
    assert {name.rpartition(".lora_")[2] or name for name in ours} - {"score.weight"} == {"A.weight", "B.weight"}
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-4, rtol=1e-3)


def test_the_first_values_depend_on_the_seed_only(folder: Path, tmp_path: Path) -> None:
    def values(*more: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(torch.seed())
        state = load(config_of("sft", [*overrides(folder, "sft"), *more]), RunDir(tmp_path), ALONE)
        return {name: value.clone() for name, value in loading.trained_weights(state.model).items()}

    first, again, other = values(), values(), values("trainer.seed=2")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    downs = [value for name, value in first.items() if "lora_A" in name]
    assert all(value.abs().max() <= value.shape[1] ** -0.5 < 1.2 * value.abs().max() for value in downs)
    assert not any(value.any() for name, value in first.items() if "lora_B" in name)


@pytest.mark.parametrize("precompute", ["true", "false"])
def test_dpo_loads_one_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precompute: str) -> None:
    loaded: list[str] = []
    load_module = loading.Pretrained.load_module

    def counted(self: Any) -> Any:
        loaded.append(self.path)
        return load_module(self)

    monkeypatch.setattr(loading.Pretrained, "load_module", counted)
    words = [*overrides(folder, "dpo"), f"ref.precompute_logprobs={precompute}"]
    state = load(config_of("dpo", words), RunDir(tmp_path / "own"), ALONE)
    assert loaded == [str(folder / "model")]
    margins = step(state, Clock())
    assert margins["train/margin"] == pytest.approx(0, abs=1e-5)  # the policy is still the reference
    assert step(state, Clock())["train/margin"] != pytest.approx(0, abs=1e-4)
    other = [*words, f"ref.path={folder / 'other'}"]
    load(config_of("dpo", other), RunDir(tmp_path / "other"), ALONE)
    assert loaded[1:] == [str(folder / "other"), str(folder / "model")]


def test_the_stored_reference_is_that_of_a_full_run(folder: Path, tmp_path: Path) -> None:
    words = overrides(folder, "dpo")
    whole = [word for word in words if word not in LORA]
    for name, own in {"adapters": words, "whole": whole}.items():
        load(config_of("dpo", own), RunDir(tmp_path / name), ALONE)
    (own_path,), (whole_path,) = ([*(tmp_path / name).glob("ref_logprobs/*/*.npy")] for name in ("adapters", "whole"))
    assert own_path.parent.name == whole_path.parent.name
    np.testing.assert_allclose(np.load(own_path)["logprobs"], np.load(whole_path)["logprobs"], atol=1e-5)


def test_the_stored_reference_belongs_to_its_quantisation() -> None:
    words = [*("model.path=m", "data.train_files=f", "data.val_files=f"), *LORA, "trainer.device=cuda"]
    four_bit = [*words, "model.lora.quantize=nf4"]
    own, own_four_bit = (reference._key(config_of("dpo", each), []) for each in (words, four_bit))
    assert own != own_four_bit
    other, other_four_bit = (reference._key(config_of("dpo", [*each, "ref.path=r"]), []) for each in (words, four_bit))
    assert other == other_four_bit, "only the policy has 4 bits"


@pytest.mark.parametrize("kind", ["sft", "rm"])
def test_exports(folder: Path, tmp_path: Path, uninterrupted: dict[str, Path], kind: str) -> None:
    export(uninterrupted[kind], tmp_path / "merged")
    export(uninterrupted[kind], tmp_path / "adapters", merge=False)
    path, _ = checkpoint.newest(uninterrupted[kind] / "checkpoints") or (Path(), None)
    trained = model_state.read_weights(path / folders.MODEL)
    plain, _ = plain_model(folder, kind, trained)
    auto = AutoModelForSequenceClassification if kind == "rm" else AutoModelForCausalLM
    ids = torch.arange(4, 40)[None]
    torch.testing.assert_close(auto.from_pretrained(tmp_path / "merged")(ids).logits, plain(ids).logits)
    assert {file.name for file in (tmp_path / "adapters").iterdir()} >= {
        *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    }
    assert not (tmp_path / "adapters" / "config.json").exists()
    # a run that continues from the folder starts with its values
    words = [word for word in overrides(folder, kind) if word not in LORA]
    again = load(
        config_of(kind, [*words, f"model.lora.path={tmp_path / 'adapters'}"]), RunDir(tmp_path / "again"), ALONE
    )
    assert (again.model.adapters.rank, again.model.adapters.alpha) == (3, 12.0)  # type: ignore[union-attr]
    for name, value in loading.trained_weights(again.model).items():
        torch.testing.assert_close(value, trained[name], atol=0, rtol=0)


def test_the_run_writes_what_merge_says(folder: Path, tmp_path: Path) -> None:
    base = [*overrides(folder, "sft"), "trainer.total_training_steps=1", "trainer.export=true"]
    assert run_here(base, tmp_path / "merged") == 0
    assert run_here([*base, "model.lora.merge=false"], tmp_path / "adapters") == 0
    assert (tmp_path / "merged" / "model" / "model.safetensors").exists()
    assert (tmp_path / "adapters" / "model" / "adapter_model.safetensors").exists()
    export(tmp_path / "adapters", tmp_path / "out", merge=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_merged_weights_are_rounded_as_engines_get_them(folder: Path, tmp_path: Path) -> None:
    assert run_here([*overrides(folder, "sft"), "trainer.total_training_steps=1"], tmp_path / "run") == 0
    for dtype in ("float32", "bfloat16"):
        export(tmp_path / "run", tmp_path / dtype, dtype=dtype)
    exact, found = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    adapted = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(found[adapted], lora.rounded(exact[adapted], torch.bfloat16, adapted))
    assert not torch.equal(found[adapted], exact[adapted].bfloat16())
    embeddings = "model.embed_tokens.weight"
    assert torch.equal(found[embeddings], exact[embeddings].bfloat16())


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (["model.lora.alpha=6"], "its adapters have model.lora.alpha=12.0, and the run has 6.0"),
        (["model.lora.rank=4"], "its adapters have model.lora.rank=3, and the run has 4"),
        (["model.lora.target_modules=[q_proj]"], "model.lora.target_modules=[down_proj, gate_proj, k_proj, "),
        (["model.path={copy}"], "its adapters have model.path={model}, and the run has {copy}"),
        (["model.lora.rank=null", "model.lora.alpha=null"], "it has adapters (model.lora), and the run has none"),
    ],
)
def test_other_adapters_are_not_resumed(folder: Path, tmp_path: Path, other: list[str], problem: str) -> None:
    """They could have the same shapes."""
    paths = {"model": str((folder / "model").resolve()), "copy": str(tmp_path / "copy")}
    shutil.copytree(folder / "model", tmp_path / "copy")
    base = [*overrides(folder, "sft"), "trainer.total_training_steps=1"]
    assert run_here(base, tmp_path / "run") == 0
    changed = [word.replace("{copy}", paths["copy"]) for word in other]
    with pytest.raises(AgreedError, match=re.escape(problem.format(**paths))):
        run_here([*base, *changed], tmp_path / "run")


def test_adapters_do_not_continue_a_whole_model(folder: Path, tmp_path: Path) -> None:
    words = [word for word in overrides(folder, "sft") if word not in LORA]
    base = [*words, "trainer.total_training_steps=1"]
    assert run_here(base, tmp_path / "run") == 0
    with pytest.raises(AgreedError, match=r"it has no adapters, and the run has some \(model\.lora\)"):
        run_here([*base, *LORA], tmp_path / "run")


def test_a_base_that_is_gone(folder: Path, tmp_path: Path) -> None:
    words = [word for word in overrides(folder, "sft") if not word.startswith("model.path")]
    (tmp_path / "model").symlink_to(folder / "model")
    base = [*words, f"model.path={tmp_path / 'model'}", "trainer.total_training_steps=1"]
    assert run_here(base, tmp_path / "run") == 0
    (tmp_path / "model").unlink()
    with pytest.raises(UserError, match=r"the adapters were trained on this model, so make it available, or export"):
        export(tmp_path / "run", tmp_path / "out")
    export(tmp_path / "run", tmp_path / "out", merge=False)


def test_the_reference_of_a_policy_ignores_its_adapters(folder: Path, tmp_path: Path) -> None:
    state = load(config_of("dpo", overrides(folder, "dpo")), RunDir(tmp_path), ALONE)
    batch = state.objective.collate(state.data.items[:4])
    before = reference.Reference(state.model).logprobs(batch)
    for _ in range(2):
        step(state, Clock())
    torch.testing.assert_close(reference.Reference(state.model).logprobs(batch), before, atol=0, rtol=0)
    torch.testing.assert_close(before, batch.ref_PW, atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled(folder: Path, tmp_path: Path, uninterrupted: dict[str, Path]) -> None:
    base = [*overrides(folder, "dpo"), "model.use_torch_compile=true", "ref.precompute_logprobs=false"]
    assert run_here(["--kind", "dpo", *base], tmp_path) == 0
    same_as(uninterrupted["dpo"], tmp_path)
