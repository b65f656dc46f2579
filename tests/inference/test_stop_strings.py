"""Text of a growing completion: stop strings, half characters, nothing said too early."""

from __future__ import annotations

from clotho.inference.stop_strings import IncrementalDetokenizer
from tests.small_models import byte_tokenizer

BYTES = byte_tokenizer()


def push_all(tracker: IncrementalDetokenizer, data: bytes) -> list[str]:
    """Push bytes one token at a time until the tracker stops; return what each made certain."""
    pieces = []
    for byte in data:
        pieces.append(tracker.push(byte))
        if tracker.stopped is not None:
            break
    return pieces


def test_pieces_and_the_tail_make_up_the_text() -> None:
    """Nothing is lost or repeated, characters of several bytes included."""
    text = "héllo → 世界 🎉 end"
    tracker = IncrementalDetokenizer(BYTES)
    pieces = push_all(tracker, text.encode())
    assert "".join(pieces) + tracker.finish() == text == tracker.text
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_is_held_back_and_said_at_the_end_if_nothing_follows() -> None:
    """An incomplete UTF-8 sequence appears as U+FFFD only when the completion ends with it."""
    tracker = IncrementalDetokenizer(BYTES)
    assert push_all(tracker, "a🎉".encode()[:-1]) == ["a", "", "", ""]
    assert tracker.finish() == "\ufffd"


def test_bytes_that_never_make_a_character_do_not_hold_text_back_for_ever() -> None:
    """After eight such tokens they are said as they are."""
    tracker = IncrementalDetokenizer(BYTES)
    assert "".join(push_all(tracker, b"\xff" * 20)) != ""


def test_a_stop_string_spread_over_tokens_is_cut_and_never_partly_said() -> None:
    """Text that could become a stop string is held back until it cannot, or does."""
    tracker = IncrementalDetokenizer(BYTES, ("STOP", "END"))
    pieces = push_all(tracker, b"say STOR and STOP here")
    assert "".join(pieces) + tracker.finish() == "say STOR and " == tracker.text
    assert tracker.stopped == "STOP"


def test_of_two_stop_strings_the_earlier_in_the_text_counts() -> None:
    """Even where a longer one would have begun after it."""
    tracker = IncrementalDetokenizer(BYTES, ("bcd", "b"))
    push_all(tracker, b"abcd")
    assert (tracker.stopped, tracker.text) == ("b", "a")


def test_held_text_that_did_not_become_a_stop_string_is_said_at_the_end() -> None:
    """The tail of a completion that ends by length."""
    tracker = IncrementalDetokenizer(BYTES, ("<stop>",))
    pieces = push_all(tracker, b"x<sto")
    assert pieces == ["x", "", "", "", ""]
    assert tracker.finish() == "<sto"


def test_special_tokens_leave_no_text() -> None:
    """The end token is decoded to nothing."""
    tracker = IncrementalDetokenizer(BYTES)
    assert [tracker.push(t) for t in (97, 256, 98)] == ["a", "", "b"]
