"""Preference objectives: the same losses and gradients as a plain loop, however the work is split."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hpc_rl.config.compose import compose
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.data.lazy import LazyRows, sizes_of
from hpc_rl.data.order import batches
from hpc_rl.data.pairs import Preference
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.finetune import precomputed, reference
from hpc_rl.finetune.base import Objective
from hpc_rl.finetune.objectives import objective_of
from hpc_rl.finetune.rm import BINS, BradleyTerry
from hpc_rl.finetune.trainer import load, step, validate
from hpc_rl.finetune.training_data import Epochs
from hpc_rl.run_dir import RunDir
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import Clock
from tests.finetune.jobs import ALONE, run_here, run_job, run_several, series
from tests.helpers import make_tiny_model
from tests.tracking.runs import plot_titles

LABELS = ["algorithm.loss=kto", "data.label_key=label"]
DPO = {
    "sigmoid": ["algorithm.label_smoothing=0.1", "algorithm.sft_coeff=0.3"],
    "robust": ["algorithm.loss=robust", "algorithm.label_smoothing=0.2"],
    "ipo": ["algorithm.loss=ipo"],
    "hinge": ["algorithm.loss=hinge"],
    "simpo": ["algorithm.loss=simpo", "algorithm.beta=2.0"],
    "orpo": ["algorithm.loss=orpo"],
    "kto": [*LABELS, "algorithm.undesirable_weight=0.7"],
}
RM = {
    "pairs": ["data.margin_key=margin"],
    "labels": ["data.label_key=label"],
    "heads": ["data.label_keys=[length,label]"],
}
CASES = [("dpo", name) for name in DPO] + [("rm", name) for name in RM]
METRICS_OF_HEADS = [
    *("loss", "absolute_error"),
    *(f"{name}/{head}" for name in ("absolute_error", "score_mean", "label_mean") for head in ("length", "label")),
]
WHOLE = ("sigmoid", "kto", "pairs", "heads")
"""Losses of which whole runs are compared; of the others, two steps."""
OFTEN = ("sigmoid", "heads")
"""Those of which whole runs on two ranks are compared in each run of the tests; of the others, two steps."""
TWO_RANKS = [
    [],
    ["trainer.sharding=none", "trainer.packing=false"],
    ["trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2"],
]
SHORT = ["trainer.total_training_steps=2", "trainer.test_freq=0"]
SHORT_SPLIT = [*SHORT, "trainer.micro_tokens=512"]
LIVE = ["ref.precompute_logprobs=false", "trainer.sharding=gradients"]
SHORT_SPLITS = {"kto": [SHORT_SPLIT, [*SHORT, *LIVE]]}
SPLITS = {
    "packed": [],
    "unpacked": ["trainer.packing=false", "model.enable_gradient_checkpointing=true"],
    "many micro-batches": ["trainer.micro_tokens=512"],
}


def rows() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"What is {n % 7} plus {n % 5}?",
            "chosen": f"It is {n % 7 + n % 5}. " + "Yes. " * (n % 4),
            "rejected": "No idea. " * (1 + n % 3),
            "margin": n % 3 / 4,
        }
        for n in range(22)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    make_tiny_model(folder / "model", tie=True)
    make_tiny_model(folder / "other", tie=True, hidden=48)
    labelled = [
        {"prompt": row["prompt"], "response": row[key], "label": key == "chosen", "length": len(row[key]) / 50}
        for row in rows()
        for key in ("chosen", "rejected")
    ]
    for name, found in {"pairs": rows(), "labels": labelled}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def overrides(folder: Path, kind: str, name: str) -> list[str]:
    own = (DPO if kind == "dpo" else RM)[name]
    file = folder / ("labels.jsonl" if any("label_key" in option for option in own) else "pairs.jsonl")
    return [
        f"model.path={folder / 'model'}",
        f"data.train_files={file}",
        f"data.val_files={file}",
        *("data.train_batch_size=8", "data.max_length=256", "trainer.micro_tokens=2048", "trainer.test_freq=2"),
        *("optim.lr=1e-2", "trainer.device=cpu", "trainer.total_epochs=2", "trainer.export=false"),
        *([f"ref.path={folder / 'other'}"] if name not in ("simpo", "orpo") and kind == "dpo" else []),
        *own,
    ]


def config_of(kind: str, words: list[str]) -> FinetuneConfig:
    config = compose(kind, words)
    assert isinstance(config, FinetuneConfig)
    return config


def logprobs(model: Any, sample: Sample) -> tuple[torch.Tensor, int]:
    """Log-probability of the targets of one sample alone, by transformers' own attention, and their number."""
    ids = torch.from_numpy(sample.input_ids).long()
    logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(dim=-1)
    found = logits.gather(1, ids[1:, None])[:, 0][torch.from_numpy(sample.loss_mask[1:])]
    return found.sum(), len(found)


def plain_dpo(name: str, config: Any, policy: Any, reference: Any, batch: list[Any]) -> torch.Tensor:
    """The mean loss of a batch, pair by pair."""
    settings, beta, total = config.algorithm, config.algorithm.beta, torch.zeros(())
    soft = torch.nn.functional.softplus
    if name == "kto":
        with torch.no_grad():
            ratios = [logprobs(policy, one.samples[1])[0] - logprobs(reference, one.samples[1])[0] for one in batch]
        baseline = max(0.0, float(torch.stack(ratios).mean()))
    for one in batch:
        (chosen, chosen_n), *others = [logprobs(policy, sample) for sample in one.samples]
        with torch.no_grad():
            ref = [logprobs(reference, sample)[0] for sample in one.samples]
        if name == "kto":
            ratio = chosen - ref[0] - baseline
            total = total + (
                1 - torch.sigmoid(beta * ratio) if one.values[0] else 0.7 * (1 - torch.sigmoid(-beta * ratio))
            )
            continue
        ((rejected, rejected_n),) = others
        margin = beta * ((chosen - ref[0]) - (rejected - ref[1]))
        means = chosen / chosen_n, rejected / rejected_n
        odds = [mean - torch.log(1 - mean.exp()) for mean in means]
        total = (
            total
            + {
                "sigmoid": 0.9 * soft(-margin) + 0.1 * soft(margin) - 0.3 * means[0],
                "robust": (0.8 * soft(-margin) - 0.2 * soft(margin)) / 0.6,
                "ipo": ((chosen - ref[0]) / chosen_n - (rejected - ref[1]) / rejected_n - 1 / (2 * beta)) ** 2,
                "hinge": torch.relu(1 - margin),
                "simpo": soft(settings.gamma - beta * (means[0] - means[1])),
                "orpo": -means[0] + beta * soft(odds[1] - odds[0]),
            }[name]
        )
    return total / len(batch)


def plain_rm(name: str, model: Any, batch: list[Any]) -> torch.Tensor:
    total = torch.zeros(())
    for one in batch:
        scores = []
        for sample in one.samples:
            hidden = model.model(input_ids=torch.from_numpy(sample.input_ids).long()[None]).last_hidden_state
            scores.append(model.score(hidden[0, -1]))
        if name == "pairs":
            total = total + torch.nn.functional.softplus(scores[1][0] + one.values[0] - scores[0][0])
        else:
            total = total + (scores[0] - torch.tensor(one.values)).square().mean()
    return total / len(batch)


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind} {name}" for kind, name in CASES])
def test_loss_and_gradients_equal_those_of_a_plain_loop(folder: Path, tmp_path: Path, kind: str, name: str) -> None:
    for split, more in SPLITS.items():
        config = config_of(kind, [*overrides(folder, kind, name), *more])
        state = load(config, RunDir(tmp_path / split), ALONE)
        torch.manual_seed(1)
        if kind == "rm":  # a head of zeros has no gradient for the backbone
            torch.nn.init.normal_(state.model.hf.score.weight, std=0.5)
        before = {key: value.clone() for key, value in state.model.hf.state_dict().items()}
        gradients: dict[str, torch.Tensor] = {}
        named = dict(state.model.hf.named_parameters())
        state.optimizer.register_step_pre_hook(
            lambda *_, named=named, gradients=gradients: gradients.update(
                {key: one.grad.clone() for key, one in named.items() if one.grad is not None}
            )
        )
        order = np.random.default_rng([config.trainer.seed, 0]).permutation(len(state.data.items))
        batch = [state.data.items[index] for index in order[:8]]
        found = step(state.__class__(**{**vars(state), "config": config.updated("optim.clip_grad", 0.0)}), Clock())
        auto = AutoModelForCausalLM if kind == "dpo" else AutoModelForSequenceClassification
        options = {} if kind == "dpo" else {"num_labels": 2 if name == "heads" else 1}
        plain = auto.from_pretrained(folder / "model", attn_implementation="eager", **options)
        plain.load_state_dict(before)
        if kind == "dpo":
            other = AutoModelForCausalLM.from_pretrained(folder / "other", attn_implementation="eager")
            expected = plain_dpo(name, config, plain, other, batch)
        else:
            expected = plain_rm(name, plain, batch)
        expected.backward()
        assert found["train/loss"] == pytest.approx(expected.item(), abs=1e-4), split
        for key, one in plain.named_parameters():
            if one.grad is not None:
                torch.testing.assert_close(gradients[key], one.grad, atol=1e-4, rtol=1e-4, msg=f"{split}: {key}")


def run_of(folder: Path, name: str) -> list[str]:
    kind = "rm" if name in RM else "dpo"
    return ["--kind", kind, *overrides(folder, kind, name)]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {name: tmp_path_factory.mktemp("runs") / name for name in WHOLE}
    for name, run in runs.items():
        assert run_here(run_of(folder, name), run) == 0
    return runs


def run_on_two_ranks(folder: Path, place: Path, splits: list[tuple[str, list[str]]]) -> dict[str, list[Path]]:
    """All runs by their loss, in the same two processes."""
    runs = [(run_of(folder, name), place / str(number), more) for number, (name, more) in enumerate(splits)]
    results = run_several(runs, ranks=2, timeout=1500)
    assert [code for code, _, _ in results] == [0, 0], results
    return {own: [run[1] for run, (name, _) in zip(runs, splits, strict=True) if name == own] for own, _ in splits}


def splits_of(name: str) -> list[tuple[str, list[str]]]:
    """How whole runs of a loss are divided."""
    live = [LIVE] if name in ("sigmoid", "kto") else []
    return [(name, more) for more in [*TWO_RANKS, *live]]


@pytest.fixture(scope="module")
def two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    short = [(name, more) for _, name in CASES if name not in OFTEN for more in SHORT_SPLITS.get(name, [SHORT_SPLIT])]
    whole = [one for name in OFTEN for one in splits_of(name)]
    return run_on_two_ranks(folder, tmp_path_factory.mktemp("two"), [*whole, *short])


def same_as(expected: Path, found: Path) -> None:
    names = {
        name
        for record in map(json.loads, (expected / "metrics.jsonl").read_text().splitlines())
        for name in record
        if name.startswith(("train/", "val/"))
    }
    compared = {"train/accuracy", "train/margin", "val/accuracy", "val/reward_chosen"}
    by_head = {f"val/{name}/{head}" for name in ("absolute_error", "score_mean") for head in ("length", "label")}
    assert {"train/loss", "val/loss"} <= names and (compared <= names or by_head <= names)
    for name in names:
        assert series(found, name) == pytest.approx(series(expected, name), abs=1e-4), name


@pytest.mark.parametrize("name", OFTEN)
def test_two_ranks(uninterrupted: dict[str, Path], two_ranks: dict[str, list[Path]], name: str) -> None:
    assert len(two_ranks[name]) == (3 if name in RM else 4)
    for run in two_ranks[name]:
        same_as(uninterrupted[name], run)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in WHOLE if name not in OFTEN])
def test_two_ranks_of_other_losses(folder: Path, tmp_path: Path, uninterrupted: dict[str, Path], name: str) -> None:
    for run in run_on_two_ranks(folder, tmp_path, splits_of(name))[name]:
        same_as(uninterrupted[name], run)


@pytest.mark.parametrize("name", [name for _, name in CASES if name not in OFTEN])
def test_two_ranks_of_every_other_loss(
    folder: Path, tmp_path: Path, two_ranks: dict[str, list[Path]], name: str
) -> None:
    """The loss of the second step depends on the direction of the first gradient."""
    assert run_here(run_of(folder, name), tmp_path, *SHORT) == 0
    for metric in ("train/loss", "train/grad_norm"):
        expected = series(tmp_path, metric)
        assert len(expected) == 2 and all(expected)
        for run in two_ranks[name]:
            assert series(run, metric) == pytest.approx(expected, rel=1e-4, abs=1e-4), metric


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("sigmoid", {"Accuracy", "Margin", "Rewards", "Log-probability"}),
        ("kto", {"Accuracy", "Margin", "Rewards", "Log-probability"}),
        ("pairs", {"Accuracy", "Margin", "Rewards", "Calibration error"}),
        ("heads", {"Absolute error"}),
    ],
)
def test_the_report_has_plots_of_the_kind(uninterrupted: dict[str, Path], name: str, titles: set[str]) -> None:
    always = {"Loss", "Gradient norm", "Learning rate"}
    speed = {"Throughput", "MFU", "Peak memory", "Time per step"}
    assert plot_titles(uninterrupted[name]) - speed == titles | always


def stored_logprobs(run: Path) -> NDArray[np.float32]:
    paths = sorted(run.glob("ref_logprobs/*/*.npy"), key=lambda path: int(path.stem))
    return np.concatenate([np.load(path)["logprobs"] for path in paths])


def test_stopped_on_two_ranks_and_resumed_on_one(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["--kind", "dpo", *overrides(folder, "dpo", "sigmoid")]
    (tmp_path / "stop").touch()
    results = run_job(base, tmp_path, ranks=2)
    assert [code for code, _, _ in results] == [EXIT_STOPPED] * 2, results
    assert "stopped before the first step: the reference's log-probabilities are stored for 44 of 44" in results[0][1]
    (tmp_path / "stop").unlink()
    monkeypatch.setattr("hpc_rl.finetune.reference.Reference", None)  # a resumed run reads what was stored
    assert run_here(base, tmp_path) == 0
    same_as(uninterrupted["sigmoid"], tmp_path)


def test_a_stop_while_the_reference_computes(
    folder: Path,
    tmp_path: Path,
    uninterrupted: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["--kind", "dpo", *overrides(folder, "dpo", "sigmoid"), "trainer.micro_tokens=512"]
    packed, asked, beats = reference.pack_preferences, [], []

    def pack_and_ask(items: list[Any], width: int) -> Any:
        asked.append(len(items))
        if sum(asked) == 16:  # at the end of the second round
            (tmp_path / "stop").touch()
        return packed(items, width)

    monkeypatch.setattr(precomputed, "_ROUND", 8)
    monkeypatch.setattr(reference, "pack_preferences", pack_and_ask)
    monkeypatch.setattr(reference, "heart", SimpleNamespace(beat=lambda: beats.append(1)))
    assert run_here(base, tmp_path) == EXIT_STOPPED
    assert "the reference's log-probabilities are stored for 16 of 44 samples or pairs" in capsys.readouterr().out
    assert stored_logprobs(tmp_path).shape == (16, 2)
    assert len(beats) == len(asked) > 2
    (tmp_path / "stop").unlink()
    assert run_here(base, tmp_path) == 0
    assert sum(asked) == 44
    same_as(uninterrupted["sigmoid"], tmp_path)


def test_results_are_stored_now_and_then(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ["--kind", "dpo", *overrides(folder, "dpo", "sigmoid"), "trainer.total_training_steps=1"]
    monkeypatch.setattr(precomputed, "_ROUND", 8)
    for name, every_s, firsts in (("seldom", 300, [0]), ("often", -1, [0, 8, 16, 24, 32, 40])):
        monkeypatch.setattr(precomputed, "_STORE_EVERY_S", every_s)
        assert run_here(base, tmp_path / name) == 0
        assert sorted(int(path.stem) for path in (tmp_path / name).glob("ref_logprobs/*/*.npy")) == firsts


def test_the_reference_is_freed_before_the_policy_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sharded model is a reference cycle, which only the garbage collector frees."""
    references: list[weakref.ref[Any]] = []

    class Cyclic(reference.Reference):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.itself = self
            references.append(weakref.ref(self))

    monkeypatch.setattr(reference, "Reference", Cyclic)
    load_policy = load_sharded

    def load_alone(*arguments: Any) -> Any:
        assert [found() for found in references] == [None]
        return load_policy(*arguments)

    monkeypatch.setattr("hpc_rl.finetune.base.load_sharded", load_alone)
    gc.disable()
    try:
        load(config_of("dpo", overrides(folder, "dpo", "sigmoid")), RunDir(tmp_path), ALONE)
    finally:
        gc.enable()


@pytest.mark.parametrize("damaged", [b"", b"PK\x03\x04 cut off", b"text"])
def test_a_damaged_file_of_log_probabilities_is_not_used(tmp_path: Path, damaged: bytes) -> None:
    assert precomputed.stored(tmp_path, reference.logprobs_dtype(2)) == []
    (tmp_path / "0.npy").write_bytes(damaged)
    assert precomputed.stored(tmp_path, reference.logprobs_dtype(2)) == []


def test_stored_log_probabilities_of_other_data_are_not_used(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, Path]
) -> None:
    base = ["--kind", "dpo", *overrides(folder, "dpo", "sigmoid")]
    assert run_here(base, tmp_path, "trainer.total_training_steps=1") == 0
    stored = stored_logprobs(tmp_path)
    assert stored.shape == (44, 2)
    (own,) = (tmp_path / "ref_logprobs").iterdir()
    own.rename(own.with_name("other"))
    assert run_here(base, tmp_path, "trainer.total_training_steps=2") == 0
    assert np.allclose(np.load(own / "0.npy")["logprobs"], stored, atol=1e-5)


def test_the_exported_reward_model_scores_as_it_was_trained(folder: Path, tmp_path: Path) -> None:
    base = ["--kind", "rm", *overrides(folder, "rm", "pairs"), "trainer.export=true"]
    assert run_here(base, tmp_path) == 0
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and model.config.num_labels == 1
    config = config_of("rm", base[2:])
    state = load(config, RunDir(tmp_path), ALONE)
    scores = [
        [float(model(input_ids=torch.from_numpy(sample.input_ids).long()[None]).logits[0, 0]) for sample in one.samples]
        for one in state.val
    ]
    right = sum(chosen > rejected for chosen, rejected in scores) / len(scores)
    assert right == pytest.approx(series(tmp_path, "val/accuracy")[-1])
    gap = sum(chosen - rejected for chosen, rejected in scores) / len(scores)
    assert gap == pytest.approx(series(tmp_path, "val/margin")[-1], abs=1e-4)
    with pytest.raises(UserError, match="is a classifier, such as a reward model, and a language model is needed"):
        dpo = ["--kind", "dpo", *overrides(folder, "dpo", "sigmoid")]
        run_here(dpo, tmp_path / "dpo", f"model.path={tmp_path / 'model'}")


def test_each_label_has_an_output(folder: Path, tmp_path: Path) -> None:
    """The metrics are those of the exported model, which names its outputs, and it is refused where one is needed."""
    base = ["--kind", "rm", *overrides(folder, "rm", "heads"), "trainer.export=true"]
    assert run_here(base, tmp_path) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert model.config.id2label == {0: "length", 1: "label"}
    state = load(config_of("rm", base[2:]), RunDir(tmp_path), ALONE)
    ids = [torch.from_numpy(one.samples[0].input_ids).long()[None] for one in state.val]
    with torch.no_grad():
        scores = torch.stack([model(input_ids=each).logits[0] for each in ids])
    labels = torch.tensor([one.values for one in state.val])
    assert labels[0].tolist() == pytest.approx([len(rows()[0]["chosen"]) / 50, 1.0])
    last = {name: series(tmp_path, f"val/{name}")[-1] for name in METRICS_OF_HEADS}
    for number, head in enumerate(("length", "label")):
        assert last[f"absolute_error/{head}"] == pytest.approx(
            float((scores - labels).abs()[:, number].mean()), abs=1e-4
        )
        assert last[f"score_mean/{head}"] == pytest.approx(float(scores[:, number].mean()), abs=1e-4)
        assert last[f"label_mean/{head}"] == pytest.approx(float(labels[:, number].mean()), abs=1e-4)
    assert last["absolute_error"] == pytest.approx(float((scores - labels).abs().mean()), abs=1e-4)
    assert last["loss"] == pytest.approx(float((scores - labels).square().mean()), abs=1e-4)
    pairs = ["--kind", "rm", *overrides(folder, "rm", "pairs")]
    with pytest.raises(UserError, match=r"^model\.path .* has 2 outputs, not 1: name one column in data\.label_keys"):
        run_here(pairs, tmp_path / "pairs", f"model.path={tmp_path / 'model'}")


def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "strange", vocab=300)
    with pytest.raises(UserError, match=r"ref\.path .* have different vocabularies"):
        base = ["--kind", "dpo", *overrides(folder, "dpo", "sigmoid")]
        run_here(base, tmp_path / "run", f"ref.path={tmp_path / 'strange'}")


def test_a_rank_without_pairs_adds_nothing(folder: Path, tmp_path: Path) -> None:
    for kind, name in (("dpo", "sigmoid"), ("dpo", "kto"), ("rm", "pairs"), ("rm", "labels"), ("rm", "heads")):
        config = config_of(kind, [*overrides(folder, kind, name), *(["ref.path=null"] if kind == "dpo" else [])])
        objective: Objective = objective_of(config)
        model = objective.model().load()
        found = objective.loss(model, objective.collate([]), 1.0)
        found.loss.backward()
        assert found.loss.item() == 0 and not found.sums.any()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_samples_that_are_not_trained_on_are_not_counted(folder: Path) -> None:
    objective = objective_of(config_of("dpo", overrides(folder, "dpo", "kto")))
    mask = np.array([False, True, True])
    sample, other = Sample(np.arange(3, dtype=np.int32), mask), Sample(np.arange(2, dtype=np.int32), mask[:2])
    work = objective.work(sizes_of([Preference((sample, other), (1.0,))] * 2))
    assert (work.lengths, work.sample_lengths, work.targets, work.tokens) == ([5, 5], [3, 3], 4, 6)


def test_the_baseline_of_kto_gives_heartbeats(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = load(config_of("dpo", overrides(folder, "dpo", "kto")), RunDir(tmp_path), ALONE)
    beats: list[int] = []
    monkeypatch.setattr("hpc_rl.finetune.dpo.heart", SimpleNamespace(beat=lambda: beats.append(1)))
    state.objective.begin(state.model, [state.objective.collate(state.data.items[:2])] * 3, ALONE)
    assert len(beats) == 3


class Recorded(LazyRows[Any]):
    """Items, with the indices that are read."""

    def __init__(self, items: Sequence[Any], read: list[int]) -> None:
        self._items, self._read = items, read

    def __len__(self) -> int:
        return len(self._items)

    def row(self, index: int) -> Any:
        self._read.append(index)
        return self._items[index]


def test_a_rank_reads_only_its_own_items(folder: Path, tmp_path: Path) -> None:
    class Reached(Exception):
        pass

    def begin(*_: Any) -> None:
        raise Reached

    for name in ("pairs", "kto"):
        kind = "dpo" if name == "kto" else "rm"
        state = load(config_of(kind, overrides(folder, kind, name)), RunDir(tmp_path / name), ALONE)
        state.objective.begin = begin  # type: ignore[method-assign]
        train, read = state.data.items, list[list[int]]()
        order = next(batches(len(train), 8, seed=state.config.trainer.seed, shuffle=True))[0].tolist()
        for rank in (0, 1):
            read.append([])
            state.data = Epochs(Recorded(train, read[-1]), state.config)
            read[-1].clear()  # of counting tokens
            state.world = World(rank, 2, ALONE.device)
            with pytest.raises(Reached):
                step(state, Clock())
        assert read[0] and read[1] and sorted(read[0] + read[1]) == sorted(order)


def test_validation_holds_one_micro_batch_at_a_time(folder: Path, tmp_path: Path) -> None:
    state = load(config_of("rm", [*overrides(folder, "rm", "pairs"), "trainer.packing=false"]), RunDir(tmp_path), ALONE)
    collate, loss, events = state.objective.collate, state.objective.loss, []
    state.objective.collate = lambda items: events.append("collate") or collate(items)  # type: ignore[method-assign]
    state.objective.loss = lambda *rest: events.append("loss") or loss(*rest)  # type: ignore[method-assign]
    validate(state)
    assert events == ["collate", "loss"] * len(state.val)


def test_a_score_that_is_not_a_number_reaches_the_guard() -> None:
    class Broken(BradleyTerry):
        def scores(self, model: Any, batch: Any) -> torch.Tensor:
            return torch.tensor([[np.nan, 0.0], [1.0, 0.0]])[..., None]

    batch = dataclasses.make_dataclass("Batch", ["values_PK"])(torch.zeros(2, 1))
    assert Broken(None).loss(None, batch, 1.0).loss.isnan()


def test_the_calibration_error() -> None:
    """Two pairs in one bin: confidences of 0.91 and 0.94, one of them right."""

    class Fixed(BradleyTerry):
        def scores(self, model: Any, batch: Any) -> torch.Tensor:
            logit = lambda p: float(np.log(p / (1 - p)))  # noqa: E731
            return torch.tensor([[logit(0.91), 0.0], [0.0, logit(0.94)]])[..., None]

    objective = Fixed(None)
    batch = dataclasses.make_dataclass("Batch", ["values_PK"])(torch.zeros(2, 1))
    found = objective.metrics(objective.loss(None, batch, 1.0).sums.tolist())
    assert BINS == 10 and found["accuracy"] == 0.5
    assert found["calibration_error"] == pytest.approx((0.91 + 0.94 - 1) / 2, abs=1e-6)
