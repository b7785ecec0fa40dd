"""The report in a real browser."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_rl.tracking.page.report import write_page
from hpc_rl.tracking.planned import Expected
from hpc_rl.tracking.recorded import read_run
from hpc_rl.tracking.summary import RESULTS, SPEEDS
from hpc_rl.tracking.timeline import PHASES
from tests.browser import TIMEOUT_S, Browser, missing
from tests.marks import long
from tests.tracking.runs import HOSTILE, PPO, SFT, make_run

EXPECTED = Expected("update", 70.0, 80.0, 61.5, [], step_s=(12.0, 31.0))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if lacking := missing():
        pytest.skip(lacking)
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_page([read_run(make_run(tmp_path, attempts=2))], tmp_path / "one.html")


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    runs = [make_run(tmp_path, f"run-with-a-long-name-{n}", 20 - n, exit_code=n) for n in range(8)]
    return write_page([read_run(run) for run in runs], tmp_path / "several.html")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    runs = [make_run(tmp_path, f"lr_{n}") for n in range(6)]
    points = [{"optim.lr": lr, "model.path": path} for lr in ("1e-5", "3e-5", "1e-4") for path in ("x" * 80, "y")]
    recorded = [replace(read_run(run), swept=point) for run, point in zip(runs, points, strict=True)]
    return write_page(recorded, tmp_path / "sweep.html")


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1280, False), long(360, False), long(1280, True)])
def test_it_renders(browser: Browser, page: Path, comparison: Path, sweep: Path, width: int, dark: bool) -> None:
    for path, figures in ((page, 14), (comparison, 10), (sweep, 14)):
        browser.show(path, width, dark=dark)
        assert browser.complaints == [] and browser.asked == [path.as_uri()]
        assert browser.value("document.querySelectorAll('figure').length") == figures
        # Every plot has a canvas as wide as its card, with something drawn on it.
        drawn = browser.value(
            "[...document.querySelectorAll('figure')].map((figure) => {"
            "  const canvas = figure.querySelector('canvas');"
            "  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            "  const colours = new Set();"
            "  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) colours.add(pixels[i]);"
            "  return [canvas.clientWidth / figure.clientWidth, colours.size];"
            "})"
        )
        assert all(0.8 < share <= 1 and colours > 2 for share, colours in drawn), drawn
        assert browser.value("document.documentElement.scrollWidth") <= width
        background = browser.value("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(16, 21, 27)" if dark else "rgb(245, 246, 248)")
        assert browser.picture().startswith(b"\x89PNG")


def figure_of(title: str) -> str:
    return f"[...document.querySelectorAll('figure')].find(f => f.textContent.includes('{title}'))"


def box_of(browser: Browser, title: str) -> tuple[float, float, float]:
    """Left, middle and width of the plotting area, on the screen."""
    browser.value(f"{figure_of(title)}.scrollIntoView({{block: 'center'}})")
    box = f"{figure_of(title)}.querySelector('.u-over').getBoundingClientRect()"
    x, y, width = browser.value(f"(() => {{ const b = {box}; return [b.x, b.y + b.height / 2, b.width] }})()")
    return x, y, width


def tip(browser: Browser) -> list[str]:
    text: str = browser.value("document.querySelector('.tip:not([hidden])')?.textContent ?? ''")
    return text.splitlines()


def shown_at_the_last_step(browser: Browser, title: str) -> list[str]:
    """Lines of the tip if the pointer is at the right end of a plot."""
    x, y, width = box_of(browser, title)
    browser.point_at(x + width - 3, y)
    return tip(browser)


def shown_values(browser: Browser, title: str) -> list[str]:
    """The values in a plot's legend."""
    texts: list[str] = browser.value(f"[...{figure_of(title)}.querySelectorAll('output')].map(o => o.textContent)")
    return texts


def picture_of(browser: Browser, title: str) -> str:
    """What a plot draws, as a picture: it changes if and only if the plot does."""
    text: str = browser.value(f"{figure_of(title)}.querySelector('canvas').toDataURL()")
    return text


def settle(browser: Browser) -> None:
    """Let the page draw what was asked for before."""
    browser.call(
        "Runtime.evaluate",
        expression="new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))",
        awaitPromise=True,
    )


def drag(browser: Browser, y: float, start: float, end: float) -> None:
    mouse = {"button": "left", "clickCount": 1, "y": y}
    browser.point_at(start, y)
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=start, **mouse)
    for part in (0.5, 1.0):
        x = start + part * (end - start)
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, **{**mouse, "buttons": 1})
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=end, **mouse)
    settle(browser)


WAVE = 2 + 0.1 * math.sin(20)
"""As tests/tracking/runs.py has it at step 20, the last one."""


def test_values_at_the_cursor_are_shown_in_every_plot(browser: Browser, page: Path) -> None:
    browser.show(page, 1280, 900)
    step, training, _ = shown_at_the_last_step(browser, "Reward")
    assert step == "step 20"
    assert float(training.removeprefix("training: ")) == pytest.approx(0.2 * WAVE, rel=1e-3)
    assert float(shown_values(browser, "Entropy")[0]) == pytest.approx(1.1 * WAVE, rel=1e-3)
    assert float(shown_values(browser, "Peak memory")[0]) == pytest.approx(61 * WAVE, rel=5e-3)
    assert shown_values(browser, "Memory per node") == ["", ""]  # another x axis
    _, *areas = shown_at_the_last_step(browser, "Time per step")
    values = {name: float(value) for name, value in (line.split(": ") for line in areas)}
    assert values == pytest.approx({"generation": 3 * WAVE, "policy update": 1.5 * WAVE, "other": 0.5 * WAVE}, rel=1e-2)
    browser.point_at(5, 5)
    assert tip(browser) == [] and shown_values(browser, "Entropy") == [""]


@pytest.mark.parametrize("width", [360, 1280])
def test_the_bars_of_the_timeline_are_where_the_phases_were(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, width, 900)
    found = browser.value(
        "[...document.querySelectorAll('.timeline tbody tr')].map((row) => {"
        "  const all = row.querySelector('svg').getBoundingClientRect();"
        "  return [...row.querySelectorAll('rect')].map((bar) => bar.getBoundingClientRect())"
        "    .map((bar) => [(bar.x - all.x) / all.width, bar.width / all.width]);"
        "})"
    )
    assert len(found) == 8
    assert found[0] == [pytest.approx([0, 0.4], abs=0.03), pytest.approx([0.7, 0.3], abs=0.03)]
    assert found[6] == [pytest.approx([0.65, 0.25], abs=0.03)]


def test_zoom_is_shared_and_kept_in_the_address(browser: Browser, page: Path) -> None:
    browser.show(page, 1280, 900)
    before = picture_of(browser, "Entropy")
    x, y, width = box_of(browser, "Reward")
    drag(browser, y, x + 0.25 * width, x + 0.5 * width)
    zoom = browser.value("decodeURIComponent(location.hash)")
    unit, start, end = zoom.removeprefix("#zoom=").split(":")
    assert unit == "step" and float(start) == pytest.approx(1 + 19 / 4, abs=0.2)
    assert float(end) == pytest.approx(1 + 19 / 2, abs=0.2)
    assert picture_of(browser, "Entropy") != before
    assert shown_at_the_last_step(browser, "Entropy")[0] == "step 10"
    browser.value("document.getElementById('reset').click()")
    settle(browser)
    browser.point_at(5, 5)
    assert picture_of(browser, "Entropy") == before and browser.value("location.hash") == ""


def test_smoothing(browser: Browser, page: Path) -> None:
    browser.show(page, 1280, 900)
    browser.value("(s => { s.value = 0.9; s.dispatchEvent(new Event('input')) })(document.getElementById('smoothing'))")
    settle(browser)
    values, weight = [0.2 * (1 + 0.1 * math.sin(step) + step / 20) for step in range(1, 21)], 0.9
    total = sum(weight ** (20 - step) * value for step, value in enumerate(values, 1))
    expected = total / sum(weight ** (20 - step) for step in range(1, 21))
    _, training, _ = shown_at_the_last_step(browser, "Reward")
    assert float(training.removeprefix("training: ")) == pytest.approx(expected, rel=1e-3)
    assert "smooth=0.9" in browser.value("location.hash")


def test_log_axis(browser: Browser, tmp_path: Path) -> None:
    metrics = {"train/loss": 1.0, "train/grad_norm": 1.0, "critic/score/mean": -1.0}
    run = make_run(tmp_path, metrics=metrics)
    path = write_page([read_run(run)], tmp_path / "page.html")
    browser.show(path, 1280, 900)
    before = picture_of(browser, "Loss"), picture_of(browser, "Reward")
    browser.value("document.getElementById('log').click()")
    settle(browser)
    after = picture_of(browser, "Loss"), picture_of(browser, "Reward")
    assert after[0] != before[0] and after[1] == before[1]
    linear = f"{figure_of('Reward')}.querySelector('.linear').hidden"
    assert browser.value(linear) is False and browser.value(linear.replace("Reward", "Loss")) is True
    assert browser.complaints == []


def test_the_view_survives_a_reload(browser: Browser, comparison: Path) -> None:
    browser.show(comparison, 1280, 900)
    browser.value("document.querySelector('input[data-run=\"2\"]').click(); document.getElementById('log').click()")
    settle(browser)
    assert browser.value("location.hash") == "#log=1&hide=2"
    assert not any(line.startswith("run-with-a-long-name-2") for line in shown_at_the_last_step(browser, "Entropy"))
    before = picture_of(browser, "Throughput")
    browser.show(comparison, 1280, 900, fragment="#log=1&hide=2")
    browser.point_at(5, 5)
    assert picture_of(browser, "Throughput") == before


def test_a_swept_value_under_the_pointer(browser: Browser, sweep: Path) -> None:
    browser.show(sweep, 1280, 900)
    x, y, width = box_of(browser, "Validation reward")
    browser.point_at(x + width / 2, y)
    where, *values = tip(browser)
    assert where == "optim.lr=3e-5" and len(values) == 2 and values[1].startswith("path=y: ")


def test_the_names_of_stages_are_on_one_line(browser: Browser, tmp_path: Path) -> None:
    stages = [{"round": "1", "stage": name} for name in ("x", "generate-and-select")]
    runs = [read_run(make_run(tmp_path, f"p_1-{stage['stage']}")) for stage in stages]
    recorded = [replace(run, swept=stage) for run, stage in zip(runs, stages, strict=True)]
    browser.show(write_page(recorded, tmp_path / "pipeline.html"), 360)
    lines = browser.value(
        "[...document.querySelectorAll('td.value')].map((cell) => cell.firstChild).map((text) => {"
        "  const range = document.createRange(); range.selectNodeContents(text);"
        "  return range.getClientRects().length; })"
    )
    assert lines[:4] == [1, 1, 1, 1]


def test_no_table_is_wider_than_its_page(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Of runs with all results and speeds: eight runs of several kinds, a sweep of four options, and a pipeline."""
    results = [*RESULTS.values(), "generate/score", *SPEEDS.values()]
    every = {**PPO, **SFT, **dict.fromkeys(results, 0.1234), **{f"timing_s/{phase}": 0.25 for phase in PHASES}}
    runs = [read_run(make_run(tmp_path, f"sort-qwen2.5-0.5b-{n}-a", metrics=every)) for n in range(8)]
    runs = [replace(run, expected=EXPECTED, options={"a.b": run.name * 3, "c": "x" * 60}) for run in runs]
    swept = {"algorithm.advantage": "reinforce++", "actor.optim.lr": "1e-6", "rollout.temperature": "1.0"}
    sweep = [replace(run, swept={**swept, "model.path": f"/shared/models/{run.name}"}) for run in runs]
    stages = [replace(run, swept={"round": "1", "stage": f"evaluate-before-{n}"}) for n, run in enumerate(runs)]
    for name, shown in (("runs", runs), ("sweep", sweep), ("pipeline", stages), ("one", runs[:1])):
        browser.show(write_page(shown, tmp_path / f"{name}.html"), 1200)
        tables = browser.value(
            "[...document.querySelectorAll('details')].forEach((each) => { each.open = true; }) ||"
            "[...document.querySelectorAll('table')].map((table) => ["
            "  table.querySelector('th').textContent, table.offsetWidth, table.parentElement.clientWidth,"
            "  table.parentElement.scrollWidth])"
        )
        assert len(tables) >= (6 if len(shown) > 1 else 3), tables
        assert all(scroll <= room and width <= room for _, width, room, scroll in tables), tables


@pytest.mark.parametrize(("value", "height"), [(0.0, 1.0), (3.0, 0.5), (-3.0, 0.5)])
def test_a_constant_is_not_drawn_around_zero(browser: Browser, tmp_path: Path, value: float, height: float) -> None:
    """A constant 0 is at the bottom of its plot, and any other one in the middle."""
    run = read_run(make_run(tmp_path))
    path = write_page([replace(run, records=[{**each, "actor/ppo_kl": value} for each in run.records])], tmp_path / "p")
    browser.show(path.rename(path.with_suffix(".html")), 1280, 900)
    top, bottom, line = browser.value(
        f"(() => {{ const figure = {figure_of('KL per step')};"
        "  const [canvas, over] = ['canvas', '.u-over'].map((each) => figure.querySelector(each));"
        "  const [outer, inner] = [canvas, over].map((each) => each.getBoundingClientRect());"
        "  const {data, width} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        "  const blue = [];"
        "  for (let i = 0; i < data.length; i += 4)"
        "    if (data[i] === 0 && data[i + 1] === 0x68 && data[i + 2] === 0xb5) blue.push(Math.floor(i / 4 / width));"
        "  const scale = outer.height / canvas.height;"
        "  return [inner.top - outer.top, inner.bottom - outer.top, scale * blue[Math.floor(blue.length / 2)]]; })()"
    )
    assert (line - top) / (bottom - top) == pytest.approx(height, abs=0.03)


def test_labels_do_not_overlap(browser: Browser, comparison: Path, sweep: Path) -> None:
    for path in (comparison, sweep):
        browser.show(path, 360)
        overlaps = browser.value(
            "[...document.querySelectorAll('figure')].filter((figure) => {"
            "  const caption = figure.querySelector('figcaption').getBoundingClientRect();"
            "  return caption.bottom > figure.querySelector('.u-wrap').getBoundingClientRect().top + 1;"
            "}).length"
        )
        assert overlaps == 0


def test_an_active_run_s_page_reloads(browser: Browser, tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, steps=7, exit_code=None))
    path = write_page([run], tmp_path / "page.html", refresh_s=1)
    browser.show(path)
    write_page([replace(run, name="later")], path)
    deadline = time.monotonic() + TIMEOUT_S
    while browser.value("document.title") != "later · hpc-rl":
        assert time.monotonic() < deadline, "the page does not reload"


def test_hostile_text_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path, "x", config=f"# {HOSTILE[:40]}\n", text=HOSTILE)
    path = write_page([read_run(run), read_run(run)], tmp_path / "page.html")
    browser.show(path)
    assert browser.complaints == [] and browser.asked == [path.as_uri()]
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert "<img src=x" in browser.value("document.body.innerText")


def test_a_script_that_got_in_would_not_run(browser: Browser, page: Path) -> None:
    """Behind the escaping stands the page's own policy: no script but the one whose hash it names, no request."""
    broken = page.with_name("broken.html")
    bad = "<script>document.title = 'ran'</script><img src=http://127.0.0.1:9/ onerror=\"document.title = 'ran'\">"
    broken.write_text(page.read_text().replace("<h2>History", bad + "<h2>History"))
    browser.show(broken)
    assert browser.value("document.title") == "ppo-1 · hpc-rl"
    assert len([text for text in browser.complaints if "Content Security Policy" in text]) >= 2
