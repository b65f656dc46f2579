"""The text of a growing completion: stop strings and incomplete characters."""

from __future__ import annotations

from clotho.inference.stop_strings import IncrementalDetokenizer
from tests.small_models import byte_tokenizer

BYTES = byte_tokenizer()


def push_all(tracker: IncrementalDetokenizer, data: bytes) -> list[str]:
    """Push one byte per token until the detokenizer stops, and return the chunks."""
    pieces = []
    for byte in data:
        pieces.append(tracker.push(byte))
        if tracker.stopped is not None:
            break
    return pieces


def test_the_chunks_and_the_tail_make_up_the_text() -> None:
    """No character is lost or repeated, multi-byte characters included."""
    text = "héllo → 世界 🎉 end"
    tracker = IncrementalDetokenizer(BYTES)
    pieces = push_all(tracker, text.encode())
    assert "".join(pieces) + tracker.finish() == text == tracker.text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_is_held_back() -> None:
    """It appears as U+FFFD only if the completion ends with it."""
    tracker = IncrementalDetokenizer(BYTES)
    assert push_all(tracker, "a🎉".encode()[:-1]) == ["a", "", "", ""]
    assert tracker.finish() == "\ufffd"


def test_bytes_that_form_no_character_are_released() -> None:
    """With the eighth token: the first ones may still be part of a character."""
    tracker = IncrementalDetokenizer(BYTES)
    assert push_all(tracker, b"\xff" * 10) == [*[""] * 7, "\ufffd" * 8, "", ""]


def test_a_stop_string_across_tokens_is_removed_completely() -> None:
    """Text that may become a stop string is held back."""
    tracker = IncrementalDetokenizer(BYTES, ("STOP", "END"))
    pieces = push_all(tracker, b"say STOR and STOP here")
    assert "".join(pieces) + tracker.finish() == "say STOR and " == tracker.text
    assert tracker.stopped == "STOP"


def test_the_first_stop_string_in_the_text_counts() -> None:
    """Also if a longer one begins after it."""
    tracker = IncrementalDetokenizer(BYTES, ("bcd", "b"))
    push_all(tracker, b"abcd")
    assert (tracker.stopped, tracker.text) == ("b", "a")


def test_held_text_without_a_stop_string_is_in_the_tail() -> None:
    """For a completion that ends by length."""
    tracker = IncrementalDetokenizer(BYTES, ("<stop>",))
    pieces = push_all(tracker, b"x<sto")
    assert pieces == ["x", "", "", "", ""]
    assert tracker.finish() == "<sto"


def test_special_tokens_have_no_text() -> None:
    """The end token decodes to an empty string."""
    tracker = IncrementalDetokenizer(BYTES)
    assert [tracker.push(t) for t in (97, 256, 98)] == ["a", "", "b"]
