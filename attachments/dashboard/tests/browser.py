"""Headless Chromium for tests of the dashboard. A visit records errors of its page and requests to other hosts.

`bench.chromium.viewing` serves run directories; the fixture `browser` is in `conftest.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import pytest

from bench.chromium import find_chromium, open_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, Request, Route


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Run a headless Chromium until the block ends. Skips the test if the browser or playwright is missing.

    The synchronous interface of playwright keeps an event loop in this thread. A module that opens the browser has no
    asynchronous tests, and opens it in a fixture of the module.
    """
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: install one, or name it in CLOTHO_CHROMIUM")
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
    with open_chromium(path) as browser:
        yield browser


class Visit:
    """A page of the browser in a session of its own.

    errors: errors and warnings of the console, exceptions, and dialogs. foreign: addresses of requests to other hosts;
    these requests are aborted.
    """

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address.rstrip("/")
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._asked)
        page.context.route("**/*", self._requested)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, dialog: Dialog) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _requested(self, route: Route, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme in ("data", "blob") or address.netloc == urlsplit(self.address).netloc:
            route.continue_()
        else:
            self.foreign.append(request.url)
            route.abort()

    def open(self, place: str = "#/") -> Page:
        """Open a place of the dashboard, such as `#/groups/12`, in a new document."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}/{place}")
        return self.page

    @property
    def place(self) -> str:
        """The part of the address from `#` on."""
        return "#" + self.page.url.partition("#")[2]

    def find(self, selector: str) -> Locator:
        """Elements of the page."""
        return self.page.locator(selector)

    def texts(self, selector: str) -> list[str]:
        """Texts of all elements, as the document contains them."""
        found: list[str] = self.find(selector).evaluate_all("(all) => all.map((one) => one.textContent)")
        return found

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """Value of a JavaScript expression or function in the page."""
        return self.page.evaluate(script, argument)


@contextmanager
def visit(
    browser: Browser, address: str, *, size: tuple[int, int] = (1280, 900), scheme: Literal["light", "dark"] = "light"
) -> Iterator[Visit]:
    """Open an empty page, and check at the end that nothing went wrong in it."""
    session = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    session.set_default_timeout(60_000)
    try:
        visited = Visit(session.new_page(), address)
        yield visited
        assert visited.errors == []
        assert visited.foreign == []
    finally:
        session.close()
