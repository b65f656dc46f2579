"""docs/report.md states measured values as the tables of the other pages do."""

from __future__ import annotations

import re

from bench.figures import REPORT
from tests.docs.pages import DOCS, ROOT

RANGE = re.compile(r"\d[\d.,]*(?: (?:s|ms|µs|MB|GB))? \(\d[\d.,]* to \d[\d.,]*\)")
"""A median with the lowest and the highest value."""


def test_every_measured_range_of_the_report_is_in_a_table() -> None:
    """A value that is measured again must change in the report too."""
    report = re.sub(r"\s+", " ", (ROOT / REPORT).read_text(encoding="utf-8"))
    others = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    tables = "\n".join(page.read_text(encoding="utf-8") for page in others if page != ROOT / REPORT)
    found = RANGE.findall(report)
    assert len(found) > 20
    assert [one for one in found if one not in tables] == []
