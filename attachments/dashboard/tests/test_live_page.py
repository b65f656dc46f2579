"""The page of a live run in Chromium: what a reader does is kept, and nothing is loaded or drawn without need."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attachments.dashboard.tests.browser import Visit, visit
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from attachments.dashboard.tests.test_page import legend, opened, rewritten, until
from bench.chromium import viewing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

SHAPE = RunShape(groups=64, steps=8, planned_steps=12, token_steps=0)
STEPS = 10_000
MAX_SECOND_BYTES = 1_000_000
COUNT_DRAWS = """() => {
    window.draws = 0;
    const { clearRect } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.clearRect = function (...box) {
        window.draws += 1;
        return clearRect.apply(this, box);
    };
}"""
"""uPlot clears its canvas once per drawing."""

HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { configurable: true, value: hidden });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
TRANSFERRED = "() => performance.getEntriesByType('resource').reduce((sum, one) => sum + one.transferSize, 0)"
ROWS = "() => performance.getEntriesByType('resource').filter((one) => one.name.includes('/rows')).length"


def live(directory: Path, shape: RunShape = SHAPE) -> Path:
    """Write a run that this process seems to continue."""
    run = write_run(directory, shape)
    (run / ".lock").write_text(str(os.getpid()))
    return run


def add_step(run: Path, **values: Any) -> None:
    """Append a line to metrics.jsonl."""
    metrics = run / "metrics.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-1])
    step = last["step"] + 1
    with metrics.open("a") as file:
        file.write(json.dumps(last | {"step": step, "time/run": 3.0 * step} | values) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A live run."""
    return live(tmp_path / "live")


@pytest.fixture
def page(browser: Browser, run: Path) -> Iterator[Visit]:
    """Its overview, while it is followed."""
    with viewing(run) as address, visit(browser, address) as visited:
        opened(visited)
        until(visited, "document.querySelector('header [data-state]').dataset.state === 'live'")
        until(visited, "document.querySelector('[data-chart=reward] canvas') !== null")
        yield visited


def rows(visited: Visit, count: int) -> None:
    """Wait until the page has asked this many times more what is new."""
    visited.evaluate("performance.clearResourceTimings()")
    until(visited, f"({ROWS})() >= {count}")


def test_selection_focus_and_tooltip_stay_while_rows_arrive(page: Visit, run: Path) -> None:
    """The text that a user copies from, the link that the keyboard is on, and the explanation that is read."""
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.finding p:nth-child(3)'))")
    selected = page.evaluate("getSelection().toString()")
    page.find(".where a").first.focus()
    page.find("[data-chart=reward] .info").first.hover()
    before = page.texts("main .state")
    for step in range(3):
        add_step(run, **{"reward/mean": 40.0 + step})
        until(page, f"document.querySelector('[data-chart=reward] .legend b').textContent === '{40 + step}'")
    assert page.texts("main .state") != before
    assert selected.startswith("Do: ")
    assert page.evaluate("getSelection().toString()") == selected
    assert page.evaluate("document.activeElement.textContent") == page.texts(".where a")[0]
    assert page.find("[data-chart=reward] .tip").is_visible()


def test_charts_are_drawn_for_new_rows_only(page: Visit, run: Path) -> None:
    """And only those near the screen."""
    page.evaluate(COUNT_DRAWS)
    rows(page, 2)
    assert page.evaluate("window.draws") == 0
    add_step(run, **{"reward/mean": 40.0})
    until(page, "window.draws > 0")
    assert page.find("main canvas").count() < page.find("main [data-chart]:not([hidden])").count()
    page.find("[data-chart=peak-memory]").scroll_into_view_if_needed()
    until(page, "document.querySelector('[data-chart=peak-memory] canvas') !== null")


def test_a_hidden_page_neither_loads_nor_draws(page: Visit, run: Path) -> None:
    """It catches up when it is visible again."""
    page.evaluate(COUNT_DRAWS)
    page.evaluate(HIDE, True)
    page.page.wait_for_timeout(1500)  # a request that had begun
    page.evaluate("performance.clearResourceTimings()")
    add_step(run, **{"reward/mean": 40.0})
    page.page.wait_for_timeout(2500)
    assert (page.evaluate(ROWS), page.evaluate("window.draws")) == (0, 0)
    page.evaluate(HIDE, False)
    until(page, "document.querySelector('[data-chart=reward] .legend b').textContent === '40'")


def test_rows_of_the_list_of_groups_stay_while_groups_arrive(page: Visit, run: Path) -> None:
    """With the focus, and the selection in another row."""
    page.open("#/groups")
    page.find(".rows .row:nth-child(3) a").focus()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.rows .row:nth-child(5) .prompt'))")
    selected = page.evaluate("getSelection().toString()")
    focused = page.evaluate("document.activeElement.textContent")
    group = json.loads((run / "rollouts.jsonl").read_text().splitlines()[-2]) | {"group_id": 64}
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(group) + "\n")
    until(page, "document.querySelector('.rows .group_id a').textContent === '64'")
    assert page.evaluate("document.activeElement.textContent") == focused
    assert page.evaluate("getSelection().toString()") == selected


def test_new_rows_reach_their_run_in_the_comparison(browser: Browser, tmp_path: Path) -> None:
    """With two live runs, of which the second is chosen."""
    runs = [live(tmp_path / name) for name in ("first", "second")]
    with viewing(*runs) as address, visit(browser, address) as visited:
        opened(visited, "#/compare?run=1")
        until(visited, "document.querySelector('[data-chart=\"reward/mean\"] canvas') !== null")
        before = legend(visited, "reward/mean")
        add_step(runs[1], **{"reward/mean": 40.0})
        until(visited, "document.querySelectorAll('[data-chart=\"reward/mean\"] .legend b')[1].textContent === '40'")
        assert legend(visited, "reward/mean")["first"] == before["first"]
        add_step(runs[0], **{"reward/mean": 30.0})
        until(visited, "document.querySelectorAll('[data-chart=\"reward/mean\"] .legend b')[0].textContent === '30'")


def noisy(line: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """Give every number of a line of metrics as many digits as a measured one has."""
    changed = dict[str, Any]()
    for name, value in line.items():
        if isinstance(value, dict):
            changed[name] = noisy(value, source)
        elif isinstance(value, float) and name != "time/run":
            changed[name] = value * source.gauss(1, 0.2) + source.random() / 1000
        else:
            changed[name] = value
    return changed


def test_a_long_run_is_shown_from_its_first_step_and_visited_again_in_few_bytes(
    browser: Browser, tmp_path: Path
) -> None:
    """A second visit of a page loads what is new; even a new tab gets less than 1 MB."""
    shape = RunShape(groups=STEPS, steps=STEPS, planned_steps=STEPS + 10, token_steps=0, group_size=2)
    run, source = live(tmp_path / "long", shape), random.Random(0)
    rewritten(run, lambda line: noisy(line, source))
    with viewing(run) as address, visit(browser, address) as visited:
        for place in ("#/", "#/timeline", "#/groups", "#/"):
            first = visited.open(place)
            until(visited, "document.querySelector('main canvas, .rows .row') !== null")
            assert visited.evaluate(TRANSFERRED) < MAX_SECOND_BYTES, first
        visited.evaluate("performance.clearResourceTimings()")
        visited.evaluate("location.hash = '#/settings'")
        until(visited, "document.querySelector('main dd') !== null")
        visited.evaluate("location.hash = '#/'")
        until(visited, "document.querySelector('main canvas') !== null")
        assert visited.evaluate(TRANSFERRED) < MAX_SECOND_BYTES / 10
        visited.find("[data-chart=reward]").focus()
        visited.page.keyboard.press("Home")
        assert "step 16" in visited.texts("[aria-live='polite']")[0]
        outcomes = [int(text.replace(",", "")) for text in visited.texts(".where td:nth-child(2)")]
        assert sum(outcomes) == STEPS
