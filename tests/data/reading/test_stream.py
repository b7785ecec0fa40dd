"""Reading a data set on the hub window after window, from a hub of ours."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets.utils import file_utils
from pyarrow import parquet

from hpc_rl.data.reading import stream, windows
from hpc_rl.data.reading.sources import BLOCK_ROWS
from hpc_rl.data.reading.stream import (
    DataSet,
    HubFailed,
    RowsArrived,
    Stream,
    VersionKnown,
    WindowDone,
    WindowRequest,
    is_temporary,
    write_window,
)
from hpc_rl.data.reading.windows import WindowLog, WindowReader, read_log, rows_file, window_blocks
from hpc_rl.errors import RunError, UserError
from hpc_rl.system.worker_process import ProcessLost
from tests.data.hub_server import COMMIT, HubServer, hub_server
from tests.marks import long

SHARD, SHARDS = 200, 3
"""Rows of a file of me/Lines, and its files."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """me/Lines: three files of JSON lines. me/Table: a parquet file of which one column is needed."""
    folder = tmp_path_factory.mktemp("hub")
    lines, table = folder / "lines", folder / "table"
    lines.mkdir()
    table.mkdir()
    for shard in range(SHARDS):
        numbers = range(shard * SHARD, (shard + 1) * SHARD)
        (lines / f"train-{shard}.jsonl").write_text("".join(f'{{"n": {number}, "text": "é"}}\n' for number in numbers))
    random = np.random.default_rng(0)
    rows = pa.table({"n": range(400), "large": [random.bytes(50_000) for _ in range(400)]})
    parquet.write_table(rows, table / "train.parquet", row_group_size=400)
    with hub_server({}, {"me/Lines": lines, "me/Table": table}) as server, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HOME", str(folder / "home"))
        patch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def hub(served: HubServer) -> Iterator[HubServer]:
    """The server, which has not served anything yet and does not fail."""
    served.asked.clear()
    served.served.clear()
    yield served
    served.failing, served.commits = 0, [COMMIT]
    served.mute.clear()


def reader(folder: Path, rows: int, name: str = "me/Lines", columns: Sequence[str] = ("n",)) -> WindowReader:
    resumes = (folder / "windows.json").exists()
    return WindowReader(folder, read_log(folder, name, rows, resumes), "train", columns)


def numbers(one: WindowReader, folder: Path, window: int) -> list[int]:
    """The rows of a window, when it has been read."""
    while not one.look(window):
        pass
    with rows_file(folder, window).open() as lines:
        return [json.loads(line)["n"] for line in lines]


class Told:
    """Takes the place of the process, and reports what it is told."""

    alive = True

    def __init__(self, *reports: Any) -> None:
        self.reports, self.waits = list(reports), list[float]()

    def send(self, value: object) -> None:
        assert isinstance(value, DataSet | WindowRequest)

    def has_answer(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return bool(self.reports)

    def receive(self, seconds: float) -> Any:
        found = self.reports.pop(0)
        if isinstance(found, ProcessLost):
            raise found
        return found

    def end(self) -> None: ...


def test_windows_follow_each_other_and_only_their_files_are_read(hub: HubServer, tmp_path: Path) -> None:
    one = reader(tmp_path, 250)
    assert numbers(one, tmp_path, 0) == list(range(250))
    assert set(hub.served) == {"train-0.jsonl", "train-1.jsonl"} and not (tmp_path / "rows-00000000.partial").exists()
    assert (one.log.commit, one.log.count, len(one.log.cursors)) == (COMMIT, None, 2)
    hub.served.clear()
    assert numbers(one, tmp_path, 1) == list(range(250, 500))
    assert set(hub.served) == {"train-2.jsonl"}  # what has been read is not asked for again
    assert numbers(one, tmp_path, 2) == list(range(500, 600))
    assert one.log.count == 3
    hub.commits.append("f" * 40)
    assert numbers(one, tmp_path, 3) == list(range(250))  # the next pass
    one.close()

    log = json.loads((tmp_path / "windows.json").read_text())
    assert (log["name"], log["rows"], log["commit"], log["count"]) == ("me/Lines", 250, COMMIT, 3)
    hub.served.clear()
    hub.asked.clear()
    resumed = reader(tmp_path, 250)
    assert not list(tmp_path.glob("rows-*"))
    assert numbers(resumed, tmp_path, 5) == list(range(500, 600))
    resumed.close()
    # The first file also serves to find the columns. Its rows are read once, and the newest commit is not used.
    assert hub.served["train-0.jsonl"] <= 2 * SHARD * 30 and not any("f" * 40 in path for path in hub.asked)
    assert "GET /api/datasets/me/Lines" not in hub.asked and any(COMMIT in path for path in hub.asked)


def test_only_the_needed_columns_of_parquet_are_asked_for(hub: HubServer, tmp_path: Path) -> None:
    one = reader(tmp_path, 300, "me/Table")
    assert numbers(one, tmp_path, 0) == list(range(300))
    assert rows_file(tmp_path, 0).read_text().startswith('{"n": 0}\n')
    size = (hub.repositories["datasets"]["me/Table"] / "train.parquet").stat().st_size
    assert size > 20_000_000 and hub.served["train.parquet"] < 0.8 * size
    one.close()


def test_a_hub_that_fails_at_first_is_asked_again(
    hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.failing = 1
    one = reader(tmp_path, 100, columns=["n", "text"])
    assert numbers(one, tmp_path, 0) == list(range(100))
    assert 'n": 0, "text": "é"}' in rows_file(tmp_path, 0).read_text()
    one.close()
    said = capfd.readouterr().err
    assert f"warning: {hub.url} failed (" in said and said.count("trying again") == 1 and "503" in said


def test_a_hub_that_does_not_answer_is_given_up(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.mute.add("train-2.jsonl")
    one = reader(tmp_path, 250)
    assert numbers(one, tmp_path, 0) == list(range(250))
    monkeypatch.setattr(windows, "PATIENCE_S", 1.0)
    with pytest.raises(RunError, match=rf"{hub.url} has sent no rows of me/Lines for 1 s \(it does not answer\): data"):
        numbers(one, tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["windows.json"]
    hub.mute.clear()
    monkeypatch.setattr(windows, "PATIENCE_S", 600.0)
    one.start(1)  # in a new process
    assert numbers(one, tmp_path, 1) == list(range(250, 500))
    one.close()


@pytest.mark.parametrize("commit", [long(None), COMMIT])
def test_a_hub_that_has_answered_gets_more_time(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str | None
) -> None:
    hub.mute.add("train-0.jsonl")  # the data set cannot be opened
    one = WindowReader(tmp_path, WindowLog("me/Lines", 10, commit), "train", ["n"])
    while not any(path.endswith("/train-0.jsonl") for path in hub.asked):
        assert not one.look(0)
    monkeypatch.setattr(windows, "FIRST_PATIENCE_S", 0.0)
    assert not one.look(0)
    monkeypatch.setattr(windows, "PATIENCE_S", 0.0)
    with pytest.raises(RunError, match=r"has sent no rows of me/Lines for 0 s \(it does not answer\)"):
        one.look(0)


def test_a_hub_that_never_answers_gets_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WorkerProcess", lambda *_: Told(HubFailed("no route to host")))
    monkeypatch.setattr(windows, "FIRST_PATIENCE_S", 0.0)
    with pytest.raises(RunError, match=r"for 0 s \(no route to host\): data.stream_rows needs internet"):
        reader(tmp_path, 10).look(0)


def test_an_error_from_reading_ahead_is_final_only_if_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (
        Told(WindowDone(False, None), UserError("the token has expired")),
        Told(WindowDone(False, None)),
        Told(UserError("it is gone")),
    )
    started = iter([first, second, third])
    monkeypatch.setattr(windows, "WorkerProcess", lambda *_: next(started))
    one = reader(tmp_path, 10)
    first.reports, later = first.reports[:1], first.reports[1:]
    assert one.look(0)
    one.start(1)
    first.reports = later
    one.listen()
    one.start(1)  # the run trains: the hub is not asked for the same again and again
    assert one.look(1)
    assert capsys.readouterr().err == "warning: the token has expired; trying again\n"
    second.reports = [UserError("it is gone")]
    one.start(2)
    one.listen()
    for _ in range(2):
        with pytest.raises(UserError, match="it is gone"):
            one.look(2)
    assert next(started, None) is None


def test_a_window_that_was_read_ahead_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(WindowDone(False, None))
    monkeypatch.setattr(windows, "WorkerProcess", lambda *_: told)
    one = reader(tmp_path, 10)
    one.start(0)
    one.listen()
    assert one.look(0) and sum(told.waits) == 0


def test_rows_of_a_process_that_has_ended_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Told(WindowDone(False, None)), Told(WindowDone(False, None))
    started = iter([first, second])
    monkeypatch.setattr(windows, "WorkerProcess", lambda *_: next(started))
    one = reader(tmp_path, 10)
    one.start(0)
    one.listen()
    first.reports = [ProcessLost("ended with exit code 137")]
    with pytest.raises(ProcessLost):
        one.listen()
    assert one.look(0) and second.reports == []


@pytest.mark.parametrize(
    ("name", "commit", "said"),
    [
        ("me/None", None, r"^cannot read me/None from http://127.0.0.1:\d+: .*Repository Not Found"),
        ("me/Lines", "0" * 40, r"^cannot read me/Lines from .*Revision Not Found for url: .*/me/Lines/revision/0{40}"),
        ("me/Lines:other", COMMIT, r"^cannot read me/Lines:other from .*BuilderConfig 'other' not found"),
    ],
)
def test_a_data_set_that_is_not_there(hub: HubServer, tmp_path: Path, name: str, commit: str | None, said: str) -> None:
    one = WindowReader(tmp_path, WindowLog(name, 10, commit), "train", ["n"])
    with pytest.raises(UserError, match=said) as found:
        numbers(one, tmp_path, 0)
    assert not isinstance(found.value, RunError)
    with pytest.raises(UserError, match=said):  # the reason stays
        one.look(0)


def test_a_process_that_ends_is_replaced_unless_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def ended(*_: object) -> Told:
        started.append(Told(ProcessLost("ended with exit code 137")))
        started[-1].alive = False
        return started[-1]

    monkeypatch.setattr(windows, "WorkerProcess", ended)
    one = reader(tmp_path, 10)
    one.start(0)
    one.start(0)
    assert len(started) == 2
    with pytest.raises(RunError, match=r"^the process that reads me/Lines ended with exit code 137"):
        one.look(0)
    one.listen()
    assert len(started) == 3


ROWS = 1000


class Source:
    """Makes a stream of 1000 rows in four files, which fails at some rows, each time once."""

    def __init__(self, *faults: tuple[int, Exception]) -> None:
        self.faults, self.opened = dict(faults), 0

    def open(self, *_: object) -> datasets.IterableDataset:
        self.opened += 1
        return datasets.IterableDataset.from_generator(self.rows, gen_kwargs={"firsts": [0, 250, 500, 750]})

    def rows(self, firsts: Sequence[int]) -> Iterator[dict[str, Any]]:
        for first in firsts:
            for number in range(first, first + 250):
                if (fault := self.faults.pop(number, None)) is not None:
                    raise fault
                yield {"n": number, "date": np.datetime64(number, "D").item()}


def opened(monkeypatch: pytest.MonkeyPatch, source: Source) -> tuple[Stream, list[Any]]:
    reports: list[Any] = []
    monkeypatch.setattr(stream, "_opened", source.open)
    monkeypatch.setattr(stream, "commit_of", lambda name, revision: revision)
    monkeypatch.setattr(stream, "_FIRST_WAIT_S", 0.01)
    data = DataSet("me/Lines", "train", ("n",), COMMIT, Path("none"))
    return Stream(data, reports.append), reports


@pytest.mark.parametrize("row", [0, 10, 256, 300, 999])
def test_rows_after_a_fault_are_neither_lost_nor_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: int
) -> None:
    source = Source((row, ConnectionError("reset\n by peer")), (700, TimeoutError()))
    one, reports = opened(monkeypatch, source)
    found, first = list[int](), 0
    for rows in (300, 500, 500):
        written = write_window(one, WindowRequest(tmp_path / "rows.jsonl", first, rows, None))
        with (tmp_path / "rows.jsonl").open() as lines:
            found += [json.loads(line)["n"] for line in lines]
        first += rows
        assert written.is_last == (first > ROWS)
    assert found == list(range(ROWS)) and source.opened == 3
    failures = [report for report in reports if isinstance(report, HubFailed)]
    assert failures == [HubFailed("reset by peer"), HubFailed("TimeoutError")][:: 1 if row < 700 else -1]


def test_a_window_is_read_from_its_place_or_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read(one: Stream, order: WindowRequest) -> tuple[WindowDone, list[int]]:
        written = write_window(one, order)
        with order.path.open() as lines:
            return written, [json.loads(line)["n"] for line in lines]

    path = tmp_path / "rows.jsonl"
    one, _ = opened(monkeypatch, Source())
    written, _ = read(one, WindowRequest(path, 0, 333, None))
    assert written.next is not None and not written.is_last
    cursor = json.loads(json.dumps(written.next))
    for place, by in ((cursor, "known"), ({**cursor, "by": "another version"}, "counted"), (None, "counted")):
        source = Source((2, ConnectionError())) if by == "known" else Source()
        other, reports = opened(monkeypatch, source)
        assert read(other, WindowRequest(path, 333, 100, place))[1] == list(range(333, 433))
        assert (2 in source.faults) == (by == "known")  # the first file is not read again
        assert reports == [VersionKnown(COMMIT), RowsArrived()]
    last, rows = read(one, WindowRequest(path, 333, 667, None))
    assert last.is_last and rows == list(range(333, ROWS))
    assert read(one, WindowRequest(path, 0, 5, None))[1] == list(range(5))  # the next pass
    with pytest.raises(UserError, match=r"^the data set 'me/Lines' has 1,000 rows, and row 1,002 is needed"):
        one.seek(1001, None)


def test_heartbeats_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    one, reports = opened(monkeypatch, Source())
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(4):
        one.take(10)
        now[0] += 0.6
    assert reports == [VersionKnown(COMMIT), RowsArrived(), RowsArrived()]


def test_a_fault_of_the_data_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, reports = opened(monkeypatch, Source((20, ValueError("not\nJSON"))))
    with pytest.raises(UserError, match=r"^cannot read me/Lines from http.*: not JSON$"):
        write_window(one, WindowRequest(tmp_path / "rows.jsonl", 0, 100, None))
    assert not (tmp_path / "rows.jsonl").exists() and reports == [VersionKnown(COMMIT)]


def test_rows_that_cannot_be_written_are_an_error_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, _ = opened(monkeypatch, Source())
    with pytest.raises(RunError, match=r"none/rows.jsonl could not be written: "):
        write_window(one, WindowRequest(tmp_path / "none" / "rows.jsonl", 0, 100, None))


def test_dates_become_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, _ = opened(monkeypatch, Source())
    write_window(one, WindowRequest(tmp_path / "rows.jsonl", 0, 2, None))
    assert (tmp_path / "rows.jsonl").read_text() == '{"n": 0, "date": "1970-01-01"}\n{"n": 1, "date": "1970-01-02"}\n'


def test_text_that_is_not_valid_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, _ = opened(monkeypatch, Source())
    monkeypatch.setattr(one, "seek", lambda row, cursor: None)
    monkeypatch.setattr(one, "take", lambda count: [{"a": "x"}, {"a": ["\ud800"]}])
    with pytest.raises(UserError, match=r", row 12: not valid text in column 'a'"):
        write_window(one, WindowRequest(tmp_path / "rows.jsonl", 10, 2, None))


class Answer(Exception):
    def __init__(self, status: int) -> None:
        self.response = type("Response", (), {"status_code": status})()


class InClient(Exception):
    __module__ = "httpx._exceptions"


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def in_handler(error: Exception, context: Exception) -> Exception:
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (ConnectionError(), True),
        (TimeoutError(), True),
        (InClient(), True),
        (Answer(503), True),
        (Answer(500), True),
        (Answer(429), True),
        (Answer(408), True),
        (Answer(404), False),
        (Answer(401), False),
        (Answer(499), False),
        (ValueError(), False),
        (OSError(), False),
        (caused(FileNotFoundError(), Answer(503)), True),
        (in_handler(FileNotFoundError(), Answer(502)), True),
        (in_handler(ConnectionError(), Answer(404)), True),
        (caused(FileNotFoundError(), in_handler(Answer(404), ConnectionError())), False),
    ],
)
def test_which_errors_of_a_hub_may_pass(error: Exception, temporary: bool) -> None:
    assert is_temporary(error) is temporary


def test_the_process_reports_an_error_and_ends(tmp_path: Path) -> None:
    sockets = socket.socketpair()
    ours: Connection[Any, Any] = Connection(sockets[0].detach())
    ours.send(DataSet("me/Lines", "train", ("n",), COMMIT, tmp_path))
    ours.send(WindowRequest(tmp_path / "none" / "rows.jsonl", 0, 1, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "die_with_parent", lambda: None)
        stream.serve(sockets[1].detach())
    found = ours.recv()
    assert isinstance(found, RunError) and "could not be written" in str(found)


def test_requests_that_datasets_repeats_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def read(self) -> bytes:
            raise TimeoutError("no answer\nin time")

    def read(*_: object) -> WindowDone:
        logging.getLogger("datasets.utils.file_utils").warning("waiting")
        with pytest.raises(ConnectionError, match="Server Disconnected"):
            file_utils._add_retries_to_file_obj_read_method(Broken()).read()
        raise EOFError

    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 2)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0)
    monkeypatch.setattr(stream, "die_with_parent", lambda: None)
    monkeypatch.setattr(stream, "write_window", read)
    monkeypatch.setattr(file_utils.logger, "handlers", [])
    sockets = socket.socketpair()
    ours: Connection[Any, Any] = Connection(sockets[0].detach())
    ours.send(DataSet("me/Lines", "train", ("n",), COMMIT, tmp_path))
    ours.send(WindowRequest(tmp_path / "rows.jsonl", 0, 1, None))
    stream.serve(sockets[1].detach())
    found = [ours.recv() for _ in range(3) if ours.poll(1)]
    assert found == [HubFailed("waiting"), HubFailed("no answer in time"), HubFailed("no answer in time")]


def test_numbers_of_windows() -> None:
    log = WindowLog("me/Lines", 10)
    assert [log.place(window) for window in (0, 7)] == [0, 7]
    log.note(0, WindowDone(False, {"at": 1}))
    log.note(0, WindowDone(False, {"at": 1}))  # read again
    log.note(1, WindowDone(False, {"at": 2}))
    assert (log.cursors, log.count) == ([None, {"at": 1}, {"at": 2}], None)
    log.note(2, WindowDone(True, {"at": 3}))
    assert (log.cursors, log.count) == ([None, {"at": 1}, {"at": 2}], 3)
    assert [log.place(window) for window in range(2, 8)] == [2, 0, 1, 2, 0, 1]
    log.note(5, WindowDone(True, None))
    log.note(3, WindowDone(False, {"at": 1}))
    assert (log.cursors, log.count) == ([None, {"at": 1}, {"at": 2}], 3)


def test_a_run_keeps_the_version_and_the_windows_of_its_data(tmp_path: Path) -> None:
    assert read_log(tmp_path, "me/Lines", 10, resumes=False) == WindowLog("me/Lines", 10)
    with pytest.raises(UserError, match=r"the run has checkpoints, but no .*windows.json, which names the version"):
        read_log(tmp_path, "me/Lines", 10, resumes=True)
    path = tmp_path / "windows.json"
    path.write_text('{"name": "me/Lines", "rows": 10, "commit": "abc", "cursors": [null], "count": 4}')
    assert read_log(tmp_path, "me/Lines", 10, resumes=True) == WindowLog("me/Lines", 10, "abc", [None], 4)
    for name, rows in (("me/Lines", 11), ("me/Other", 10)):
        with pytest.raises(
            UserError, match=rf"data.train_files=me/Lines data.stream_rows=10, and now .*{name} and {rows}"
        ):
            read_log(tmp_path, name, rows, resumes=True)
    for text in ("{", "[]", '{"more": 1}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"windows.json cannot be read \("):
            read_log(tmp_path, "me/Lines", 10, resumes=True)


def test_the_log_of_a_run_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append((path, path.read_text() if path.is_file() else None))

    def renamed(partial: Path, path: Path) -> Path:
        events.append((partial, path))
        return rename(partial, path)

    events: list[tuple[Path, object]] = []
    rename = Path.replace
    one = reader(tmp_path, 10)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(windows, "WorkerProcess", lambda *_: Told(WindowDone(False, None)))
    assert one.look(0)
    (partial, text), *others = events
    assert text == (tmp_path / "windows.json").read_text() and json.loads(str(text))["cursors"] == [None, None]
    assert others == [(partial, tmp_path / "windows.json"), (tmp_path, None)]


def test_parts_of_a_window_have_its_blocks_and_the_places_in_the_data_set(tmp_path: Path) -> None:
    count = 2 * BLOCK_ROWS + 3
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(count)))
    parts = [[*window_blocks(tmp_path / "rows.jsonl", "me/Lines", 4000, part, 2)] for part in (0, 1)]
    assert [[len(block) for block in part] for part in parts] == [[BLOCK_ROWS, 3], [BLOCK_ROWS]]
    assert parts[0][0][0] == ({"n": 0}, "me/Lines, row 4,001")
    assert parts[1][0][0] == ({"n": BLOCK_ROWS}, f"me/Lines, row {4001 + BLOCK_ROWS:,}")
    assert sorted(row["n"] for part in parts for block in part for row, _ in block) == list(range(count))
