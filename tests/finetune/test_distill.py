"""Distillation: the same losses and gradients as a plain loop, however the work is split, stored or live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpc_rl.algorithms.divergences import DIVERGENCES, top_k_logprobs
from hpc_rl.config.compose import compose
from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.finetune import precomputed, teacher
from hpc_rl.finetune.distill import Distill
from hpc_rl.finetune.trainer import load, step
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.training.checkpoints import checkpoint, folders, model_state
from hpc_rl.training.perf import Clock
from tests.finetune.jobs import ALONE, run_here, run_job, run_several, series
from tests.helpers import make_tiny_model, write_chats

KIND = ["--kind", "distill"]
STORED = ["teacher.top_k=7", "teacher.precompute_top_k=true"]
CASES = {
    "forward": ["algorithm.sft_coeff=0.3"],
    "reverse": ["algorithm.divergence=reverse", "algorithm.temperature=2"],
    "js": ["algorithm.divergence=js", "algorithm.js_weight=0.3"],
    "top k": ["teacher.top_k=7", "algorithm.temperature=0.8"],
    "stored": [*STORED, "algorithm.divergence=js"],
}
WHOLE = ("forward", "stored")
"""Cases of which whole runs are compared; of the others, two steps."""
SHARED = ["trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2", "trainer.micro_tokens=512"]
"""Two ranks that compute each row together."""
TWO_RANKS = [[], ["trainer.sharding=none", "trainer.packing=false"], SHARED]
SHORT = ["trainer.total_training_steps=2", "trainer.test_freq=0"]
SHORT_SPLIT = [*SHORT, "trainer.micro_tokens=300"]
SPLITS = {
    "packed": [],
    "unpacked": ["trainer.packing=false", "model.enable_gradient_checkpointing=true"],
    "many micro-batches": ["trainer.micro_tokens=300"],
}
TOKENS = 320
"""Outputs of the student; the teacher has more, as models of one family with heads of different sizes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    make_tiny_model(folder / "model", tie=True)
    make_tiny_model(folder / "teacher", hidden=48)
    padded = AutoModelForCausalLM.from_pretrained(folder / "teacher")
    padded.resize_token_embeddings(TOKENS + 8)
    same = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(padded.lm_head.weight, std=0.3, generator=same)  # a teacher with something to say
    padded.save_pretrained(folder / "teacher")
    write_chats(folder / "train.jsonl", 22)
    return folder


def overrides(folder: Path, name: str) -> list[str]:
    return [
        f"model.path={folder / 'model'}",
        f"teacher.path={folder / 'teacher'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'train.jsonl'}",
        *("data.train_batch_size=8", "data.max_length=256", "trainer.micro_tokens=1024", "trainer.test_freq=2"),
        *("optim.lr=1e-2", "trainer.device=cpu", "trainer.total_epochs=2", "trainer.export=false"),
        *CASES[name],
    ]


def config_of(words: list[str]) -> DistillConfig:
    config = compose("distill", words)
    assert isinstance(config, DistillConfig)
    return config


def plain(config: DistillConfig, student: Any, theirs: Any, batch: list[Any]) -> torch.Tensor:
    """The mean loss of the batch's targets, sample by sample, with transformers' own attention and all logits."""
    own, total, targets = config.algorithm, torch.zeros(()), 0
    for item in batch:
        ids = torch.from_numpy(item.sample.input_ids).long()
        rows = torch.from_numpy(item.sample.loss_mask[1:])
        logits = student(input_ids=ids[None]).logits[0, :-1][rows]
        with torch.no_grad():
            taught = theirs(input_ids=ids[None]).logits[0, :-1][rows][:, :TOKENS]
        p, q = ((each / own.temperature).log_softmax(dim=1) for each in (taught, logits))
        if config.teacher.top_k is not None:
            best = p.topk(config.teacher.top_k, dim=1).indices
            p, q = top_k_logprobs(p, best), top_k_logprobs(q, best)
        total = total + own.temperature**2 * DIVERGENCES[own.divergence](p, q, own.js_weight).sum()
        total = total + own.sft_coeff * torch.nn.functional.cross_entropy(logits, ids[1:][rows], reduction="sum")
        targets += int(rows.sum())
    return total / targets


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_a_plain_loop(folder: Path, tmp_path: Path, name: str) -> None:
    for split, more in SPLITS.items():
        config = config_of([*overrides(folder, name), *more])
        state = load(config, RunDir(tmp_path / split), ALONE)
        named = dict(state.model.hf.named_parameters())
        gradients: dict[str, torch.Tensor] = {}
        state.optimizer.register_step_pre_hook(
            lambda *_, named=named, gradients=gradients: gradients.update(
                {key: one.grad.clone() for key, one in named.items() if one.grad is not None}
            )
        )
        order = np.random.default_rng([config.trainer.seed, 0]).permutation(len(state.data.items))
        batch = [state.data.items[index] for index in order[:8]]
        found = step(state.__class__(**{**vars(state), "config": config.updated("optim.clip_grad", 0.0)}), Clock())
        student, theirs = (
            AutoModelForCausalLM.from_pretrained(folder / each, attn_implementation="eager")
            for each in ("model", "teacher")
        )
        expected = plain(config, student, theirs, batch)
        expected.backward()
        assert found["train/loss"] == pytest.approx(expected.item(), abs=1e-4), split
        assert found["train/divergence"] > 0 and found["train/cross_entropy"] > 0
        for key, one in student.named_parameters():
            torch.testing.assert_close(gradients[key], one.grad, atol=1e-4, rtol=1e-4, msg=f"{split}: {key}")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {name: tmp_path_factory.mktemp("runs") / name for name in WHOLE}
    for name, run in runs.items():
        assert run_here([*KIND, *overrides(folder, name)], run) == 0
        losses = series(run, "train/divergence")
        assert losses[-1] < 0.9 * losses[0], "the student learns"
    return runs


@pytest.fixture(scope="module")
def two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """All runs of two ranks by their case, in the same two processes."""
    place = tmp_path_factory.mktemp("two")
    splits = [(name, more) for name in CASES for more in (TWO_RANKS if name in WHOLE else [SHORT_SPLIT])]
    splits += [("stored", ["teacher.precompute_top_k=false", "trainer.sharding=gradients"])]
    splits += [("stored", ["teacher.precompute_top_k=false", *SHARED])]
    runs = [
        ([*KIND, *overrides(folder, name)], place / str(number), more) for number, (name, more) in enumerate(splits)
    ]
    results = run_several(runs, ranks=2, timeout=1500)
    assert [code for code, _, _ in results] == [0, 0], results
    return {name: [run[1] for run, (own, _) in zip(runs, splits, strict=True) if own == name] for name in CASES}


def same_as(expected: Path, found: Path) -> None:
    names = {name for record in read_metrics(expected / "metrics.jsonl") for name in record}
    compared = {name for name in names if name.startswith(("train/", "val/"))}
    assert {"train/loss", "train/divergence", "train/cross_entropy", "train/agreement", "val/divergence"} <= compared
    for name in compared:
        assert series(found, name) == pytest.approx(series(expected, name), abs=1e-4), name
        assert series(found, name)[0] == pytest.approx(series(expected, name)[0], abs=1e-5), "before rounding adds up"


@pytest.mark.parametrize("name", WHOLE)
def test_two_ranks(uninterrupted: dict[str, Path], two_ranks: dict[str, list[Path]], name: str) -> None:
    assert len(two_ranks[name]) == (5 if name == "stored" else 3)
    for run in two_ranks[name]:
        same_as(uninterrupted[name], run)


@pytest.mark.parametrize("name", [name for name in CASES if name not in WHOLE])
def test_two_ranks_of_every_other_loss(
    folder: Path, tmp_path: Path, two_ranks: dict[str, list[Path]], name: str
) -> None:
    """The loss of the second step depends on the direction of the first gradient."""
    assert run_here([*KIND, *overrides(folder, name)], tmp_path, *SHORT) == 0
    for metric in ("train/loss", "train/grad_norm"):
        expected = series(tmp_path, metric)
        assert len(expected) == 2 and all(expected)
        assert series(two_ranks[name][0], metric) == pytest.approx(expected, rel=1e-4, abs=1e-4), metric


def test_stopped_on_two_ranks_and_resumed_on_one(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = [*KIND, *overrides(folder, "stored")]
    (tmp_path / "stop").touch()
    results = run_job(base, tmp_path, ranks=2)
    assert [code for code, _, _ in results] == [EXIT_STOPPED] * 2, results
    assert "the teacher's most probable tokens are stored for 44 of 44 samples or pairs" in results[0][1]
    (tmp_path / "stop").unlink()
    monkeypatch.setattr(teacher, "Teacher", None)  # a resumed run reads what was stored
    assert run_here(base, tmp_path) == 0
    same_as(uninterrupted["stored"], tmp_path)


def test_a_stop_while_the_teacher_computes(
    folder: Path,
    tmp_path: Path,
    uninterrupted: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, asked = [*KIND, *overrides(folder, "stored")], []
    computed = teacher._top_k

    def compute_and_ask(config: Any, theirs: Any, items: Any, world: Any) -> Any:
        asked.append(len(items))
        if sum(asked) == 16:  # at the end of the second round
            (tmp_path / "stop").touch()
        return computed(config, theirs, items, world)

    monkeypatch.setattr(precomputed, "_ROUND", 8)
    monkeypatch.setattr(teacher, "_top_k", compute_and_ask)
    assert run_here(base, tmp_path) == EXIT_STOPPED
    assert "the teacher's most probable tokens are stored for 16 of 44 samples or pairs" in capsys.readouterr().out
    (tmp_path / "stop").unlink()
    monkeypatch.setattr(precomputed, "_STORE_BYTES", 1)
    assert run_here(base, tmp_path) == 0
    assert sum(asked) == 44
    assert len(list(tmp_path.glob("teacher_top_k/*/*.npy"))) == 5  # 16, 8, 8, 8 and 4 samples
    same_as(uninterrupted["stored"], tmp_path)


def test_what_was_stored_is_used_only_if_it_fits(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = [*KIND, *overrides(folder, "stored")]
    assert run_here(base, tmp_path, "trainer.total_training_steps=1") == 0
    (file,) = tmp_path.glob("teacher_top_k/*/0.npy")
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])  # cut off
    assert run_here(base, tmp_path, "trainer.total_training_steps=2") == 0
    assert file.read_bytes() == whole
    assert run_here(base, tmp_path, "algorithm.temperature=3", "trainer.total_training_steps=3") == 0
    assert len(list(tmp_path.glob("teacher_top_k/*/0.npy"))) == 2, "another temperature has other probabilities"


def test_adapters_alone_learn_on_any_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    base = [*KIND, *overrides(folder, "forward"), "model.lora.rank=4"]
    assert run_here(base, tmp_path / "one") == 0
    losses = series(tmp_path / "one", "val/divergence")  # on the same samples at each step
    assert losses[-1] < losses[0]
    results = run_several([(base, tmp_path / "two", ["trainer.sharding=full"])], ranks=2)
    assert [code for code, _, _ in results] == [0, 0], results
    same_as(tmp_path / "one", tmp_path / "two")
    path, _ = checkpoint.newest(tmp_path / "two" / "checkpoints") or (Path(), None)
    assert all(".lora_" in name for name in model_state.stored_weights(path / folders.MODEL))


def test_a_rank_without_samples_adds_nothing(folder: Path, tmp_path: Path) -> None:
    for name in ("forward", "stored"):
        state = load(config_of(overrides(folder, name)), RunDir(tmp_path / name), ALONE)
        found = state.objective.loss(state.model, state.objective.collate([]), 1.0)
        found.loss.backward()
        assert found.loss.item() == 0 and not found.sums.any()
        assert all(p.grad is None or not p.grad.any() for p in state.model.parameters())


def test_a_teacher_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    base = [*KIND, *overrides(folder, "forward")]
    make_tiny_model(tmp_path / "strange", vocab=300)
    with pytest.raises(
        UserError, match=r"teacher\.path .* have different vocabularies: .* for example '.*', which is .* and"
    ):
        run_here(base, tmp_path / "run", f"teacher.path={tmp_path / 'strange'}")
    make_tiny_model(tmp_path / "ends", tie=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ends")
    ours = tokenizer.eos_token
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(7)
    tokenizer.save_pretrained(tmp_path / "ends")
    with pytest.raises(
        UserError, match=f"different special tokens: eos_token is .* and '{ours}'.*model.tokenizer_path="
    ):
        run_here(base, tmp_path / "run", f"teacher.path={tmp_path / 'ends'}")
    again = run_here(
        base,
        tmp_path / "run",
        *(f"teacher.path={tmp_path / 'ends'}", f"model.tokenizer_path={tmp_path / 'ends'}"),
        "trainer.total_training_steps=1",
    )
    assert again == 0


def test_a_teacher_with_too_few_outputs_is_refused(folder: Path, tmp_path: Path) -> None:
    short = AutoModelForCausalLM.from_pretrained(folder / "model")
    short.resize_token_embeddings(200)
    short.save_pretrained(tmp_path / "short")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(tmp_path / "short")
    base = [*KIND, *overrides(folder, "forward")]
    with pytest.raises(UserError, match=r"teacher\.path .* has 200 outputs, but the tokenizer has \d+ tokens"):
        run_here(base, tmp_path / "run", f"teacher.path={tmp_path / 'short'}")
    with pytest.raises(UserError, match=r"teacher\.top_k 320 is not less than the 320 tokens"):
        run_here(base, tmp_path / "run", f"teacher.top_k={TOKENS}")


def test_the_metrics_are_means_over_targets() -> None:
    objective = Distill(config_of(["model.path=m", "teacher.path=t", "data.train_files=f"]))
    found = objective.metrics([4.0, 2.0, 6.0, 3.0])
    assert found == {"divergence": 0.5, "cross_entropy": 1.5, "agreement": 0.75}
    assert json.dumps(found)


def test_stored_tokens_belong_to_their_items() -> None:
    """Items with 2, 1 and 3 targets; the tokens of the first two are in one part, those of the third in another."""
    samples = [Sample(np.arange(4, dtype=np.int32), np.arange(4) >= 4 - targets) for targets in (2, 1, 3)]
    stored = np.zeros(6, teacher.top_k_dtype(1))
    stored["ids"][:, 0] = np.arange(6)
    items = [teacher.DistillItem(sample) for sample in samples]
    parts = [stored[:3], stored[3:]]
    taught = precomputed.WithResults(items, np.array([0, 2, 3, 6]), parts, teacher._taught)
    assert len(taught) == 3 and [item.sample for item in taught] == samples
    assert [item.top_k["ids"][:, 0].tolist() for item in taught if item.top_k is not None] == [
        [0, 1],
        [2],
        [3, 4, 5],
    ]
    last = precomputed.WithResults(items[2:], np.array([3, 6]), parts, teacher._taught)[0]
    assert last.top_k is not None and last.top_k["ids"][:, 0].tolist() == [3, 4, 5]
