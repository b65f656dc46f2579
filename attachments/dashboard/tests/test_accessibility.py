"""Assistive technology can use every page: the rules of axe, what a screen reader hears, and where the focus is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import pytest

from attachments.dashboard.tests.browser import Visit, visit
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from attachments.dashboard.tests.test_javascript import TOOLS, needs_npm
from attachments.dashboard.tests.test_page import opened, until
from bench.chromium import viewing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

CONTENTS = {
    "#/": "[data-chart=reward] canvas", "#/timeline": "[data-chart=lanes] canvas", "#/groups": ".rows .row",
    "#/groups?min_step=99": ".empty:not([hidden])", "#/groups/1": "article",
    "#/groups/34/0/3": ".panel:not([hidden]) table", "#/compare": "[data-chart='reward/mean'] canvas",
    "#/settings": "main dd",
}  # fmt: skip
"""Every page, and an element that it has when it is complete."""

AXE = "async () => (await axe.run()).violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)])"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the dashboard of two runs."""
    directory = tmp_path_factory.mktemp("accessible")
    runs = [write_run(directory / name, RunShape(groups=36, steps=4)) for name in ("first", "second")]
    with viewing(*runs) as found:
        yield found


@needs_npm
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_on_any_page(browser: Browser, address: str, scheme: Literal["light", "dark"]) -> None:
    """Names, roles, contrasts, landmarks, and places that only a mouse would reach."""
    library = (TOOLS / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
    found = {}
    with visit(browser, address, scheme=scheme) as visited:
        for place, content in CONTENTS.items():
            visited.open(place)
            until(visited, "(content) => document.querySelector(content) !== null", content)
            visited.evaluate(library)
            found[place] = visited.evaluate(AXE)
        visited.page.keyboard.press("?")
        found["help"] = visited.evaluate(AXE)
    assert {place: violations for place, violations in found.items() if violations} == {}


def test_the_explanation_of_a_chart_belongs_to_its_button(browser: Browser, address: str) -> None:
    """A screen reader reads it with the button."""
    with visit(browser, address) as visited:
        opened(visited)
        described = visited.find("[data-chart=loss] .info").first.get_attribute("aria-describedby")
        assert visited.texts(f"#{described}")[0].startswith("Loss of the update")


def focused(visited: Visit) -> str:
    """Return the name of the element that has the focus."""
    found: str = visited.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.tagName")
    return found


def test_a_page_that_is_opened_gets_the_focus(browser: Browser, address: str) -> None:
    """Under its title. The first page does not take it, and another place of the same page neither."""
    with visit(browser, address) as visited:
        opened(visited)
        assert focused(visited) == "BODY"
        visited.page.get_by_role("link", name="Timeline").click()
        until(visited, "document.querySelector('[data-chart=lanes] canvas') !== null")
        assert focused(visited) == "Timeline"
        visited.page.keyboard.press("j")
        assert focused(visited) == "Compute threads"
