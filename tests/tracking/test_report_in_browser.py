"""The report in a real browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rl.tracking.recorded import read_run
from hpc_rl.tracking.report import write_page
from tests.browser import Browser, missing
from tests.tracking.runs import HOSTILE, make_run


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


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_renders(browser: Browser, page: Path, comparison: Path, width: int, dark: bool) -> None:
    for path, figures in ((page, 14), (comparison, 9)):
        browser.show(path, width, dark=dark)
        assert browser.complaints == [] and browser.asked == [path.as_uri()]
        # Every plot has lines or areas that can be seen, in a colour of its own.
        drawn = "[...document.querySelectorAll('figure > svg')].filter(svg => [...svg.querySelectorAll('[data-name]')]"
        visible = ".every(shape => shape.getBBox().width > 100 && getComputedStyle(shape).display != 'none')).length"
        assert browser.value(drawn + visible) == browser.value("document.querySelectorAll('figure').length") >= figures
        assert browser.value("document.documentElement.scrollWidth") <= width
        background = browser.value("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(16, 21, 27)" if dark else "rgb(245, 246, 248)")
        assert browser.picture().startswith(b"\x89PNG")


def shown_at_the_last_step(browser: Browser, title: str) -> list[str]:
    """Lines of the tip when the pointer is near the right end of a plot."""
    figure = f"[...document.querySelectorAll('figure')].find(f => f.textContent.includes('{title}'))"
    box = f"{figure}.querySelector(':scope > svg').getBoundingClientRect()"
    x, y, width = browser.value(f"(() => {{ const b = {box}; return [b.x, b.y, b.width] }})()")
    browser.point_at(x + width - 14, y + 60)
    text: str = browser.value("document.querySelector('.tip').textContent")
    return text.splitlines()


def test_values_under_the_pointer(browser: Browser, page: Path) -> None:
    wave = 2 + 0.1 * math.sin(20)  # as tests/tracking/runs.py has it at step 20
    browser.show(page, 1280, 3000)
    step, training, _ = shown_at_the_last_step(browser, "Reward")
    assert step == "step 20"
    assert float(training.removeprefix("training: ")) == pytest.approx(0.2 * wave, abs=1e-3)
    _, *areas = shown_at_the_last_step(browser, "Time per step")
    values = {name: float(value) for name, value in (line.split(": ") for line in areas)}
    assert values == pytest.approx({"gen": 3 * wave, "update actor": 1.5 * wave, "other": 0.5 * wave}, abs=0.02)
    browser.point_at(5, 5)
    assert browser.value("document.querySelector('.tip')") is None


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
