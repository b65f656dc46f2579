"""Headless Chromium, and the dashboard of run directories in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.fingerprint import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CANDIDATES = ("chromium", "chromium-browser", "google-chrome")
MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def find_chromium() -> str | None:
    """Path of a Chromium of this machine. The variable `CLOTHO_CHROMIUM` comes first."""
    found = (os.environ.get("CLOTHO_CHROMIUM"), *map(shutil.which, CANDIDATES), MAC_CHROME)
    return next((path for path in found if path and os.path.exists(path)), None)


@contextmanager
def open_chromium(path: str) -> Iterator[Browser]:
    """Run a headless Chromium until the block ends. Raises ModuleNotFoundError if playwright is not installed."""
    from playwright.sync_api import sync_playwright  # optional

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def viewing(*runs: Path) -> Iterator[str]:
    """Show run directories with the command `view`; yield the address. Raises OSError if the command ends at once."""
    command = [sys.executable, "pipeline.py", "view", *map(str, runs), "--server.port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            lines = iter(process.stdout.readline, "")
            address = next((found[0] for line in lines if (found := re.search(r"http://[^\s/]+", line))), None)
            if address is None:
                raise OSError(f"the command has ended without an address: {' '.join(command)}")
            yield address
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
