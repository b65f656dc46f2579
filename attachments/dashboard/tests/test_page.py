"""The dashboard page in headless Chromium: charts of live and finished runs, keys, widths and colours."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from attachments.dashboard.charts import charts
from attachments.dashboard.page_files import PAGE
from attachments.dashboard.tests.browser import Visit, visit
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from bench.chromium import viewing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHARTS = charts()
MISSING = "\N{EN DASH}"
LINES = 7
"""Number of lines of a chart with colours of their own."""

SHAPE = RunShape(groups=64, steps=8, planned_steps=12)
OTHER = RunShape(groups=64, steps=6, planned_steps=12, seed=1)
NAMES = ("constructor", "toString", "__proto__", "hasOwnProperty")
"""Names that objects of JavaScript inherit."""

TALL = (1280, 9000)
"""A screen on which all charts of a page are near, and so drawn."""

PAGES = ("#/", "#/timeline", "#/compare", "#/settings")


FORBIDDEN = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.cssText"
"""Names in JavaScript that interpret text as markup or as a program."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two finished runs with different seeds. The first one has facts."""
    directory = tmp_path_factory.mktemp("runs")
    first, second = write_run(directory / "first", SHAPE), write_run(directory / "second", OTHER)
    (first / "facts.json").write_text(json.dumps({"started": 1_795_517_218.3, "parameters": 492_608}))
    profile = second / "profile.toml"
    profile.write_text(profile.read_text().replace("seed = 0\n", "seed = 1\n", 1))
    return first, second


@pytest.fixture(scope="module")
def address(runs: tuple[Path, Path]) -> Iterator[str]:
    """Address of the dashboard of both runs."""
    with viewing(*runs) as found:
        yield found


def until(visited: Visit, script: str, argument: Any = None) -> None:
    """Wait until a JavaScript expression is true. The page's policy forbids waits that evaluate text in the page."""
    end = time.monotonic() + 60
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
    with visit(browser, address, size=TALL) as visited:
        opened(visited)
        until(visited, "(count) => document.querySelectorAll('[data-chart]').length >= count", len(CHARTS))
        if (folded := visited.page.get_by_role("button", name="Show", exact=True)).count():
            folded.click()
        rows = visited.evaluate("fetch('dashboard/api/runs/0/rows?metrics=').then((answer) => answer.json())")
        columns = rows["metrics"]["columns"]
        known = {name for name, values in columns.items() if any(value is not None for value in values)}
        for chart in CHARTS:
            figure = f"[data-chart='{chart.id}']"
            has_values = chart.table == "evaluations" or any(
                re.fullmatch(column.replace("*", ".+") + "(/.+)?", name)
                for column in chart.series.values()
                for name in known
            )
            assert visited.find(f"{figure} canvas").count() == has_values, chart.id
            assert all(value != MISSING for value in legend(visited, chart.id).values()), chart.id


@pytest.mark.slow
def test_the_legend_shows_the_latest_value_or_the_value_at_the_cursor(
    browser: Browser, address: str, runs: Any
) -> None:
    """Without a cursor, the value is that of the last line; an arrow key moves the cursor to another line."""
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    with visit(browser, address, size=TALL) as visited:
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
    with visit(browser, address, size=TALL) as visited:
        opened(visited)
        visited.find("[data-chart='loss']").focus()
        visited.page.keyboard.press("+")
        assert visited.page.get_by_role("button", name="Reset zoom").is_visible()
        visited.page.keyboard.press("0")
        assert not visited.page.get_by_role("button", name="Reset zoom").is_visible()


@pytest.mark.slow
def test_a_live_run_adds_lines_to_the_charts(browser: Browser, tmp_path: Path) -> None:
    """A line that a run appends reaches the legend without a reload."""
    run = write_run(tmp_path / "live", SHAPE)
    metrics = run / "metrics.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-1])
    (run / ".lock").write_text(str(os.getpid()))
    with viewing(run) as found, visit(browser, found, size=TALL) as visited:
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
    with visit(browser, address, size=TALL) as visited:
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
    """Each chart has one line per run; runs can be left out. The settings are folded, below the charts."""
    with visit(browser, address, size=TALL) as visited:
        opened(visited, "#/compare")
        until(visited, "document.querySelector('[data-chart=\"reward/mean\"] canvas') !== null")
        assert set(legend(visited, "reward/mean")) == {run.name for run in runs}
        assert visited.find("details:not([open]) table").count() == 1
        assert "seed" in visited.texts("main details th")
        lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
        mean = fmean([line["entropy"] for line in lines if line["entropy"] is not None][-10:])
        row = visited.page.get_by_role("row").filter(has=visited.page.get_by_role("rowheader", name="Entropy"))
        assert float(row.locator("td").first.inner_text()) == pytest.approx(mean, rel=5e-3)
        assert not [
            text for text in visited.texts("main details th") if text == "run_dir" or text.startswith("server.")
        ]
        visited.page.get_by_role("checkbox", name="second").uncheck()
        until(visited, "document.querySelectorAll('[data-chart=\"reward/mean\"] .legend button').length === 1")


@pytest.mark.slow
def test_the_timeline_shows_lanes_queues_and_waits(browser: Browser, address: str) -> None:
    """The lanes of the compute thread, and a line per queue."""
    with visit(browser, address, size=TALL) as visited:
        opened(visited, "#/timeline")
        until(visited, "document.querySelector('[data-chart=lanes] canvas') !== null")
        assert set(legend(visited, "lanes")) == {"decode", "learn", "other", "two at once", "none"}
        assert legend(visited, "queues")


@pytest.mark.slow
def test_settings_show_the_profile_and_mark_changes(browser: Browser, address: str) -> None:
    """The filter leaves the keys that contain its text."""
    with visit(browser, address, size=TALL) as visited:
        opened(visited, "#/settings")
        assert visited.find("div.changed").count() > 0
        visited.page.keyboard.press("/")
        visited.page.keyboard.type("batch_size")
        until(
            visited, "[...document.querySelectorAll('main dt')].every((one) => one.textContent.includes('batch_size'))"
        )


@pytest.mark.slow
def test_a_page_of_ten_thousand_steps_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """The charts that have values in this run: the others belong to objectives and attachments that it does not use."""
    run = write_run(
        tmp_path / "long", RunShape(groups=10_000, steps=10_000, planned_steps=10_000, token_steps=0, group_size=2)
    )
    with viewing(run) as found, visit(browser, found, size=TALL) as visited:
        opened(visited)
        until(visited, "document.querySelectorAll('[data-chart] canvas').length >= 38")


@pytest.mark.slow
def test_a_zoom_into_a_long_run_shows_every_step(browser: Browser, tmp_path: Path) -> None:
    """The page says how many steps a point of the whole run stands for."""
    run = write_run(tmp_path / "long", RunShape(groups=90, steps=9000, planned_steps=9000, token_steps=0, group_size=2))
    with viewing(run) as found, visit(browser, found, size=TALL) as visited:
        opened(visited)
        until(visited, "document.querySelector('.thinned').textContent.includes('up to 16 lines')")
        visited.find("[data-chart='entropy']").focus()
        pressed(visited, "Home", "ArrowRight")
        assert "step 32" in visited.texts("[aria-live='polite']")[0]
        pressed(visited, "Home", *"++++")
        end = time.monotonic() + 60
        while "step 16" not in visited.texts("[aria-live='polite']")[0]:
            assert time.monotonic() < end
            pressed(visited, "Home", "ArrowRight")


def pressed(visited: Visit, *keys: str) -> None:
    """Press keys, one after the other."""
    for key in keys:
        visited.page.keyboard.press(key)


def rewritten(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Change every line of metrics.jsonl."""
    metrics = run / "metrics.jsonl"
    lines = [json.dumps(change(json.loads(line))) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(line + "\n" for line in lines))
    return run


@pytest.mark.slow
def test_names_that_objects_inherit_are_ordinary_names(browser: Browser, tmp_path: Path) -> None:
    """Names of metrics, findings and pages come from files and addresses."""
    finding = {"severity": "toString", "fact": "f", "consequence": "c", "advice": "a"}

    def hostile(line: dict[str, Any]) -> dict[str, Any]:
        groups = {f"environments/{name}": {name: 1.0 + line["step"]} for name in NAMES}
        found = [finding | {"name": name} for name in NAMES] if line["step"] % 2 else []
        return line | dict.fromkeys(NAMES, 1.0 + line["step"]) | groups | {"findings": found}

    both = [rewritten(write_run(tmp_path / name, SHAPE), hostile) for name in ("first", "second")]
    with viewing(*both) as found, visit(browser, found, size=TALL) as visited:
        opened(visited)
        visited.page.locator("summary", has_text="Other metrics").click()
        until(visited, "document.querySelectorAll('[data-chart=\"__proto__\"] canvas').length === 1")
        assert all(legend(visited, name) == {name: "9"} for name in NAMES)
        for place in ("#/compare", "#/constructor", "#/groups?min_constructor=1&sort=constructor", "#/__proto__/x"):
            opened(visited, place) if "groups" not in place else visited.open(place)
            visited.page.wait_for_timeout(100)


@pytest.mark.slow
def test_a_chart_without_any_change_from_its_neutral_value_is_folded(browser: Browser, tmp_path: Path) -> None:
    """One line names these charts, and shows them. A section without any chart has no title."""
    quiet = {"truncated_fraction": 0.0, "step_scale": 1.0, "staleness/mean": 0.0, "staleness/max": 0}
    absent = dict.fromkeys(("ess", "completion_ess", "mismatch_kl", "ratio_mean"))
    run = rewritten(write_run(tmp_path / "quiet", SHAPE), lambda line: line | quiet | absent)
    with viewing(run) as found, visit(browser, found, size=TALL) as visited:
        opened(visited)
        until(visited, "document.querySelector('[data-chart=loss] canvas') !== null")
        charts = ("truncation", "step-scale", "staleness")
        titles = visited.page.get_by_role("heading", name="Off-policy")
        assert not any(visited.find(f"[data-chart={name}]").is_visible() for name in charts)
        assert not titles.is_visible()
        assert all(
            text in visited.find("p:has-text('Quiet')").inner_text() for text in ("Truncation 0", "Step scale 1")
        )
        visited.page.get_by_role("button", name="Show", exact=True).click()
        assert all(visited.find(f"[data-chart={name}] canvas").is_visible() for name in charts)
        assert titles.is_visible()


@pytest.mark.slow
def test_the_overview_begins_with_large_charts_of_reward_and_accuracy(browser: Browser, address: str) -> None:
    """They are above the fold, directly below the tiles."""
    with visit(browser, address, size=(1400, 900)) as visited:
        opened(visited)
        until(visited, "document.querySelector('[data-chart=reward] canvas') !== null")
        reward, accuracy, loss = (box(visited, name) for name in ("reward", "held-out-accuracy", "loss"))
        assert reward["y"] == accuracy["y"] < loss["y"]
        assert reward["y"] + reward["height"] < 900
        assert reward["width"] * reward["height"] > 2 * loss["width"] * loss["height"]


def box(visited: Visit, chart: str) -> dict[str, float]:
    """Return the place and the size of a chart on the page."""
    found = visited.find(f"[data-chart='{chart}']").bounding_box()
    assert found is not None
    return dict(found)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_speed_is_the_mean_of_the_run_once_it_has_ended(browser: Browser, tmp_path: Path) -> None:
    """While it continues, the speed is the mean of ten steps; a step of few tokens does not determine it."""
    speeds = {"completion_length/total": 100, "tokens_per_second": 50.0}
    last = {"completion_length/total": 10, "tokens_per_second": 10_000.0}
    run = write_run(tmp_path / "run", RunShape(groups=64, steps=16, planned_steps=16))
    rewritten(run, lambda line: line | (last if line["step"] == 16 else speeds))
    with viewing(run) as found, visit(browser, found, size=TALL) as visited:
        opened(visited)
        until(visited, "document.querySelector('[data-chart=loss] canvas') !== null")
        tiles = dict(zip(visited.texts(".tiles dt"), visited.texts(".tiles dt + dd"), strict=True))
        assert tiles["Tokens per second"] == f"{1510 / 30.001:.1f}"


@pytest.mark.slow
def test_a_finding_that_has_ended_keeps_its_text(browser: Browser, tmp_path: Path) -> None:
    """In a folded list, with the steps at which it applied."""
    finding = {"name": "truncated", "severity": "warning", "fact": "the fact", "consequence": "c", "advice": "a"}
    run = rewritten(
        write_run(tmp_path / "run", SHAPE), lambda line: line | {"findings": [finding] if line["step"] < 4 else []}
    )
    with viewing(run) as found, visit(browser, found, size=TALL) as visited:
        opened(visited)
        text = visited.page.get_by_text("the fact", exact=True)
        assert not text.is_visible()
        visited.page.locator("summary", has_text="Findings that have ended: truncated").click()
        assert text.is_visible()
        assert "from step 1 to 3" in visited.texts("#ended .severity")[0]


@pytest.mark.slow
def test_the_command_of_a_finding_can_be_copied(browser: Browser, tmp_path: Path) -> None:
    """The command is complete and on one line. The button selects it, and copies it where the browser allows that."""
    command = "clotho --profile 'my run/profile.toml' --learner.optimizer.learning-rate 1e-05"
    finding = {
        "name": "truncated",
        "severity": "error",
        "fact": "f",
        "consequence": "c",
        "advice": "a",
        "command": command,
    }
    run = rewritten(write_run(tmp_path / "run", SHAPE), lambda line: line | {"findings": [finding]})
    with viewing(run) as found, visit(browser, found, size=TALL) as visited:
        opened(visited)
        visited.page.get_by_role("button", name="Copy", exact=True).click()
        assert visited.texts(".finding code") == [command]
        until(visited, "(command) => getSelection().toString() === command", command)


@pytest.mark.slow
def test_the_run_can_be_named_before_the_hash(browser: Browser, address: str) -> None:
    """The address is then the one that the page itself uses."""
    with visit(browser, address, size=TALL) as visited:
        visited.open("?run=1#/settings")
        until(visited, "location.hash === '#/settings?run=1' && location.search === ''")
        until(visited, "document.querySelector('header select').value === '1'")


@pytest.mark.slow
def test_facts_are_readable(browser: Browser, address: str) -> None:
    """The start is a date, and large numbers have separators."""
    with visit(browser, address, size=TALL) as visited:
        opened(visited, "#/settings")
        shown = dict(zip(visited.texts("main dt"), visited.texts("main dd"), strict=True))
        assert shown["parameters"] == "492,608"
        assert "November 2026" in shown["started"]


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
    texts = ["text", "muted", "accent", "good", "warn", "bad", *(f"s{number}" for number in range(1, LINES + 1))]
    for text in texts:
        for background in ("page", "card"):
            assert contrast(colours[text], colours[background]) >= 4.5, (text, background)
    tints = [(text, background) for text in ("text", "muted") for background in ("sunken", "warn-tint", "bad-tint")]
    for text, background in (*tints, ("accent", "tint"), ("warn", "warn-tint"), ("bad", "bad-tint")):
        assert contrast(colours[text], colours[background]) >= 4.5, (text, background)
    assert not re.search(r"#(?:[0-9a-f]{3}|[0-9a-f]{6})\b", style.split("* { box-sizing", 1)[1])


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_lines_of_a_chart_can_be_told_apart(scheme: int) -> None:
    """Any two colours are far from each other, in CIELAB; a chart with more lines dashes the others."""
    style = (PAGE / "style.css").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = re.findall(r"--s\d: (#[0-9a-f]{6})", block)
    assert len(colours) == LINES
    assert f"const COLOURS = {LINES};" in (PAGE / "chart.js").read_text()
    assert min(math.dist(cielab(one), cielab(other)) for one, other in combinations(colours, 2)) > 25


def cielab(colour: str) -> tuple[float, float, float]:
    """Return L*, a* and b* of `#rrggbb` under D65."""
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    rgb = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    weights = ((0.4124, 0.3576, 0.1805, 0.95047), (0.2126, 0.7152, 0.0722, 1.0), (0.0193, 0.1192, 0.9505, 1.08883))
    ratios = (sum(w * v for w, v in zip(row, rgb, strict=False)) / row[3] for row in weights)
    x, y, z = (ratio ** (1 / 3) if ratio > 0.008856 else 7.787 * ratio + 16 / 116 for ratio in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_modules_create_no_markup_from_text() -> None:
    """No module assigns markup, evaluates text, or sets an attribute `style`, which the policy of the page blocks."""
    for path in PAGE.glob("*.js"):
        assert re.search(FORBIDDEN, path.read_text()) is None, path.name
