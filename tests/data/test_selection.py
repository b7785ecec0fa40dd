"""Selection of training data from scored responses."""

from __future__ import annotations

import json
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from hpc_rl.config.training.preferences import PreferenceDataConfig
from hpc_rl.data.reading.formats import read_rows
from hpc_rl.data.reading.preference_rows import PairRow, to_preference
from hpc_rl.data.selection import SelectionCounts, select
from hpc_rl.errors import UserError

scores = st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
groups = st.lists(st.lists(scores, min_size=2, max_size=5), min_size=1, max_size=6)


def rows_of(groups: list[list[float | None]], **more: Any) -> list[dict[str, Any]]:
    return [
        {"data": "d", "index": i, "prompt": f"p{i}", "sample": k, "response": f"r{i}-{k}", "score": score, **more}
        for i, group in enumerate(groups)
        for k, score in enumerate(group)
    ]


def run(folder: Path, rows: list[dict[str, Any]], method: str, threshold: float | None = None, times: int = 1) -> Any:
    file, out = folder / "responses.jsonl", folder / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = select([str(file)] * times, method, threshold, out)
    return list(read_rows(out)), counts


def test_best_of_n_as_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}]
    rows = [{**row, "prompt": chat} for row in rows_of([[0.0, 1.0, 1.0]])] + [
        {**row, "index": 1} for row in rows_of([[None, 0.5]])
    ]
    found, counts = run(tmp_path, rows, "best-of-n")
    assert (
        found
        == [
            {"messages": [*chat, {"role": "assistant", "content": "r0-1"}], "score": 1.0},
            {"messages": [{"role": "user", "content": "p0"}, {"role": "assistant", "content": "r0-1"}], "score": 0.5},
        ][:1]
    )
    assert counts == SelectionCounts(prompts=2, responses=5, failed=1, unscored=1, rows=1)


def test_pairs_leave_out_equal_scores(tmp_path: Path) -> None:
    found, counts = run(tmp_path, rows_of([[0.0, 1.0, 0.5], [1.0, 1.0]]), "pairs")
    assert found == [{"prompt": "p0", "chosen": "r0-1", "rejected": "r0-0", "margin": 1.0}]
    assert str(counts) == "1 row from 5 responses to 2 prompts; 1 prompt with equal scores"


def test_rows_keep_what_the_prompt_was_rendered_with(tmp_path: Path) -> None:
    own = {"system": "Be brief.", "tools": [{"name": "add"}], "enable_thinking": False}
    rows = rows_of([[0.0, 1.0]], **own, functions=None, other=1)
    for method in ("best-of-n", "pairs"):
        (found,) = run(tmp_path, rows, method)[0]
        assert {name: found[name] for name in own} == own and not found.keys() & {"functions", "other"}


@pytest.mark.parametrize("method", ["best-of-n", "threshold"])
def test_earlier_turns_of_the_prompt_are_not_learned(tmp_path: Path, method: str) -> None:
    asked, earlier = {"role": "user", "content": "q"}, {"role": "assistant", "content": "earlier"}
    rows = [{**row, "prompt": [asked, earlier, asked]} for row in rows_of([[0.0, 1.0]])]
    kept = [asked, {**earlier, "train": False}, asked]
    said = {"role": "assistant", "content": "r0-1"}
    assert run(tmp_path, rows, method, 1.0)[0] == [{"messages": [*kept, said], "score": 1.0}]
    told = [said, {"role": "tool", "content": "3"}, said]
    rows = [{**row, "conversation": [asked, earlier, asked, *told]} for row in rows]
    assert run(tmp_path, rows, method, 1.0)[0] == [{"messages": [*kept, *told], "score": 1.0}]


def test_conversations_stay_whole(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "1 + 2?"}
    told = [[asked, {"role": "assistant", "content": text}, {"role": "tool", "content": "3"}] for text in "ab"]
    answers = [[*each, {"role": "assistant", "content": "3"}] for each in told]
    rows = [{**row, "conversation": each} for row, each in zip(rows_of([[0.0, 1.0]]), answers, strict=True)]
    assert run(tmp_path, rows, "best-of-n")[0] == [{"messages": answers[1], "score": 1.0}]
    (pair,) = run(tmp_path, rows, "pairs")[0]
    assert pair == {"prompt": "p0", "chosen": answers[1], "rejected": answers[0], "margin": 1.0}
    found = to_preference(pair, PreferenceDataConfig(train_files=["a.jsonl"]), "row 1")
    assert isinstance(found, PairRow) and (found.chosen, found.common) == (answers[1], 1)


def test_pairs_of_conversations_that_differ_first_in_an_observation_are_left_out(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "a"}
    other = {"role": "assistant", "content": "b"}
    told = [{"role": "tool", "content": text} for text in "34"]
    talks = [
        [asked, said, told[0], said],
        [asked, said, told[1], other],
        [asked, other],
        [asked, said],
        [told[0], said],
    ]
    rows = [
        {**row, "conversation": each} for row, each in zip(rows_of([[0.0, 0.5, 1.0, 0.0, 0.0]]), talks, strict=True)
    ]
    found, counts = run(tmp_path, rows, "all-pairs")
    kept = [(talks.index(pair["chosen"]), talks.index(pair["rejected"])) for pair in found]
    assert kept == [(2, 0), (2, 1), (2, 3)] and counts.unlike == 4
    assert "; 4 pairs whose first difference is not in a turn of the assistant" in str(counts)
    found, counts = run(tmp_path, [rows[0], rows[1], {**rows[2], "index": 1}, {**rows[3], "index": 1}], "pairs")
    assert [pair["chosen"] for pair in found] == [talks[2]] and counts.unlike == 1


def test_the_threshold_is_included_and_one_response_is_enough(tmp_path: Path) -> None:
    found, counts = run(tmp_path, rows_of([[0.5], [0.4]]), "threshold", 0.5)
    assert [row["messages"][1]["content"] for row in found] == ["r0-0"]
    assert (counts.rows, counts.below) == (1, 1)


@given(groups)
@settings(max_examples=60)
def test_what_is_selected_follows_from_the_scores(tmp_path_factory: pytest.TempPathFactory, found: Any) -> None:
    folder = tmp_path_factory.mktemp("selection")
    known = [[score for score in group if score is not None] for group in found]
    expected = {
        "best-of-n": sum(len(group) > 1 for group in known),
        "pairs": sum(len(set(group)) > 1 for group in known),
        "all-pairs": sum(better > worse for group in known for better in group for worse in group),
        "threshold": sum(score >= 0.5 for group in known for score in group),
    }
    rows = rows_of(found)
    by_text = {row["response"]: row for row in rows}
    for method, count in expected.items():
        threshold = 0.5 if method == "threshold" else None
        if not count:
            with pytest.raises(UserError, match=r"nothing was selected|none of"):
                run(folder, rows, method, threshold)
            continue
        once, counts = run(folder, rows, method, threshold)
        twice, again = run(folder, rows, method, threshold, times=2)
        assert once == twice and again.duplicates == count, "a second copy of a file adds nothing"
        assert len(once) == count == counts.rows
        assert counts.responses == len(rows) and counts.failed == sum(row["score"] is None for row in rows)
        for row in once:
            best = by_text[row["chosen"] if method.endswith("pairs") else row["messages"][-1]["content"]]
            group = known[best["index"]]
            if method == "all-pairs":
                worse = by_text[row["rejected"]]
                assert worse["index"] == best["index"] and row["margin"] == best["score"] - worse["score"] > 0
                continue
            assert best["score"] >= 0.5 if threshold else best["score"] == max(group)
            if method == "pairs":
                worst = by_text[row["rejected"]]
                assert worst["index"] == best["index"] and worst["score"] == min(group) < best["score"]


@pytest.mark.parametrize(
    "rows, method, message",
    [
        (rows_of([[1.0], [0.0]]), "best-of-n", "row 1: the prompt has one response, but best-of-n and pairs compare"),
        (rows_of([[1.0, 0.0], [0.0]]), "pairs", "row 3: the prompt has one response"),
        ([{k: v for k, v in row.items() if k != "score"} for row in rows_of([[1.0, 0.0]])], "pairs", "have no scores"),
        (rows_of([[None, None]]), "best-of-n", "none of 2 responses has a score"),
        (rows_of([["1", 0.0]]), "pairs", "column 'score' has '1'; a number or null is needed"),  # type: ignore[list-item]
        ([{"messages": []}], "pairs", "row 1: no column 'index', so this is not a response"),
        (rows_of([[1.0, 1.0]]), "pairs", "nothing was selected: 0 rows from 2 responses to 1 prompt; 1 prompt with"),
    ],
)
def test_what_is_refused_leaves_the_output(tmp_path: Path, rows: Any, method: str, message: str) -> None:
    (tmp_path / "out.jsonl").write_text("before")
    with pytest.raises(UserError) as caught:
        run(tmp_path, rows, method)
    assert message in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "responses.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == "before"


def test_messages_with_values_that_json_lacks(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q", "at": date(2025, 1, 2)}]
    file, out = tmp_path / "responses.parquet", tmp_path / "out.jsonl"
    parquet.write_table(pyarrow.Table.from_pylist(rows_of([[0.0, 1.0]], prompt=chat)), file)
    assert select([str(file)], "best-of-n", None, out).rows == 1
    assert next(read_rows(out))["messages"][0]["at"] == "2025-01-02"


def test_files_are_kept_apart(tmp_path: Path) -> None:
    """The last prompt of a file and the first one of the next may have the same number."""
    files = []
    for name in ("a", "b"):
        file = tmp_path / f"{name}.jsonl"
        rows = [{**row, "prompt": name} for row in rows_of([[0.0, 1.0]])]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(str(file))
    assert select(files, "pairs", None, tmp_path / "out.jsonl").rows == 2
    assert [key for key, _ in groupby(row["prompt"] for row in read_rows(tmp_path / "out.jsonl"))] == ["a", "b"]
