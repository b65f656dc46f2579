"""Profile keys and metrics that the pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attachments.migration.other_trainers import by_name
from tests.docs.pages import DOCS, ROOT
from training_run.profile.keys import KEYS

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PATHS = set(KEYS)
SECTIONS = {path.partition(".")[0] for path in PATHS if "." in path}
FILES = (".py", ".md", ".toml", ".jsonl", ".json", ".txt", ".log")
FOREIGN = set(by_name())
CODE = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?: = [^`]+)?`")


def exists(path: str) -> bool:
    """Whether a path is a key, or a table with keys."""
    return path in PATHS or any(known.startswith(f"{path}.") for known in PATHS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_profile_key_on_a_page_exists(page: Path) -> None:
    """A key is a dotted name in backquotes whose first part is a section."""
    named = set(CODE.findall(page.read_text(encoding="utf-8"))) - FOREIGN
    dotted = {name for name in named if name.partition(".")[0] in SECTIONS and not name.endswith(FILES)}
    assert sorted(name for name in dotted if not exists(name)) == []
