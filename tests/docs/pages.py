"""Parts of the documentation pages: fenced blocks, and text between markers."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(
    r"(?:^<!-- (?P<comment>[^>]*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
FILE_NAME = re.compile(r"# (?P<name>[\w-]+\.(?:py|toml))\n")


class Block(Struct, frozen=True, kw_only=True):
    """One fenced block. comment: the HTML comment on the line above; empty if there is none."""

    language: str
    text: str
    comment: str = ""

    @property
    def file_name(self) -> str:
        """The file name in the first line of the block, such as `# brevity.py`; empty if there is none."""
        match = FILE_NAME.match(self.text)
        return match["name"] if match else ""


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(language=match["language"], text=match["text"], comment=match["comment"] or "")
        for match in FENCE.finditer(text)
    ]


def between(page: Path, name: str) -> str:
    """The text between the markers `name` of a page."""
    text = page.read_text(encoding="utf-8")
    _, begin, rest = text.partition(f"<!-- {name}:begin -->\n")
    content, end, _ = rest.partition(f"\n<!-- {name}:end -->")
    if not begin or not end:
        raise ValueError(f"{page} has no markers {name!r}")
    return content


def replace_between(page: Path, name: str, content: str) -> None:
    """Replace the text between the markers `name` of a page."""
    old = between(page, name)
    text = page.read_text(encoding="utf-8")
    marked = f"<!-- {name}:begin -->\n{{}}\n<!-- {name}:end -->"
    page.write_text(text.replace(marked.format(old), marked.format(content)), encoding="utf-8")
