"""Text for the terminal: untrusted text and formats of numbers."""

from __future__ import annotations

import pytest

from clotho.monitoring.terminal_text import duration, memory, printable, size


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("plain", 10, "plain"),
        ("a\nb\tc\r", 10, "a⏎b c"),
        ("\x1b[2Jx\x07", 10, "·[2Jx·"),
        ("\u202eabc\u200b\ud800", 10, "·abc··"),
        ("0123456789", 10, "0123456789"),
        ("0123456789a", 10, "012345678…"),
        ("👩\u200d🚀", 10, "👩\u200d🚀"),
        ("", 10, ""),
    ],
)
def test_untrusted_text_has_no_control_characters_and_a_limited_length(text: str, limit: int, shown: str) -> None:
    """Escape sequences, direction changes and lone surrogates are replaced."""
    assert printable(text, limit) == shown


def test_ascii_terminals_get_ascii() -> None:
    """A run under LANG=C must not fail because of a completion."""
    assert printable("é\n漢\x00xxxxxxxx", 6, ascii_only=True) == "?|?.x~"


def test_numbers_have_readable_formats() -> None:
    """Durations, counts and bytes."""
    assert [duration(s) for s in (None, 7, 61, 3723)] == ["-", "0:07", "1:01", "1:02:03"]
    assert [size(n) for n in (950, 1_234, 999_800, 14_800_000_000)] == ["950", "1.23k", "1M", "14.8B"]
    assert [memory(n) for n in (12, 3 << 20, 16 << 30)] == ["12 B", "3 MiB", "16 GiB"]
