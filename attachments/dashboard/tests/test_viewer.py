"""The page `#/groups` in Chromium: filters, search, order and addresses, compared with the records of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from attachments.dashboard.tests.browser import visit
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from attachments.dashboard.tests.viewed_groups import (
    COLUMNS,
    DASH,
    TALL,
    Group,
    mean,
    read_groups,
    rewards,
    shown_ids,
    wait_for_list,
    write_viewed_run,
)
from bench.chromium import viewing
from training_run.directory.run_directory import LOCK

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

MANY = 10_000

FILTERS: dict[str, Callable[[Group], bool]] = {
    "outcome=trained": lambda group: group["reason"] is None,
    "outcome=stale&outcome=trained": lambda group: group["reason"] in (None, "stale"),
    "type=sum": lambda group: group["type"] == "sum",
    "environment=gsm8k_server": lambda group: group["environment"] == "gsm8k_server",
    "environment=none": lambda group: group["environment"] == "",
    "min_step=3&max_step=5": lambda group: 3 <= group["step"] <= 5,
    "min_reward=0.4": lambda group: (mean(rewards(group)) or 0.0) >= 0.4,
    "max_reward=0.4": lambda group: (mean(rewards(group)) if rewards(group) else 1.0) <= 0.4,  # type: ignore[operator]
    "min_spread=1": lambda group: (COLUMNS["reward_spread"](group) or 0.0) >= 1.0,
    "max_length=36": lambda group: (COLUMNS["length_mean"](group) or 1e9) <= 36,
    "min_version=4&max_version=4": lambda group: (
        bool(group["completions"]) and COLUMNS["version_min"](group) <= 4 <= COLUMNS["version_max"](group)
    ),
    "truncated=yes": lambda group: COLUMNS["truncated"](group) > 0,
    "outcome=trained&type=sum&min_reward=0.3&truncated=yes": lambda group: (
        group["reason"] is None
        and group["type"] == "sum"
        and (mean(rewards(group)) or 0.0) >= 0.3
        and COLUMNS["truncated"](group) > 0
    ),
}
"""Queries of the list, each with the groups that pass."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile completions."""
    return write_viewed_run(tmp_path_factory.mktemp("viewer") / "run")


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10,000 groups with short completions."""
    shape = RunShape(groups=MANY, steps=1250, group_size=2, length=4, token_steps=0)
    return write_run(tmp_path_factory.mktemp("viewer") / "large", shape)


@pytest.fixture(scope="module")
def address(run: Path, large_run: Path) -> Iterator[str]:
    """Address of the dashboard."""
    with viewing(run, large_run) as found:
        yield found


@pytest.fixture(scope="module")
def groups(run: Path) -> list[Group]:
    """The lines of rollouts.jsonl."""
    return read_groups(run)


@pytest.mark.parametrize("query", FILTERS)
def test_a_filter_shows_exactly_the_groups_that_pass(
    browser: Browser, address: str, groups: list[Group], query: str
) -> None:
    """A query shows the same groups as the same condition on the records, the newest first, with their number."""
    expected = [group["group_id"] for group in groups if FILTERS[query](group)][::-1]
    assert 0 < len(expected) < len(groups)
    with visit(browser, address, size=TALL) as page:
        wait_for_list(page, query)
        assert shown_ids(page) == expected
        assert page.texts("[role=status]")[-1] == f"{len(expected)} of {len(groups)} groups"


def test_filters_of_the_page_are_in_the_address_which_restores_them(
    browser: Browser, address: str, groups: list[Group]
) -> None:
    """Clicks and numbers change the address; the address opens the same list; a chip removes its filter, reset all."""
    with visit(browser, address, size=TALL) as page:
        wait_for_list(page)
        page.find("[data-key='outcome trained']").click()
        page.find("[data-key=min_reward]").fill("0.3")
        page.find("[data-key='truncated yes']").first.click()
        query = "outcome=trained&min_reward=0.3&truncated=yes"
        page.page.wait_for_function("(query) => location.hash === '#/groups?' + query", arg=query)
        expected = [
            group["group_id"]
            for group in reversed(groups)
            if group["reason"] is None and (mean(rewards(group)) or 0.0) >= 0.3 and COLUMNS["truncated"](group)
        ]
        page.page.wait_for_function(f"document.querySelectorAll('.rows .row').length === {len(expected)}")
        assert shown_ids(page) == expected
        wait_for_list(page, query)
        assert shown_ids(page) == expected
        assert page.find("[data-key=min_reward]").input_value() == "0.3"
        page.page.get_by_role("button", name="reward ≥ 0.3").click()
        page.page.wait_for_function("!location.hash.includes('min_reward')")
        assert page.find("[data-key=min_reward]").input_value() == ""
        page.page.get_by_role("button", name="Reset").click()
        page.page.wait_for_function(f"document.querySelectorAll('.rows .row').length === {len(groups)}")
        assert page.place == "#/groups"


def test_a_choice_shows_how_many_groups_it_has_under_the_other_filters(
    browser: Browser, address: str, groups: list[Group]
) -> None:
    """The counts of the outcomes respect the filter by type, and not the filter by outcome itself."""
    with visit(browser, address) as page:
        wait_for_list(page, "outcome=stale&type=sequence")
        of_type = [COLUMNS["outcome"](group) for group in groups if group["type"] == "sequence"]
        assert {"stale", "invalid"} <= set(of_type)
        for outcome in {COLUMNS["outcome"](group) for group in groups}:
            button = page.find(f"[role=group] [data-key='outcome {outcome}'] b")
            assert int(button.inner_text()) == of_type.count(outcome)


@pytest.mark.parametrize("sign", ["", "-"])
def test_every_column_sorts_in_both_directions(
    browser: Browser, address: str, groups: list[Group], sign: Literal["", "-"]
) -> None:
    """Missing values are last in both directions; groups of equal value are in the order of their ids."""
    with visit(browser, address, size=TALL) as page:
        for column, value in COLUMNS.items():
            known = [group for group in groups if value(group) is not None]
            missing = [group for group in groups if value(group) is None]
            expected = sorted(known, key=value, reverse=sign == "-") + missing
            wait_for_list(page, f"sort={sign}{column}")
            assert shown_ids(page) == [group["group_id"] for group in expected]


def test_a_click_on_a_title_sorts_and_a_second_click_reverses(browser: Browser, address: str) -> None:
    """The first click shows the largest values first. The direction is in the address and in `aria-sort`."""
    with visit(browser, address) as page:
        wait_for_list(page)
        title = page.page.get_by_role("columnheader", name="reward")
        title.get_by_role("button").click()
        page.page.wait_for_selector("[role=columnheader][aria-sort=descending].reward_mean")
        assert page.place == "#/groups?sort=-reward_mean"
        title.get_by_role("button").click()
        page.page.wait_for_selector("[role=columnheader][aria-sort=ascending].reward_mean")
        assert page.place == "#/groups?sort=reward_mean"


def test_the_rows_show_the_values_of_the_records(browser: Browser, address: str, groups: list[Group]) -> None:
    """Every cell equals the value of the record, rounded to three digits. A missing value is a dash, never 0."""
    with visit(browser, address, size=TALL) as page:
        wait_for_list(page)
        for column in ("step", "completions", "reward_mean", "reward_spread", "length_mean", "truncated"):
            for text, group in zip(page.texts(f".rows .{column}"), reversed(groups), strict=True):
                value = COLUMNS[column](group)
                if value is None:
                    assert text == DASH
                else:
                    assert float(text.replace(",", "")) == pytest.approx(value, rel=5e-3, abs=1e-12)
        outcomes = [COLUMNS["outcome"](group).replace("_", " ") for group in reversed(groups)]
        assert page.texts(".rows .outcome") == outcomes
        widths = page.find(".rows .reward_mean i").evaluate_all(
            "(all) => all.map((one) => parseFloat(one.style.width))"
        )
        means = [COLUMNS["reward_mean"](group) or 0.0 for group in reversed(groups)]
        assert widths == pytest.approx([100 * value / max(means) for value in means], abs=0.01)


def test_search_finds_text_in_prompts_answers_and_completions(
    browser: Browser, address: str, groups: list[Group]
) -> None:
    """The search of the page finds the same groups as a search in the records, whatever the case of the letters."""
    text = "MÜSSEN SHELLS"
    texts = [[group["prompt"], group["answer"], *(one["text"] for one in group["completions"])] for group in groups]
    expected = [
        group["group_id"]
        for group, found in zip(groups, texts, strict=True)
        if any(text.lower() in one.lower() for one in found)
    ]
    with visit(browser, address, size=TALL) as page:
        wait_for_list(page)
        page.find("[data-key=text]").fill(text)
        page.page.wait_for_function("(n) => document.querySelectorAll('.rows .row').length === n", arg=len(expected))
        assert shown_ids(page) == expected[::-1]
        page.page.reload()
        page.page.wait_for_selector(".rows .row, .rows .empty")
        assert shown_ids(page) == expected[::-1]


def test_keys_move_through_the_list_and_open_a_group(browser: Browser, address: str) -> None:
    """`j` and `k` choose a row, Enter opens the group, Escape returns to the list, `/` goes to the search."""
    with visit(browser, address) as page:
        wait_for_list(page, "sort=group_id")
        for key in ("j", "j", "j", "k", "Enter"):
            page.page.keyboard.press(key)
        page.page.wait_for_selector("h1:text-is('Group 1')")
        page.page.wait_for_selector("[rel=next]")
        page.page.keyboard.press("j")
        page.page.wait_for_selector("h1:text-is('Group 2')")
        page.page.wait_for_selector("[rel=prev]")
        page.page.keyboard.press("Escape")
        page.page.wait_for_selector(".rows .row")
        assert page.place == "#/groups?sort=group_id"
        page.page.keyboard.press("/")
        assert page.evaluate("document.activeElement.type") == "search"


def test_ten_thousand_groups_are_shown_completely(browser: Browser, address: str) -> None:
    """The table has a row for each group. Only rows near the screen are elements; the last one is reachable."""
    with visit(browser, address) as page:
        wait_for_list(page, "run=1&sort=group_id")
        assert page.find("[role=table]").get_attribute("aria-rowcount") == str(MANY + 1)
        assert page.find(".rows .row").count() < 100
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.page.wait_for_selector(f".rows .group_id a:text-is('{MANY - 1}')")
        assert page.find(".rows .row").count() < 100
        assert page.find(".rows .row").last.get_attribute("aria-rowindex") == str(MANY + 1)


def test_groups_of_a_live_run_appear(browser: Browser, tmp_path: Path) -> None:
    """New groups are added at the top without a request for the list; a list that is scrolled does not move."""
    directory = write_run(tmp_path / "live", RunShape(groups=60, steps=8, token_steps=0))
    (directory / LOCK).write_text(f"{os.getpid()}\n")  # a process that exists continues the run
    groups = read_groups(directory)
    with viewing(directory) as address, visit(browser, address) as page:
        wait_for_list(page)
        page.page.wait_for_selector("[data-state=live]")
        append_groups(directory, groups, 60)
        page.page.wait_for_selector(".rows .group_id a:text-is('60')")
        assert shown_ids(page)[:2] == [60, 59]
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.page.wait_for_selector(".rows .group_id a:text-is('0')")
        before = page.find(".rows .row").last.bounding_box()
        append_groups(directory, groups, 61)
        page.page.wait_for_selector("[role=status]:text-is('61 groups (1 new)')")
        assert page.find(".rows .row").last.bounding_box() == before
        page.find("[data-key='truncated yes']").dispatch_event("click")
        page.page.wait_for_selector("[role=status]:text-matches('of 62 groups')")


def append_groups(directory: Path, groups: list[Group], number: int) -> None:
    """Append a group with this number to the records of a run."""
    with (directory / "rollouts.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(groups[-2] | {"group_id": number}) + "\n")


@pytest.mark.parametrize(("width", "is_open"), [(899, False), (900, True)])
def test_the_filters_are_folded_on_a_narrow_screen(browser: Browser, address: str, width: int, is_open: bool) -> None:
    """The rows need the height."""
    with visit(browser, address, size=(width, 600)) as page:
        wait_for_list(page)
        assert page.find("[data-key=min_reward]").is_visible() is is_open
