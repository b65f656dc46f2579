"""Errors: text from outside is shown as one short line of visible characters."""

from __future__ import annotations

import unicodedata

import pytest

from protocols import errors
from protocols.errors import INVISIBLE, JOINER, as_exception, visible

STATUS_1 = {
    "ClothoError", "RequestError", "GenerationError", "ParityError", "RemoteError", "RankError", "DivergenceError",
    "CollapseError", "AdapterError", "ActorError", "ExecutorStoppedError",
}  # fmt: skip
"""Failures of a run or of a request; all other errors are mistakes of the user."""


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("plain", 10, "plain"), ("漢字 é", 10, "漢字 é"), ("a\nb\tc\r", 10, "a\\nb\\tc\\r"),
        ("\x1b[2Jx\x07", 20, "\\x1b[2Jx\\x07"), ("\x9b2J\x7f", 20, "\\x9b2J\\x7f"),
        ("\u202eabc\u2028\ud800", 40, "\\u202eabc\\u2028\\ud800"), ("0123456789", 10, "0123456789"),
        ("0123456789a", 10, "012345678…"), ("👩\u200d🚀", 10, "👩\u200d🚀"), ("", 10, ""),
    ],
)  # fmt: skip
def test_untrusted_text_has_no_control_characters_and_a_limited_length(text: str, limit: int, shown: str) -> None:
    """Escape sequences, line breaks, direction changes and lone surrogates are escaped."""
    assert visible(text, limit) == shown


def test_no_character_is_shown_raw_that_moves_the_cursor_or_hides_text() -> None:
    """At both ends of every range of characters of one category; a lone surrogate cannot be encoded otherwise."""
    kinds = [unicodedata.category(chr(code)) for code in range(0x110000)]
    ends = [code for code in range(1, 0x110000) if kinds[code] != kinds[code - 1]]
    text = "".join(chr(code) for end in ends for code in (end - 1, end))
    shown = visible(text, 20 * len(text))
    assert not {unicodedata.category(character) for character in shown if character != JOINER} & INVISIBLE
    shown.encode()


def test_the_end_of_a_long_text_can_be_kept() -> None:
    """The end of an error message says what to do."""
    shown = visible("x" * 5_000_000 + ": choose another file", 100, keep_end=25)
    assert len(shown) == 100
    assert shown.endswith("…xxxx: choose another file")


@pytest.mark.parametrize("text", ["\x1b" * 500, "plain", "x" * 500 + "\u202e", "\\x1b"])
def test_text_that_passes_two_outlets_is_escaped_once(text: str) -> None:
    """A second call with the same limit changes nothing."""
    once = visible(text, 120, keep_end=30)
    assert len(once) <= 120
    assert visible(once, 120, keep_end=30) == once


def test_a_mistake_of_the_user_has_the_exit_status_2() -> None:
    """Scripts tell it from the failure of a run, which has the exit status 1."""
    classes, statuses = [errors.ClothoError], dict[str, int]()
    while classes:
        one = classes.pop()
        statuses[one.__name__] = one.exit_status
        classes += [child for child in one.__subclasses__() if child.__module__ == errors.__name__]
    assert set(statuses.values()) == {1, 2}
    assert {name for name, status in statuses.items() if status == 1} == STATUS_1


def test_an_error_that_would_end_the_event_loop_becomes_one_that_it_causes() -> None:
    """Any other stays what it is."""
    end, error = SystemExit(3), ValueError("own")
    replacement = as_exception(end)
    assert (type(replacement), str(replacement), replacement.__cause__) == (RuntimeError, "SystemExit: 3", end)
    assert as_exception(error) is error
