"""docs/changing.md: what a change costs, and examples whose files the page names completely."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.change_reference import costs, read, with_name, with_stem
from tests.docs.pages import DOCS, ROOT, between

PAGE = DOCS / "changing.md"
ROOMS = ("actors", "attachments", "clotho", "protocols", "training_run")
OTHER_NAMES = "attachments/migration/other_trainers.py"
ROW = re.compile(
    r"^\| (?P<change>[\w ]+) \| (?P<bound>\d+) \| .*? \| `(?P<symbol>\w+)` \| (?P<files>.*?) \|$", re.MULTILINE
)


class Example(NamedTuple):
    """One row of the table."""

    change: str
    bound: int
    symbol: str
    files: set[str]


EXAMPLES = [
    Example(match["change"], int(match["bound"]), match["symbol"], set(re.findall(r"`([\w/]+\.py)`", match["files"])))
    for match in ROW.finditer(between(PAGE, "examples"))
]


def modules_with(symbol: str) -> set[str]:
    """Source modules that contain a symbol as a whole word."""
    word = re.compile(rf"\b{symbol}\b")
    sources = [
        ROOT / "pipeline.py",
        *(
            path
            for name in ROOMS
            for path in (ROOT / name).rglob("*.py")
            if not {"tests", "examples"} & set(path.parts)
        ),
    ]
    return {str(path.relative_to(ROOT)) for path in sources if word.search(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.change)
def test_an_example_is_in_the_files_of_its_row_and_in_no_others(example: Example) -> None:
    """A change of this kind touches no other source file, and no more than the page permits for its kind."""
    found = modules_with(example.symbol) - {OTHER_NAMES}
    assert found == example.files
    assert 0 < len(found) <= example.bound


COST = re.compile(r"^\| (?P<kind>[\w ]+) \| \d+ \| (?P<median>[\d.]+) \| (?P<most>\d+) \(`.+`\) \|$", re.MULTILINE)


def test_no_kind_of_change_costs_more_files_than_the_page_says() -> None:
    """`python -m tests.docs.change_reference` writes smaller numbers to the page.

    The name of a worst case has other meanings too, so that it may occur in a few more files.
    """
    stated = {match["kind"]: match for match in COST.finditer(between(PAGE, "costs"))}
    found = {one.kind: one for one in costs()}
    assert stated.keys() == found.keys()
    for kind, row in stated.items():
        assert found[kind].median <= float(row["median"]), kind
        assert found[kind].most <= 1.25 * int(row["most"]), kind


def test_code_mentions_a_name_and_documentation_does_not() -> None:
    """Identifiers, texts that are one, and names with dots in messages count."""
    source = (
        """'''Of `in_docstring`.'''\nfound.as_attribute = call(as_keyword="as_text", other="key a.in_message is")"""
    )
    mentioned = read(ast.parse(source))
    assert {"as_attribute", "as_keyword", "as_text", "in_message"} <= mentioned.names
    assert "in_docstring" not in mentioned.names
    assert "protocols/sampling.py" in with_name("min_p")
    assert "clotho/settings/model.py" in with_stem("dora")


def test_every_kind_of_change_has_a_section() -> None:
    """The section lists the steps."""
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(EXAMPLES) == len(headings) == 8
    assert all(heading.lower().startswith(example.change) for heading, example in zip(headings, EXAMPLES, strict=True))


def test_every_file_on_the_page_exists() -> None:
    """Patterns with an asterisk are not checked."""
    named = set(re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not Path(ROOT / name).is_file()] == []
