"""Training on data files with weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from hpc_rl.config.training.sft import SftConfig
from hpc_rl.data.mixture import Mixture
from hpc_rl.data.reading.sources import all_rows
from hpc_rl.data.sample_files import CHATS
from hpc_rl.data.sft_dataset import chat_tokenizer
from hpc_rl.errors import EXIT_STOPPED, AgreedError
from hpc_rl.finetune import dataset
from hpc_rl.finetune.dataset import load_training
from hpc_rl.finetune.train import parse
from hpc_rl.finetune.training_data import Epochs
from hpc_rl.run_dir import RunDir
from tests.finetune.jobs import ALONE, arguments, run_here, series
from tests.token_cache.test_cache import Stopping, not_again, tokenize


def test_steps_have_the_shares_and_resume_exactly(
    sft_config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = dict(word.split("=", 1) for word in sft_config)
    first, second = options["data.train_files"], options["data.val_files"]  # 31 and 9 rows
    changed = (f"data.train_files={{{first}: 1, {second}: 3}}", "data.val_files=[]")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run_here(sft_config, whole, *changed) == 0
    said = capsys.readouterr().out
    assert f"training data, {first}: 31 rows" in said and f"training data, {second}: 9 rows" in said
    assert f"an epoch has 10 samples of {first} (25.0%; each of its 31 is used 0.323 times); 30 samples of" in said

    config, _ = parse(arguments(sft_config, whole, *changed))
    assert isinstance(config, SftConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    samples, _ = chat_tokenizer(config.data, tokenizer)(all_rows(list(config.data.train_files), "train"))
    targets = [int(sample.loss_mask.sum()) for sample in samples if sample is not None]
    orders = [Mixture((31, 9), (10, 30)).order(config.trainer.seed, epoch, True) for epoch in (0, 1)]
    batches = [order[start : start + 8] for order in orders for start in range(0, 40, 8)]
    assert series(whole, "train/target_tokens") == [sum(targets[index] for index in batch) for batch in batches]

    (resumed / "stop").parent.mkdir()
    for step in (1, 2):
        (resumed / "stop").touch()
        assert run_here(sft_config, resumed, *changed) == EXIT_STOPPED
        assert len(series(resumed, "train/loss")) == step
    (resumed / "stop").unlink()
    assert run_here(sft_config, resumed, *changed) == 0
    for name in ("train/loss", "train/grad_norm", "train/target_tokens"):
        assert series(resumed, name) == pytest.approx(series(whole, name), abs=1e-5), name


@pytest.fixture
def objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose tokens are the numbers of rows: 1, 2, ... 8, without 7, and 11 ... 13."""
    files = {str(tmp_path / "a.jsonl"): range(1, 9), str(tmp_path / "b.jsonl"): range(11, 14)}
    for file, numbers in files.items():
        Path(file).write_text("".join(f'{{"n": {number}}}\n' for number in numbers))
    monkeypatch.setattr(dataset, "key_of", lambda files, *_: Path(files[0]).stem)
    monkeypatch.setattr(dataset, "tokenizer_of", lambda _: "")
    config = SimpleNamespace(
        data=SimpleNamespace(
            train_files=dict.fromkeys(files, 1.0), stream_rows=None, columns=[], train_batch_size=4, shuffle=True
        ),
        trainer=SimpleNamespace(seed=1),
        cache=SimpleNamespace(data_dir=str(tmp_path / "cache")),
        slurm=SimpleNamespace(group=None),
    )
    return SimpleNamespace(config=config, form=CHATS, tokenizer=lambda _: tokenize, items=list)


def load(objective: Any, tmp_path: Path) -> tuple[list[Any], Mixture | None]:
    tokenizer: Any = SimpleNamespace(get_chat_template=lambda: "")
    data = load_training(objective, tokenizer, RunDir(tmp_path / "run"), ALONE, Stopping())  # type: ignore[arg-type]
    assert isinstance(data, Epochs)
    return [int(row.input_ids[0]) for row in data.items], data.mixture


def test_other_weights_use_the_same_tokenized_files(objective: Any, tmp_path: Path) -> None:
    kept = [1, 2, 3, 4, 5, 6, 8, 11, 12, 13]
    assert load(objective, tmp_path) == (kept, Mixture((7, 3), (5, 5)))
    objective.tokenizer = lambda _: not_again
    first, second = objective.config.data.train_files
    objective.config.data.train_files = {second: 1.0, first: 4.0}
    assert load(objective, tmp_path) == (kept[7:] + kept[:7], Mixture((3, 7), (2, 8)))
    objective.config.data.train_files = [first]
    assert load(objective, tmp_path) == (kept[:7], None)


def test_files_of_which_nothing_is_left_or_used_are_refused(objective: Any, tmp_path: Path) -> None:
    first, second = objective.config.data.train_files
    objective.config.data.train_files = {first: 1.0, second: 0.01}
    with pytest.raises(AgreedError, match=rf"{second} has the weight 0.01 of 1.01, and an epoch of 10 samples"):
        load(objective, tmp_path)
    Path(second).write_text('{"n": 7}\n')
    with pytest.raises(AgreedError, match=rf"{second}: no row has a target token"):
        load(objective, tmp_path)
    Path(second).write_text("")
    with pytest.raises(AgreedError, match=rf"{second}: the data set is empty"):
        load(objective, tmp_path)


def test_objectives_see_the_rows_of_all_files_at_once(objective: Any, tmp_path: Path) -> None:
    """KTO takes mismatched responses from the whole data."""
    seen = []
    objective.items = lambda rows: seen.append(rows) or rows
    load(objective, tmp_path)
    lengths = [number % 5 + 1 for number in (1, 2, 3, 4, 5, 6, 8, 11, 12, 13)]
    (rows,) = seen
    assert rows.sizes().lengths.ravel().tolist() == lengths == [len(row.input_ids) for row in rows]
