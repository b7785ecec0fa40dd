from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.tree import flat
from hpc_rl.errors import UserError
from hpc_rl.formats.offer import LentNode, write_lent_nodes
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.history import History
from hpc_rl.tracking.page import report
from hpc_rl.tracking.page.plot import MOST_BINS
from hpc_rl.tracking.page.report import UPLOT, failure_reported, render_page, report_end, write_page
from hpc_rl.tracking.recorded import RecordedRun, differences, read_run
from hpc_rl.tracking.timeline import COLOURS, LENT_BY
from tests.tracking.runs import BEGAN, HOSTILE, PPO, SFT, SPANS, make_run, plot_titles

PAGE = Path(report.__file__).parent
STYLE = PAGE / "style.css"


class Parsed(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data

    @property
    def plots(self) -> list[dict[str, Any]]:
        """The data that the page's script draws."""
        return list(json.loads(self.scripts[0])["plots"])


def page_of(*runs: RunDir) -> Parsed:
    return Parsed(render_page([read_run(run) for run in runs]))


def test_one_run(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, attempts=2))
    # Learning 5, updates 2, speed 3, nodes 4.
    assert page.tags.count("figure") == len(page.plots) == 14 and page.links == [] and page.tags.count("script") == 3
    assert render_page([read_run(RunDir(tmp_path / "ppo-1"))]).startswith("<!doctype html>")
    for text in ("COMPLETED · step 20 of 20 ·", "4.00 node hours", "0.233 → 0.406", "policy update", "other", "2 + 2?"):
        assert text in page.text, text
    assert "2 attempts, 1 by requeue" in page.text and "REQUEUED (exit code 75)" in page.text
    assert "0: gpu00" in page.text and "actor:\n  optim: {lr: 1.0e-06}" in page.text


def test_the_timeline_of_the_latest_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    text = render_page([read_run(run)])
    section = text.partition("Timeline of step 20")[2].partition("</section>")[0]
    assert re.findall(r'<rect class="s(\d)" x="([\d.]+)%" y="3" width="([\d.]+)%"', section)[:3] == [
        ("0", "0.0", "40.0"),
        ("0", "70.0", "30.0"),
        ("1", "10.0", "35.0"),
    ]
    assert re.findall(r"<th scope=\"row\">([^<]+)<", section) == [
        *("generation", "rewards", "log-probabilities", "values", "advantages", "critic update", "policy update"),
        "weight sync",
    ]
    assert re.findall(r"<text x=\"([\d.]+)%\"[^>]*>(\d+)<", section)[-1] == ("100.0", "20")
    assert "Timeline" not in render_page([read_run(run), read_run(run)])
    run.timeline.unlink()
    assert "Timeline" not in render_page([read_run(run)])


def test_several_runs(tmp_path: Path) -> None:
    other = {key: value for key, value in PPO.items() if key != "val/score"}
    first = make_run(tmp_path, "slow")
    second = make_run(tmp_path, "fast", 7, metrics=other, exit_code=1, config="actor:\n  optim: {lr: 1.0e-05}\n")
    page = page_of(first, second)
    assert re.search(r"slow.*COMPLETED\s*20 of 20.*fast.*FAILED\s*7 of 20", page.text, re.DOTALL)
    assert re.search(r"actor\.optim\.lr\s*1e-06\s*1e-05", page.text.replace("\n", " "))
    assert re.search(r"trainer\.nnodes\s*2\s*–", page.text)
    assert "slow, step 20" in page.text and "fast, step 20" in page.text and page.text.count("1 attempt") == 2
    assert re.search(r"generation\s*4\.\d+", page.text.partition("Seconds, median")[2])


def test_a_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, steps=0, exit_code=137))
    assert "FAILED · 2.00 node hours" in page.text and "exit code 137" in page.text and "Nodes" in page.text


def test_a_run_that_has_not_started(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0, attempts=0)
    with pytest.raises(UserError, match="ppo-1 has nothing to report yet"):
        write_page([read_run(run)], run.report)
    assert not run.report.exists()


def test_a_report_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.report.mkdir()
    assert report_end(run, 0).startswith("warning: no report was written: ")
    run.report.rmdir()
    assert report_end(run, 0) == f"report: {run.report}"
    assert sorted(path.name for path in run.path.iterdir() if path.name.startswith(".")) == []


def test_a_run_that_fails_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=7, exit_code=None)
    with pytest.raises(ZeroDivisionError), failure_reported(run):
        raise ZeroDivisionError
    assert re.search(r"FAILED.*step 7 of 20", run.report.read_text())


def test_whatever_a_run_says_is_text(tmp_path: Path) -> None:
    run = make_run(tmp_path, "<b>&amp;", config=f"model: {{path: {json.dumps(HOSTILE)}}}\n", text=HOSTILE)
    path = write_page([read_run(run)], tmp_path / "page.html")
    page = Parsed(path.read_text())
    assert "img" not in page.tags and page.tags.count("script") == 3
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
    loaded = json.loads(Parsed(path.read_text()).scripts[0])
    (reward,) = [plot for plot in loaded["plots"] if plot["series"][0]["name"] == "training"][:1]
    line = reward["series"][0]
    assert 0.98 * MOST_BINS < len(line["mean"]) == len(line["low"]) == len(line["high"]) <= MOST_BINS
    page = path.read_text()
    assert "each point is the mean of several steps" in page
    assert "plots of one step in 2" in page and "of training" not in page


def test_any_number_of_runs_is_a_small_file(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, steps=1000, total=1000))
    path = write_page([replace(run, name=f"run-{number}") for number in range(100)], tmp_path / "page.html")
    page = Parsed(path.read_text())
    assert path.stat().st_size < 1_000_000
    assert len(page.plots[0]["series"]) == 100 and page.tags.count("input") == 2 + 100
    assert page.text.startswith("\n") and "run-0 and 99 other runs" in page.text


def test_a_long_list_of_differences_is_folded(tmp_path: Path) -> None:
    for options, is_open in ((12, True), (13, False)):
        pair = [
            replace(
                read_run(make_run(tmp_path / f"{options}", name)),
                options={f"k{i}": name for i in range(options)},
            )
            for name in ("a", "b")
        ]
        page = render_page(pair)
        assert f"{options} options that differ" in page and ("<details open>" in page) == is_open


def test_options_that_all_runs_share_are_shown_once(tmp_path: Path) -> None:
    one, two = (replace(read_run(make_run(tmp_path, n)), options={"a": 1, "b.c": n}) for n in ("x", "y"))
    page = Parsed(render_page([one, two]))
    assert "Options that all runs share" in page.text and "a: 1" in page.text and "x: all options" not in page.text


def test_runs_of_two_kinds(tmp_path: Path) -> None:
    """Learning is first, and memory last; options of one kind are in its own configuration."""
    sft = make_run(tmp_path, "sft", metrics=SFT, config="optim: {lr: 1}\ntrainer: {seed: null, nnodes: 2}\n")
    ppo = make_run(tmp_path, "ppo", metrics=PPO, config="actor: {n: 8}\ntrainer: {seed: 2, nnodes: 2}\n")
    for run in (sft, ppo):
        run.job.write_text(json.dumps({"kind": run.name}))
    page = render_page([read_run(sft), read_run(ppo)])
    tables = [
        re.findall(r"<th scope=\"(?:col|row)\"[^>]*>(?:<svg.*?</svg>)?([^<]+)<", one) for one in page.split("<table>")
    ]
    learning = ["Training loss", "Validation loss", "Training reward", "Validation reward"]
    assert tables[1] == ["Run", *learning, "State", "Step", "sft", "ppo"]
    assert tables[2] == ["Option", "sft", "ppo", "trainer.seed"]
    (speed,) = [table for table in tables if "Peak memory" in table]
    assert speed[:2] == ["Run", "Node hours"] and speed[-3:] == ["Peak memory", "sft", "ppo"]
    (phases,) = [table for table in tables if "Seconds, median" in table]
    assert phases[3:] == ["generation", "forward and backward", "policy update", "step"]
    assert re.search(r"trainer\.seed</th>\s*<td class=\"value\">null</td><td class=\"value\">2</td>", page)
    assert "sft: all options" in page and "Options that all runs share" not in page


def test_a_state_has_one_word_and_one_colour(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, attempts=2))
    last = run.history.attempts[-1]
    tones = {"COMPLETED": "done", "RUNNING": "", "STOPPED": "", "PENDING": "", "COMPLETING": "", "NOT SUBMITTED": ""}
    tones |= dict.fromkeys(("FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "KILLED"), "failed")
    for state, tone in tones.items():
        ended = replace(run, history=History((run.history.attempts[0], replace(last, state=state, exit_code=None))))
        page = render_page([ended])
        assert f'<span class="state {tone}">{state}</span>' in page and f'<td class="state {tone}">{state}</td>' in page
        page = render_page([replace(ended, status="PENDING")])
        assert '<span class="state ">PENDING</span>' in page and f'<td class="state {tone}">{state}</td>' in page


def test_an_active_run_s_page_reloads_itself(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, steps=7, exit_code=None))
    live, done = render_page([run], refresh_s=30.0), render_page([run])
    assert 'data-refresh="30"' in live and "reloads every 30 s" in live
    assert "data-refresh=" not in done.partition("<script")[0] and "reloads every" not in done


def test_the_plotting_library_is_the_published_one() -> None:
    """SHA-256 of dist/uPlot.iife.min.js and dist/uPlot.min.css of uPlot 1.6.32."""
    published = {
        f"{UPLOT}.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        f"{UPLOT}.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    assert {name: hashlib.sha256((PAGE / name).read_bytes()).hexdigest() for name in published} == published
    assert "v1.6.32" in (PAGE / f"{UPLOT}.js").read_text()[:60]


def test_a_page_carries_the_licence_of_the_library_and_the_hash_of_each_script(tmp_path: Path) -> None:
    page = render_page([read_run(make_run(tmp_path))])
    assert "Copyright (c) 2022 Leon Sorokin" in page and "uPlot 1.6.32" in page
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in page


def test_differences_of_configurations() -> None:
    one, two = flat({"a": {"b": 1, "c": [1]}, "d": {}}), flat({"a": {"b": 1, "c": [2]}, "e": None})
    runs = [
        RecordedRun("r", [], [], History(()), [], "", options, kind=kind) for options, kind in ((one, "x"), (two, "x"))
    ]
    assert differences(runs) == [("a.c", [[1], [2]]), ("d", [{}, None])]
    assert differences([runs[0], replace(runs[1], kind="y")]) == [("a.c", [[1], [2]])]
    # A kind has an option if one of its runs has it.
    third = replace(runs[1], kind="y", options={"d": 1})
    assert differences([*runs, third]) == [("d", [{}, None, 1])]


def test_colours_can_be_told_from_what_is_behind_them() -> None:
    """WCAG 2.2: 4.5 for text (1.4.3), 3 for lines (1.4.11)."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for name in ("ink", "soft", "good", "bad", "wait"):
            assert min(contrast(colours[name], colours[behind]) for behind in ("page", "card")) >= 4.5, name
        for name in (f"c{i}" for i in range(COLOURS)):
            assert contrast(colours[name], colours["card"]) >= 3, name


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_evaluations_are_a_table_that_compares_runs(tmp_path: Path) -> None:
    metric = {"value": 0.5, "low": 0.25, "high": 0.75, "prompts": 4}
    data = {
        "name": "test",
        "file": "test.jsonl",
        "prompts": 4,
        "truncated": 0.125,
        "failed": 1,
        "metrics": {"pass@1": metric},
    }
    evaluation = {
        "model": "/runs/sft-1/model",
        "n": 8,
        "temperature": 1.0,
        "interval": "95%, bootstrap",
        "data": [data],
    }
    runs = [make_run(tmp_path, name) for name in ("one", "two", "plain")]
    assert "Evaluation" not in page_of(*runs).text
    for run in runs[:2]:
        run.evaluation.write_text(json.dumps(evaluation))
    text = page_of(*runs).text
    assert (
        text.count("sft-1") == 2
        and text.count("0.500 [0.250, 0.750]") == 2
        and "12.5 %" in text
        and "In brackets: 95%, bootstrap." in text
    )


def test_jobs_that_lent_nodes(tmp_path: Path) -> None:
    run = make_run(tmp_path, attempts=2, metrics={**PPO, "rollout/lent_engines": 2.0, "rollout/lent_share": 0.3})
    run.timeline.write_text(
        json.dumps({"step": 20, "seconds": 20.0, "phases": {**SPANS, f"{LENT_BY}job 41": [[1.0, 7.0]]}})
    )
    lent = [
        LentNode("41", "gpu17", 4, 1204224, 0.31, 4, BEGAN, BEGAN + 900),
        LentNode("42", HOSTILE, places=2, joined=BEGAN + 1800),
    ]
    write_lent_nodes(run.path / "attempt-1", lent)
    text = page_of(run).text
    assert "4.00 + 0.75 lent node hours" in text and "2.00 + 0.75 lent" in text
    assert re.search(r"gpu17 \(job 41\)2023-11-1\d \d\d:\d\d2023-11-1\d \d\d:\d\d41,204,22431%", text)
    assert "lent by job 41" in text and {"Lent engines", "Tokens of lent engines"} <= plot_titles(run.path)
