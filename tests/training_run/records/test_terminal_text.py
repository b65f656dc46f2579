"""Text for the terminal: untrusted text and formats of numbers."""

from __future__ import annotations

from training_run.records.terminal_text import duration, memory, size, terminal_text


def test_ascii_terminals_get_ascii() -> None:
    """A run under LANG=C must not fail because of a completion."""
    assert terminal_text("é\n漢 and more text", 8, ascii_only=True) == "?\\n? an~"
    assert terminal_text("é\n漢", 8) == "é\\n漢"


def test_numbers_have_readable_formats() -> None:
    """Durations, counts and bytes."""
    assert [duration(s) for s in (None, 7, 61, 3723)] == ["-", "0:07", "1:01", "1:02:03"]
    assert [size(n) for n in (950, 1_234, 999_800, 14_800_000_000)] == ["950", "1.23k", "1M", "14.8B"]
    assert [memory(n) for n in (12, 3 << 20, 16 << 30)] == ["12 B", "3 MiB", "16 GiB"]
