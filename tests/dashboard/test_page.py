"""The dashboard page in headless Chromium: charts of live and finished runs, keys, widths and colours."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.chromium import viewing
from clotho.dashboard.charts import CHARTS
from clotho.dashboard.page_files import PAGE
from tests.dashboard.browser import Visit, visit
from tests.dashboard.synthetic_run import RunShape, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MISSING = "\N{EN DASH}"
SHAPE = RunShape(groups=64, steps=8, planned_steps=12)
OTHER = RunShape(groups=64, steps=6, planned_steps=12, seed=1)
PAGES = ("#/", "#/timeline", "#/compare", "#/settings")


FORBIDDEN = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|cssText"
"""Names in JavaScript that interpret text as markup or as a program."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two finished runs."""
    directory = tmp_path_factory.mktemp("runs")
    return write_run(directory / "first", SHAPE), write_run(directory / "second", OTHER)


@pytest.fixture(scope="module")
def address(runs: tuple[Path, Path]) -> Iterator[str]:
    """Address of the dashboard of both runs."""
    with viewing(*runs) as found:
        yield found


def until(visited: Visit, script: str, argument: Any = None) -> None:
    """Wait until a JavaScript expression is true. The page's policy forbids waits that evaluate text in the page."""
    end = time.monotonic() + 20
    while not visited.evaluate(script, argument):
        assert time.monotonic() < end, script
        visited.page.wait_for_timeout(20)


def opened(visited: Visit, place: str = "#/") -> Visit:
    """Open a place, and wait until it shows charts or tables with values."""
    visited.open(place)
    until(visited, "document.querySelector('main canvas, main td, main dd') !== null")
    return visited


def legend(visited: Visit, chart: str) -> dict[str, str]:
    """Return the values in the legend of a chart by label."""
    entries = visited.find(f"[data-chart='{chart}'] .legend button")
    found: list[list[str]] = entries.evaluate_all(
        "(all) => all.map((one) => [one.querySelector('span').textContent, one.querySelector('b').textContent])"
    )
    return {label: value for label, value in found}  # noqa: C416, the pairs are lists


@pytest.mark.slow
def test_every_chart_of_a_finished_run_has_a_canvas_and_values(browser: Browser, address: str) -> None:
    """Every chart of the catalogue whose columns the run has shows its latest values."""
    with visit(browser, address) as visited:
        opened(visited)
        until(visited, "(count) => document.querySelectorAll('[data-chart]').length >= count", len(CHARTS))
        columns = visited.evaluate("fetch('dashboard/api/runs/0/metrics').then((r) => r.json()).then((r) => r.columns)")
        known = {name for name, values in columns.items() if any(value is not None for value in values)}
        for chart in CHARTS:
            figure = f"[data-chart='{chart.id}']"
            has_values = chart.table == "evaluations" or any(
                re.fullmatch(line.column.replace("*", ".+"), name) for line in chart.series for name in known
            )
            assert visited.find(f"{figure} canvas").count() == has_values, chart.id
            assert all(value != MISSING for value in legend(visited, chart.id).values()), chart.id


@pytest.mark.slow
def test_the_legend_shows_the_latest_value_or_the_value_at_the_cursor(
    browser: Browser, address: str, runs: Any
) -> None:
    """Without a cursor, the value is that of the last line; an arrow key moves the cursor to another line."""
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    with visit(browser, address) as visited:
        opened(visited)
        assert float(legend(visited, "entropy")["entropy"]) == pytest.approx(lines[-1]["entropy"], rel=5e-3)
        visited.find("[data-chart='entropy']").focus()
        visited.page.keyboard.press("Home")
        assert float(legend(visited, "entropy")["entropy"]) == pytest.approx(lines[0]["entropy"], rel=5e-3)
        assert float(legend(visited, "reward")["mean"]) == pytest.approx(lines[0]["reward/mean"], rel=5e-3)
        assert "step 1" in visited.texts("[aria-live='polite']")[0]


@pytest.mark.slow
def test_a_zoom_applies_to_all_charts_and_is_undone_by_a_key(browser: Browser, address: str) -> None:
    """The button that resets the zoom is visible only during a zoom."""
    with visit(browser, address) as visited:
        opened(visited)
        visited.find("[data-chart='loss']").focus()
        visited.page.keyboard.press("+")
        assert visited.page.get_by_role("button", name="Reset zoom").is_visible()
        visited.page.keyboard.press("0")
        assert not visited.page.get_by_role("button", name="Reset zoom").is_visible()


@pytest.mark.slow
def test_a_live_run_adds_lines_to_the_charts(browser: Browser, tmp_path: Path) -> None:
    """A line that a run appends reaches the legend through the stream of events, without a reload."""
    run = write_run(tmp_path / "live", SHAPE)
    metrics = run / "metrics.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-1])
    (run / ".lock").write_text(str(os.getpid()))
    with viewing(run) as found, visit(browser, found) as visited:
        opened(visited)
        until(visited, "document.querySelector('header [data-state]').dataset.state === 'live'")
        for step in range(1, 4):
            line = last | {"step": last["step"] + step, "time/run": last["time/run"] + step, "loss": 40.0 + step}
            with metrics.open("a") as file:
                file.write(json.dumps(line) + "\n")
        until(visited, "document.querySelector('[data-chart=loss] .legend b').textContent === '43'")
        assert "Live" in visited.texts("main .state")[0]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_scrolls_sideways_at_390_pixels(browser: Browser, address: str, scheme: Any) -> None:
    """Tables that are wider than the screen scroll inside their own box."""
    with visit(browser, address, size=(390, 844), scheme=scheme) as visited:
        for place in PAGES:
            opened(visited, place)
            until(visited, "document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_keys_open_pages_and_the_help(browser: Browser, address: str) -> None:
    """`g` and a letter open a page, `j` focuses the next chart, `?` shows all keys, Escape returns."""
    with visit(browser, address) as visited:
        opened(visited)
        keyboard = visited.page.keyboard
        for keys, place in (("gt", "#/timeline"), ("gc", "#/compare"), ("gs", "#/settings"), ("go", "#/")):
            for key in keys:
                keyboard.press(key)
            until(visited, "(place) => location.hash === place", place)
        until(visited, "document.querySelector('main canvas') !== null")
        keyboard.press("j")
        keyboard.press("j")
        assert visited.evaluate("document.activeElement.dataset.chart") == CHARTS[1].id
        keyboard.press("?")
        assert visited.find("dialog[open]").count() == 1
        keyboard.press("Escape")
        assert visited.find("dialog[open]").count() == 0


@pytest.mark.slow
def test_the_comparison_shows_every_run_and_the_settings_that_differ(browser: Browser, address: str, runs: Any) -> None:
    """Each chart has one line per run; runs can be left out."""
    with visit(browser, address) as visited:
        opened(visited, "#/compare")
        until(visited, "document.querySelector('[data-chart=\"reward/mean\"] canvas') !== null")
        assert set(legend(visited, "reward/mean")) == {run.name for run in runs}
        assert any("run_dir" in text for text in visited.texts("main th"))
        visited.page.get_by_role("checkbox", name="second").uncheck()
        until(visited, "document.querySelectorAll('[data-chart=\"reward/mean\"] .legend button').length === 1")


@pytest.mark.slow
def test_the_timeline_shows_lanes_queues_and_waits(browser: Browser, address: str) -> None:
    """The lanes of the compute thread, and a line per queue."""
    with visit(browser, address) as visited:
        opened(visited, "#/timeline")
        until(visited, "document.querySelector('[data-chart=lanes] canvas') !== null")
        assert set(legend(visited, "lanes")) == {"decode", "learn", "other"}
        assert legend(visited, "queues")


@pytest.mark.slow
def test_settings_show_the_profile_and_mark_changes(browser: Browser, address: str) -> None:
    """The filter leaves the keys that contain its text."""
    with visit(browser, address) as visited:
        opened(visited, "#/settings")
        assert visited.find("div.changed").count() > 0
        visited.page.keyboard.press("/")
        visited.page.keyboard.type("batch_size")
        until(
            visited, "[...document.querySelectorAll('main dt')].every((one) => one.textContent.includes('batch_size'))"
        )


@pytest.mark.slow
def test_a_page_of_ten_thousand_steps_is_drawn_in_time(browser: Browser, tmp_path: Path) -> None:
    """All charts of a long run are drawn; the time is printed, not asserted."""
    run = write_run(
        tmp_path / "long", RunShape(groups=10_000, steps=10_000, planned_steps=10_000, token_steps=0, group_size=2)
    )
    with viewing(run) as found, visit(browser, found) as visited:
        began = time.monotonic()
        opened(visited)
        until(visited, "(count) => document.querySelectorAll('[data-chart] canvas').length >= count", len(CHARTS) // 2)
        print(f"drawn after {time.monotonic() - began:.2f} s")  # noqa: T201


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` as WCAG defines it."""
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_texts_and_lines_have_a_contrast_of_4_5_with_every_background(scheme: int) -> None:
    """The variables of style.css are the only opaque colours."""
    style = (PAGE / "style.css").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    texts = ["text", "muted", "accent", "good", "warn", "bad", *(f"s{number}" for number in range(1, 7))]
    for text in texts:
        for background in ("page", "card"):
            assert contrast(colours[text], colours[background]) >= 4.5, (text, background)
    tints = [(text, background) for text in ("text", "muted") for background in ("sunken", "warn-tint", "bad-tint")]
    for text, background in (*tints, ("accent", "tint"), ("warn", "warn-tint"), ("bad", "bad-tint")):
        assert contrast(colours[text], colours[background]) >= 4.5, (text, background)
    assert not re.search(r"#(?:[0-9a-f]{3}|[0-9a-f]{6})\b", style.split("* { box-sizing", 1)[1])


def test_modules_create_no_markup_from_text() -> None:
    """No module assigns markup, evaluates text, or sets an attribute `style`, which the policy of the page blocks."""
    for path in PAGE.glob("*.js"):
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.cssText", path.read_text()
        )
        assert found is None, path.name
