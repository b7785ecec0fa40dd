from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.recorded import differences, flat, read_run, read_samples
from hpc_rl.tracking.report import failure_reported, render_page, report_end, write_page
from hpc_rl.tracking.samples import samples_of_one, spread
from tests.tracking.runs import HOSTILE, PPO, make_run

STYLE = Path(__file__).parents[2] / "hpc_rl" / "tracking" / "page" / "style.css"


class Parsed(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(*runs: RunDir) -> Parsed:
    return Parsed(render_page([read_run(run) for run in runs]))


def test_one_run(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, attempts=2))
    # Learning 5, updates 2, speed 3, nodes 4.
    assert page.tags.count("figure") == 14 and page.links == [] and page.tags.count("script") == 1
    assert render_page([read_run(RunDir(tmp_path / "ppo-1"))]).startswith("<!doctype html>")
    for said in ("finished", "20 steps", "4.00 node hours", "0.227 → 0.418", "update actor", "other", "2 + 2?"):
        assert said in page.text, said
    assert "2 attempts, 1 by requeue" in page.text and "queued again (exit code 75)" in page.text
    assert "0: gpu00" in page.text and "actor:\n  optim: {lr: 1.0e-06}" in page.text


def test_several_runs(tmp_path: Path) -> None:
    other = {key: value for key, value in PPO.items() if key != "val/score"}
    first = make_run(tmp_path, "slow")
    second = make_run(tmp_path, "fast", 7, metrics=other, exit_code=1, config="actor:\n  optim: {lr: 1.0e-05}\n")
    page = page_of(first, second)
    assert "failed at step 7 of 20" in page.text and "finished" in page.text
    assert re.search(r"actor\.optim\.lr\s*1e-06\s*1e-05", page.text.replace("\n", " "))
    assert re.search(r"trainer\.nnodes\s*2\s*–", page.text)
    assert "slow, step 20" in page.text and "fast, step 20" in page.text and page.text.count("1 attempt") == 2
    assert re.search(r"gen\s*4\.\d+\s*3\.\d+", page.text)


def test_a_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, steps=0, exit_code=137))
    assert "failed · 2.00 node hours" in page.text and "exit code 137" in page.text and "Nodes" in page.text


def test_a_run_that_has_not_started(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0, attempts=0)
    with pytest.raises(UserError, match="ppo-1 has nothing to report yet"):
        write_page([read_run(run)], run.report)
    assert not run.report.exists()


def test_a_report_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.report.mkdir()
    assert report_end(run, 0).startswith("warning: there is no report: ")
    run.report.rmdir()
    assert report_end(run, 0) == f"report: {run.report}"
    assert sorted(path.name for path in run.path.iterdir() if path.name.startswith(".")) == []


def test_a_run_that_fails_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=7, exit_code=None)
    with pytest.raises(ZeroDivisionError), failure_reported(run):
        raise ZeroDivisionError
    assert "failed at step 7 of 20" in run.report.read_text()


def test_whatever_a_run_says_is_text(tmp_path: Path) -> None:
    run = make_run(tmp_path, "<b>&amp;", config=f"model: {{path: {json.dumps(HOSTILE)}}}\n", text=HOSTILE)
    path = write_page([read_run(run)], tmp_path / "page.html")
    page = Parsed(path.read_text())
    assert "img" not in page.tags and page.tags.count("script") == 1
    assert "<b>&amp;" in page.text and "{{ 1 + 1 }}" in page.text and 'onerror="alert(1)"' in page.text


def test_a_hundred_thousand_steps_are_a_small_file(tmp_path: Path) -> None:
    metrics = {key: PPO[key] for key in ("critic/score/mean", "timing_s/step", "timing_s/gen")}
    run = make_run(tmp_path, steps=100_000, total=100_000, metrics=metrics)
    with run.samples.open("a") as file:
        for step in range(100_000, 100_500):
            row = {"step": step, "prompt": "2 + 2?", "response": "x" * 20_000, "answer": "4", "score": 0}
            file.write(json.dumps(row) + "\n")
    path = write_page([read_run(run)], run.report)
    assert path.stat().st_size < 200_000


def test_samples_are_spread_over_time_and_said_once(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [{"step": s, "prompt": "p", "response": "a" if s < 50 else "b", "score": 1} for s in range(0, 101, 5)]
    rows += [{"step": 90, "prompt": "p", "response": "again", "score": 1}]  # a resumed run takes back what came after
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 95, "pro')
    run = read_run(make_run(tmp_path))
    shown = samples_of_one(type(run)(run.name, [], read_samples(path), run.history, [], ""))
    assert shown[0].rows == [("0 to 35", "a", "1"), ("55 to 70", "b", "1"), ("90", "again", "1")]
    assert spread(range(100), 5) == {0, 25, 50, 74, 99}


def test_differences_of_configurations() -> None:
    one, two = flat({"a": {"b": 1, "c": [1]}, "d": {}}), flat({"a": {"b": 1, "c": [2]}, "e": None})
    assert differences([one, two]) == [("a.c", [[1], [2]]), ("d", [{}, None])]


def test_colours_can_be_told_from_what_is_behind_them() -> None:
    """WCAG 2.2: 4.5 for text (1.4.3), 3 for lines (1.4.11)."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for name in ("ink", "soft", "good", "bad", "wait"):
            assert min(contrast(colours[name], colours[behind]) for behind in ("page", "card")) >= 4.5, name
        for name in (f"c{i}" for i in range(8)):
            assert contrast(colours[name], colours["card"]) >= 3, name


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
