"""docs/library.md names the public names of the library, and README.md shows the loop of an example."""

from __future__ import annotations

import re
from textwrap import dedent, indent

import clotho
from tests.docs.pages import DOCS, ROOT, blocks

PAGE = (DOCS / "library.md").read_text(encoding="utf-8")


def test_the_page_names_every_public_name_and_method() -> None:
    """In its table, and no other name."""
    table = PAGE.partition("## The names")[2].partition("## ")[0]
    first = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {name for cell in first for name in re.findall(r"`(\w+)[^`]*`", cell)}
    assert named == set(clotho.__all__)
    for kind in (clotho.Sampler, clotho.Learner, clotho.Rewards, clotho.Server):
        for method in vars(kind):
            if not method.startswith("_") and method not in ("new_client", "prompt_logprobs", "restart", "served"):
                assert method.removesuffix("_async") in PAGE, f"{kind.__name__}.{method}"


def test_the_readme_shows_the_loop_of_the_example() -> None:
    """Line by line."""
    example = (ROOT / "examples" / "grpo.py").read_text(encoding="utf-8")
    (shown,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    assert indent(dedent(shown), " " * 8) in example
