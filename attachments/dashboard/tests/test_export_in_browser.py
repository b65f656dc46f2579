"""An exported file in a real browser: it works without a server, loads nothing, and interprets no text of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attachments.dashboard.export import export
from attachments.dashboard.tests.synthetic_run import MARKUP, RunShape, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
PLACES = ("#/", "#/timeline", "#/groups", "#/groups/1", "#/groups/34/0/3", "#/compare", "#/settings")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of two runs."""
    directory = tmp_path_factory.mktemp("exported")
    runs = [write_run(directory / name, RunShape(groups=36, steps=4)) for name in ("first", "second")]
    export(runs, directory / "runs.html", limit_bytes=10_000_000)
    return directory / "runs.html"


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Yield a page, and check at the end that it had no error and sent no request."""
    session = browser.new_context()
    found, problems, requests = session.new_page(), list[str](), list[str]()
    found.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("request", lambda request: requests.append(request.url))
    yield found
    session.close()
    assert problems == []
    assert {url.partition(":")[0] for url in requests} <= {"file", "data", "about"}


@pytest.mark.parametrize("place", PLACES)
def test_every_page_of_the_file_works(page: Page, file: Path, place: str) -> None:
    """Without an error or a request. A script in the text of a completion does not run."""
    page.goto(f"file://{file}{place}")
    page.locator("h1, h2, table, canvas").first.wait_for()
    assert page.title() != "executed"


def test_a_completion_with_markup_is_text(page: Page, file: Path) -> None:
    """As the model wrote it."""
    page.goto(f"file://{file}#/groups/1")
    page.get_by_text(MARKUP[:20]).first.wait_for()
    assert MARKUP in page.locator("body").inner_text().replace("\n", "")


def test_the_search_finds_included_groups(page: Page, file: Path) -> None:
    """In the file, without a server."""
    page.goto(f"file://{file}#/groups")
    other = page.get_by_text("What is 35 + 0?").first
    other.wait_for()
    page.locator("input[type=search]").first.fill("onerror=")
    page.locator("input[type=search]").first.press("Enter")
    other.wait_for(state="detached")
    page.get_by_text("What is 1 + 1?").first.wait_for()
