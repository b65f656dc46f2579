"""Take the dashboard's screenshots of a real run in headless Chromium.

    python -m bench dashboard_screenshots [-- ARGUMENTS OF THE RUN]

Writes pictures to docs/images/: the overview after half of the steps, the overview of the finished run in dark colours,
the timeline, the list of groups, a group whose rewards differ, with its per-token values, and the comparison with a
second run of half the learning rate.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import httpx

from bench.chromium import find_chromium, open_chromium, viewing
from bench.figures import IMAGES
from bench.fingerprint import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RUN, OTHER = "runs/pictures/local-m3", "runs/pictures/half-the-rate"
HALF_THE_RATE = ("--learner.optimizer.learning-rate", "5e-4", "--learner.schedule.min-learning-rate", "5e-5")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
DESKTOP, TALL = (1280, 860), (1280, 1240)
CONTENTS = "main canvas, main article, main .row a"
"""Elements of a page whose data are loaded."""

TOKEN = 1
"""The token of the first completion whose values are shown."""

SECONDS = 600
"""Limit of the run's duration."""


@contextmanager
def training(command: Sequence[str]) -> Iterator[str]:
    """Start a run, yield the address of its dashboard, and wait for the end of the run."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    try:
        found = next((found for line in process.stdout if (found := ADDRESS.search(line))), None)
        if found is None:
            raise SystemExit(f"{' '.join(command)}: ended without an address")
        yield found[0]
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()


def picture(
    browser: Browser,
    address: str,
    name: str,
    *,
    size: tuple[int, int] = DESKTOP,
    scheme: Literal["light", "dark"] = "light",
) -> None:
    """Write the picture `dashboard-NAME.png` of a page of the dashboard."""
    session = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, locale="en-US")
    page = session.new_page()
    page.goto(address)
    page.locator(CONTENTS).first.wait_for(state="attached")
    page.wait_for_timeout(1000)  # the page draws the charts at most four times per second, and bars have transitions
    path = IMAGES / f"dashboard-{name}.png"
    page.screenshot(path=path)
    session.close()
    sys.stdout.write(f"{path.relative_to(ROOT)}  {path.stat().st_size // 1000} kB\n")


def answer(address: str, path: str) -> Any:
    """Return the body of an API response about the first run."""
    return httpx.get(f"{address}/dashboard/api/runs/0/{path}", timeout=60).raise_for_status().json()


def wait_for_half(address: str) -> None:
    """Wait until the run has done half of its steps."""
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        state = answer(address, "rows")["state"]
        if 2 * state["step"] >= state["planned_steps"]:
            return
        time.sleep(0.2)


def mixed_group(address: str) -> int:
    """Return the id of the trained group whose rewards differ most, and whose mean reward is in the middle."""
    columns = answer(address, "rows?groups=")["groups"]["columns"]
    rows = [row for row, outcome in enumerate(columns["outcome"]) if outcome == "trained"]
    widest = max(columns["reward_spread"][row] for row in rows)
    best = min(
        rows, key=lambda row: abs(columns["reward_mean"][row] - widest / 2) + widest - columns["reward_spread"][row]
    )
    return int(columns["group_id"][best])


def main(argv: Sequence[str]) -> int:
    """Train with the default profile, and take pictures during the run and after its end."""
    parser = argparse.ArgumentParser(prog="python -m bench dashboard_screenshots", description=__doc__)
    parser.add_argument("arguments", nargs="*", default=[])
    chosen = parser.parse_args(argv)
    flags = ["--profile", "local-m3", "--clean", "--server.port", "0", *chosen.arguments]
    train = [sys.executable, "-m", "training_run", *flags]
    path = find_chromium()
    if path is None:
        sys.stderr.write("dashboard_screenshots: no Chromium: install one, or name it in CLOTHO_CHROMIUM\n")
        return 2
    with open_chromium(path) as browser:
        with training([*train, "--run-dir", RUN]) as address:
            wait_for_half(address)
            picture(browser, f"{address}/", "live")
        with training([*train, "--run-dir", OTHER, *HALF_THE_RATE]):
            pass
        with viewing(ROOT / RUN, ROOT / OTHER) as address:
            group = mixed_group(address)
            picture(browser, f"{address}/", "finished", scheme="dark")
            picture(browser, f"{address}/#/timeline", "timeline")
            picture(browser, f"{address}/#/groups", "groups")
            picture(browser, f"{address}/#/groups/{group}/0/{TOKEN}", "group", size=TALL)
            picture(browser, f"{address}/#/compare", "compare")
    return 0
