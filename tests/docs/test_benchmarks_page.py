"""docs/benchmark-tables.md states which benchmarks depend on the CPU backend."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from bench.__main__ import module_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmark-tables.md"
DECODE = "On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal."
LAYERS = "On Linux, norms, gates, attention and LoRA are those of attachments/cpu; nothing here was measured on Metal."
SENTENCES = {
    "decode": DECODE,
    "first_token": DECODE,
    "serve": DECODE,
    "visitors": DECODE,
    "overlap": DECODE,
    "peers": DECODE,
    "real": DECODE,
    "gym": DECODE,
    "update": LAYERS,
}
ELSEWHERE = {
    "learning": DECODE,
    "methods": DECODE,
    "environments": DECODE,
    "search": DECODE,
    "quick": DECODE,
    "soak": DECODE,
}
"""Benchmarks whose table is on another page."""


@pytest.mark.parametrize("name", [*SENTENCES, *ELSEWHERE])
def test_the_first_sentence_of_a_description_names_the_cpu_backend(name: str) -> None:
    """A reader of `--help` must not take the numbers for those of a Mac."""
    description = import_module(module_of(name)).__doc__ or ""
    assert description.startswith((SENTENCES | ELSEWHERE)[name])


@pytest.mark.parametrize("name", SENTENCES)
def test_the_first_sentence_of_a_section_names_the_cpu_backend(name: str) -> None:
    """The section is the one with the generated table."""
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(f"<!-- {name}:begin -->")
    section = before.rpartition("\n## ")[2].partition("\n\n")[2]
    assert section.startswith(SENTENCES[name])
