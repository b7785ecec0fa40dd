"""Training on a data set that is read from a hub while the run trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hpc_rl.config.compose import compose
from hpc_rl.config.training.preferences import DpoConfig
from hpc_rl.config.training.sft import SftConfig
from hpc_rl.data import identity
from hpc_rl.data.identity import windows_of
from hpc_rl.data.order import epoch_order
from hpc_rl.data.reading import windows
from hpc_rl.data.reading.windows import WindowReader
from hpc_rl.data.sft_dataset import chat_tokenizer
from hpc_rl.errors import EXIT_STOPPED, AgreedError, AgreedRunError, RunError
from hpc_rl.finetune.train import parse
from hpc_rl.finetune.trainer import train
from hpc_rl.run_dir import TOKENIZED, RunDir
from tests.data.hub_server import HubServer, hub_server
from tests.finetune.jobs import ALONE, arguments, ask_at, run_here, run_job, series
from tests.helpers import chats

SHARDS = (11, 11, 9)
"""Rows of the files of me/Sums."""
WINDOW, BATCH, STEPS = 12, 5, 10
"""Windows of 12, 12 and 7 rows have 3, 3 and 2 batches. Two steps follow in the next pass."""
METRICS = ("train/loss", "train/grad_norm", "train/target_tokens", "train/window", "val/loss")
LONG = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a" * 2000}]


def write(folder: Path, *shards: Sequence[object]) -> Path:
    folder.mkdir()
    for number, rows in enumerate(shards):
        text = "".join(json.dumps({"messages": row, "number": number}) + "\n" for row in rows)
        (folder / f"train-{number}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """me/Sums: the training data of `sft_config`. me/Gap: some rows are too long. me/Bad: some have no chat."""
    folder = tmp_path_factory.mktemp("hub")
    rows = chats(sum(SHARDS))
    sums = write(folder / "sums", rows[:11], rows[11:22], rows[22:])
    gap = write(folder / "gap", [*rows[:6], *[LONG] * 6, *rows[6:12]])
    bad = write(folder / "bad", rows[:WINDOW], [None] * 3)
    data = {"me/Sums": sums, "me/Gap": gap, "me/Bad": bad}
    with hub_server({}, data) as server, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HOME", str(folder / "home"))
        patch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(autouse=True)
def recovers(hub: HubServer) -> Iterator[None]:
    yield
    hub.mute.clear()


def streamed(base: Sequence[str], name: str = "me/Sums", rows: int = WINDOW, steps: int = STEPS) -> list[str]:
    """The same run on a data set of the hub."""
    kept = [word for word in base if not word.startswith(("data.train_files=", "data.train_batch_size="))]
    own = [f"data.train_files={name}", f"data.stream_rows={rows}", f"data.train_batch_size={BATCH}"]
    return [*kept, *own, f"trainer.total_training_steps={steps}"]


@pytest.fixture(scope="module")
def uninterrupted(hub: HubServer, sft_config: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert run_here(streamed(sft_config), run_dir) == 0
    return run_dir


def entries(run_dir: Path) -> list[str]:
    """Tokenized data on disk, without that of the validation."""
    found = (run_dir.parent / TOKENIZED).glob("[!.]*/data.json")
    return [files[0] for path in found if (files := json.loads(path.read_text())["files"])[0].startswith("me/")]


def test_the_order_is_that_of_an_epoch_for_each_window(sft_config: list[str], uninterrupted: Path) -> None:
    config, _ = parse(arguments(streamed(sft_config), uninterrupted))
    assert isinstance(config, SftConfig)
    rows = [({"messages": chat}, "") for chat in chats(sum(SHARDS))]
    samples, _ = chat_tokenizer(config.data, AutoTokenizer.from_pretrained(config.model.path))(rows)
    targets = [int(sample.loss_mask.sum()) for sample in samples if sample is not None]
    assert len(targets) == 31
    expected, places = list[int](), list[float]()
    for window, first, size in ((0, 0, 12), (1, 12, 12), (2, 24, 7), (3, 0, 12)):
        order = epoch_order(size, config.trainer.seed, window, shuffle=True)
        for start in range(0, size, BATCH):
            expected.append(sum(targets[first + index] for index in order[start : start + BATCH]))
            places.append(window + min(start + BATCH, size) / size)
    assert series(uninterrupted, "train/target_tokens") == expected[:STEPS]
    assert series(uninterrupted, "train/window") == pytest.approx(places[:STEPS])
    assert series(uninterrupted, "train/epoch") == []
    assert len(series(uninterrupted, "timing_s/window")) == 3  # windows 1 to 3
    # Nothing is left of the windows.
    assert entries(uninterrupted) == [] and [path.name for path in RunDir(uninterrupted).stream.iterdir()] == [
        "windows.json"
    ]


def test_a_run_resumes_within_a_window_and_between_two(
    sft_config: list[str], tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    for micro_batch, place in ((0, 5 / 12), (1, 1.0)):  # of one in each step
        with pytest.MonkeyPatch.context() as patch:
            ask_at(patch, run, micro_batch)
            patch.setattr(identity, "FORMAT", micro_batch)  # the tokens of the first attempt are of no use
            assert run_here(streamed(sft_config), run.path) == EXIT_STOPPED
        run.stop.unlink()
        assert series(run.path, "train/window")[-1] == pytest.approx(place) and len(entries(run.path)) == 1
        assert [path.name for path in run.stream.iterdir()] == ["windows.json"]
    assert run_here(streamed(sft_config), run.path) == 0 and entries(run.path) == []
    said = capsys.readouterr().out
    assert said.count("tokenized data of me/Sums is of other rows or settings: tokenizing again") == 2
    assert said.count("training data, window 1, from row 1 of me/Sums: 12 rows") == 2
    assert said.count("training data, window 3, from row 25 of me/Sums: 7 rows") == 1
    for name in METRICS:
        assert series(run.path, name) == series(uninterrupted, name), name
    kept = sorted((run.path.parent / TOKENIZED).glob("[!.]*"))  # of the validation
    shutil.copytree(kept[0], kept[0].with_name(f"{windows_of(run.path)}-{'0' * 20}"))  # of a killed attempt
    assert run_here(streamed(sft_config), run.path) == 0
    assert sorted((run.path.parent / TOKENIZED).glob("[!.]*")) == kept
    assert "has already finished after 10 steps" in capsys.readouterr().out
    with pytest.raises(AgreedError, match=r"data.stream_rows=12, and now it has me/Sums and 13"):
        run_here(streamed(sft_config, rows=13), run.path)


def test_two_ranks_train_as_one(sft_config: list[str], tmp_path: Path, uninterrupted: Path) -> None:
    results = run_job(streamed(sft_config), tmp_path / "run", ranks=2, HF_HUB_OFFLINE="0")
    assert [code for code, _, _ in results] == [0, 0], results
    for name in METRICS:
        assert series(tmp_path / "run", name) == pytest.approx(series(uninterrupted, name), abs=1e-5), name
    assert entries(tmp_path / "run") == []


def test_a_window_with_all_rows_trains_like_data_that_is_not_streamed(
    hub: HubServer, sft_config: list[str], tmp_path: Path
) -> None:
    hub.served.clear()
    changed = ["data.train_batch_size=8", "trainer.seed=3"]
    assert run_here(streamed(sft_config, rows=1000, steps=8), tmp_path / "streamed", *changed) == 0
    assert run_here(sft_config, tmp_path / "whole", *changed) == 0
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert series(tmp_path / "streamed", name) == series(tmp_path / "whole", name), name
    assert series(tmp_path / "streamed", "train/window") == series(tmp_path / "whole", "train/epoch")
    sizes = {path.name: path.stat().st_size for path in hub.repositories["datasets"]["me/Sums"].glob("*.jsonl")}
    for_columns = {**sizes, "train-0.jsonl": 2 * sizes["train-0.jsonl"]}  # datasets 3 reads it once
    assert hub.served in (sizes, for_columns)  # the second epoch has read nothing


def test_preferences_are_streamed_too(sft_config: list[str], hub: HubServer, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    rows = [{"prompt": f"{n}?", "chosen": "yes " * (1 + n % 3), "rejected": "no", "extra": n} for n in range(13)]
    (pairs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hub.repositories["datasets"]["me/Pairs"] = pairs
    model = next(word for word in sft_config if word.startswith("model.path="))
    own = {"ref.precompute_logprobs": False, "data.stream_rows": 13, "trainer.total_training_steps": 3}
    options = {"data.train_batch_size": 8, "trainer.device": "cpu", "trainer.export": False, "optim.lr": 1e-2, **own}
    for name, changed in {"me/Pairs": {}, str(pairs / "train.jsonl"): {"data.stream_rows": None}}.items():
        config = compose("dpo", [model], {**options, "data.train_files": name, **changed})
        assert isinstance(config, DpoConfig)
        assert train(config, RunDir(tmp_path / ("file" if changed else "hub")), ALONE) == 0
    assert series(tmp_path / "hub", "train/loss") == series(tmp_path / "file", "train/loss")


def test_what_a_run_does_not_need_is_not_read(hub: HubServer, sft_config: list[str], tmp_path: Path) -> None:
    hub.served.clear()
    assert run_here(streamed(sft_config, steps=3), tmp_path / "run") == 0
    assert set(hub.served) == {"train-0.jsonl", "train-1.jsonl"}


def test_a_hub_that_fails_ends_the_run_after_a_save(
    hub: HubServer, sft_config: list[str], tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, look = RunDir(tmp_path / "run"), WindowReader.look
    hub.mute.add("train-2.jsonl")
    with pytest.MonkeyPatch.context() as patch:

        def look_shortly(one: WindowReader, window: int) -> bool:
            patch.setattr(windows, "PATIENCE_S", 0.5 if window else 600.0)
            return look(one, window)

        patch.setattr(WindowReader, "look", look_shortly)
        with pytest.raises(
            AgreedRunError, match=r"has sent no rows of me/Sums for 0 s .*\nstopped after step 3 of 10: c"
        ):
            run_here(streamed(sft_config), run.path)
    assert len(series(run.path, "train/loss")) == 3

    def look_and_ask(one: WindowReader, window: int) -> bool:
        run.stop.touch()
        return look(one, window)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowReader, "look", look_and_ask)
        assert run_here(streamed(sft_config), run.path) == EXIT_STOPPED  # a stop does not wait for the hub
    run.stop.unlink()
    hub.mute.clear()
    assert run_here(streamed(sft_config), run.path) == 0
    for name in METRICS:
        assert series(run.path, name) == series(uninterrupted, name), name


def test_a_row_that_is_not_valid_ends_the_run_after_a_save(sft_config: list[str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^me/Bad, row 13: .*null.*\nstopped after step 3 of 10: checkpoint saved"):
        run_here(streamed(sft_config, "me/Bad"), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_windows_of_which_nothing_is_left(sft_config: list[str], tmp_path: Path) -> None:
    drop = ("data.truncation=drop", "data.max_length=400", "data.train_batch_size=6")
    assert run_here(streamed(sft_config, "me/Gap", rows=6, steps=4), tmp_path / "run", *drop) == 0
    assert series(tmp_path / "run", "train/window") == [1, 3, 4, 6]  # without windows 1 and 4, counted from 0
    with pytest.raises(
        AgreedError, match=r"^me/Gap: no row has a target token within data.max_length: raise it"
    ) as found:
        run_here(streamed(sft_config, "me/Gap", rows=6), tmp_path / "none", *drop, "data.max_length=5")
    assert not isinstance(found.value, RunError)
