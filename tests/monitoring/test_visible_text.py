"""Foreign text shown to a person: one line, no tricks."""

from __future__ import annotations

import pytest

from clotho.monitoring.terminal_text import visible


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
def test_text_is_harmless_and_short(text: str, limit: int, shown: str) -> None:
    """Escape sequences, direction changes and half characters cannot act; the limit counts what is shown."""
    assert visible(text, limit) == shown


def test_terminals_without_other_characters_get_ascii() -> None:
    """A redirected run under LANG=C must not die of a completion."""
    assert visible("é\n漢\x00xxxxxxxx", 6, ascii_only=True) == "?|?.x~"
