"""Links between the pages lead somewhere, and pages that list checks list all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from training_run.profile.keys import KEYS

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)(?P<file>[^)#\s]*)(?:#(?P<anchor>[^)]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_relative_link_has_a_target(page: Path) -> None:
    """Files exist, and anchors are headings of their page."""
    broken = []
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (page.parent / match["file"]).resolve() if match["file"] else page
        if not target.exists() or (match["anchor"] and match["anchor"] not in anchors(target)):
            broken.append(match[0])
    assert broken == []


def test_troubleshooting_lists_every_check_of_the_collapse_detection() -> None:
    """A check is a threshold: a key that ends in high, low or drop."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    thresholds = [path.partition(".")[2] for path in KEYS if re.match(r"collapse_detection\..*_(high|low|drop)$", path)]
    assert len(thresholds) > 5
    assert [name for name in thresholds if f"`{name}`" not in page] == []
