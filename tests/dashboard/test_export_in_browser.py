"""An exported file in a real browser: it works without a server, loads nothing, and interprets no text of a model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clotho.dashboard.export import export
from tests.dashboard.synthetic_run import RunShape, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ADDRESSES = ("", "#/groups", "#/groups/1", "#/groups/1/1/3", "#/timeline", "#/settings", "#/compare")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
async def test_an_exported_file_works_without_a_server(tmp_path: Path) -> None:
    """Every page shows text, without an error, a request, or a script from the data."""
    from playwright.async_api import async_playwright

    runs = [write_run(tmp_path / name, RunShape(groups=36, steps=4)) for name in ("first", "second")]
    export(runs, tmp_path / "runs.html", limit_bytes=10_000_000)
    problems, requests = list[str](), list[str]()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        for address in ADDRESSES:
            await page.goto(f"file://{tmp_path}/runs.html{address}")
            await page.wait_for_function("document.body.innerText.length > 100")
            assert await page.title() != "executed"
        await browser.close()
    assert problems == []
    assert {url.partition(":")[0] for url in requests} <= {"file", "data"}
