"""How long the list of groups of the dashboard takes, by number of groups, in headless Chromium.

    python -m bench dashboard [--groups 100 1000 10000] [--characters 400] [--repeats 5]

The groups are made up: 4 completions of 400 characters each. `file`: size of rollouts.jsonl. `size`: the index of the
groups, as sent. `first`: from the start of the navigation until the rows are elements of the page, with a server that
has not read the run. `list`: the same with a server that has read the run, median. `sort`, `filter`, `search`: from the
event to the new rows, median; a search begins 150 ms after the last letter, and every search is for another text.
`common`: a search for a text that every group contains. `frame`: the longest time between two frames while the list is
scrolled from its first to its last row in 120 steps; 17 ms is one frame at 60 Hz.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.chromium import find_chromium, open_chromium, viewing
from bench.tables import markdown
from training_run.records.rollout_log import CompletionRecord, RolloutRecord

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

COMPLETIONS = 4
SHOWN = "() => document.querySelector('.rows .row') && performance.now()"
CHANGED = """async () => {
    const searched = (window.searched ??= new Set());
    const search = (text) => {
        const field = document.querySelector('[data-key=text]');
        searched.add(field.value = text);
        field.dispatchEvent(new Event('input', {bubbles: true}));
    };
    const rows = document.querySelector('.rows');
    const began = performance.now();
    const changed = new Promise((done) => new MutationObserver(done).observe(rows, {childList: true}));
    ACT;
    await changed;
    return performance.now() - began;
}"""
ACTIONS = {
    "sort": "document.querySelector('.head .reward_mean button').click()",
    "filter": "document.querySelector('[data-key=\"outcome trained\"]').click()",
    "search": "search('number ' + Math.floor(1e9 * Math.random()))",
    "common": "search(['ome', 'ord', 'e w', 'rds', 'or', 's'].find((text) => !searched.has(text)) ?? 's')",
}
SCROLLED = """async () => {
    const frame = () => new Promise(requestAnimationFrame);
    const times = [];
    for (let step = 0; step <= 120; step += 1) {
        scrollTo(0, document.body.scrollHeight * step / 120);
        times.push(await frame());
    }
    return Math.max(...times.slice(1).map((time, i) => time - times[i]));
}"""


def write_run(directory: Path, groups: int, characters: int) -> Path:
    """Write the rollouts of a made-up run."""
    directory.mkdir()
    source = random.Random(0)
    with (directory / "rollouts.jsonl").open("wb") as lines:
        for number in range(groups):
            rewards = [round(source.random(), 3) for _ in range(COMPLETIONS)]
            record = RolloutRecord(
                group_id=number,
                step=1 + number // 8,
                outcome="trained" if number % 3 else "discarded",
                reason=None if number % 3 else "zero_variance",
                detail=None,
                prompt=f"What is number {number}?",
                answer=str(number),
                type=("sum", "word", "choice")[number % 3],
                environment="",
                completions=tuple(_completion(reward, number // 8, characters) for reward in rewards),
            )
            lines.write(msgspec.json.encode(record) + b"\n")
    return directory


def _completion(reward: float, version: int, characters: int) -> CompletionRecord:
    return CompletionRecord(
        text="some words " * (characters // 11),
        reward=reward,
        parts={"format": 0.2},
        advantage=0.1,
        first_version=version,
        last_version=version,
        finish_reason="stop",
        tokens=characters // 4,
    )


def opened(page: Page, address: str) -> float:
    """Open the list in a new document, and return the milliseconds until its rows are on the screen."""
    page.goto("about:blank")
    page.goto(f"{address}/#/groups")
    found: float = page.wait_for_function(SHOWN).json_value()
    return found


def measure(browser: Browser, groups: int, characters: int, repeats: int) -> list[str]:
    """Return one row of the table."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        run = write_run(Path(directory, "run"), groups, characters)
        stored = (run / "rollouts.jsonl").stat().st_size
        address = stack.enter_context(viewing(run))
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        first = opened(page, address)
        lists = [opened(page, address) for _ in range(repeats)]
        size = len(page.request.get(f"{address}/dashboard/api/runs/0/groups").body())
        times: dict[str, list[float]] = {name: [] for name in ACTIONS}
        for _ in range(repeats):
            for name, action in ACTIONS.items():
                times[name].append(page.evaluate(CHANGED.replace("ACT", action)))
        opened(page, address)
        longest: Any = page.evaluate(SCROLLED)
        page.close()
    medians = [statistics.median(lists), *map(statistics.median, times.values())]
    sizes = [f"{count / 1e6:.2f}" for count in (stored, size)]
    return [str(groups), *sizes, f"{first:.0f}", *(f"{value:.0f}" for value in medians), f"{longest:.0f}"]


def main(arguments: Sequence[str]) -> int:
    """Print the table. Returns 2 without a Chromium."""
    parser = argparse.ArgumentParser(
        prog="python -m bench dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[100, 1000, 10_000], help="numbers of groups")
    parser.add_argument("--characters", type=int, default=400, help="length of a completion")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement")
    options = parser.parse_args(arguments)
    path = find_chromium()
    if path is None:
        sys.stderr.write("bench: no Chromium: install one, or name it in CLOTHO_CHROMIUM\n")
        return 2
    with open_chromium(path) as browser:
        rows = [measure(browser, groups, options.characters, options.repeats) for groups in options.groups]
    titles = [
        "groups",
        "file (MB)",
        "size (MB)",
        "first (ms)",
        "list (ms)",
        *(f"{name} (ms)" for name in ACTIONS),
        "frame (ms)",
    ]
    sys.stdout.write(markdown(titles, rows) + "\n")
    return 0
