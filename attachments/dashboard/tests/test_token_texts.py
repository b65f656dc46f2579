"""The text of a completion, divided among its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from attachments.dashboard.token_values import TokenTexts
from tests.models.tokenizer_families import FAMILIES, family
from tests.small_models import byte_tokenizer

TEXT = "Hello world!\n\tübergrößer 世界 👩\u200d🚀 漢字"
BYTES, END = byte_tokenizer(), 256


def texts(tokens: Sequence[int], text: str) -> list[str]:
    """Divide a text among tokens that are bytes."""
    return TokenTexts(BYTES, ord("a"))(tokens, text)


def test_bytes_of_a_character_belong_to_its_last_token() -> None:
    """Three bytes of a Chinese character, four of an emoji."""
    assert texts(BYTES.encode("a世🎉b"), "a世🎉b") == ["a", "", "", "世", "", "", "", "🎉", "b"]
    assert texts(BYTES.encode("世界"), "世界") == ["", "", "世", "", "", "界"]


@pytest.mark.parametrize("name", FAMILIES)
def test_joined_texts_are_the_text(name: str) -> None:
    """Byte-level BPE, SentencePiece with byte fallback, and WordPiece; with special tokens before and inside."""
    tokenizer = family(name)
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1]
    special = next(iter(tokenizer.eos_ids))
    for tokens in (
        tokenizer.encode(TEXT, add_special_tokens=False),
        (special, *tokenizer.encode(TEXT), special, *tokenizer.encode(" again", add_special_tokens=False)),
    ):
        found = TokenTexts(tokenizer, anchor)(tokens, tokenizer.decode(tokens))
        assert len(found) == len(tokens)
        assert "".join(found) == tokenizer.decode(tokens)


def test_what_follows_the_text_has_no_text() -> None:
    """A stop string is cut inside of a token; the end token is special."""
    assert texts((*b"abcd", END), "ab") == ["a", "b", "", "", ""]
    assert texts((), "") == []


def test_an_incomplete_character_belongs_to_the_last_token() -> None:
    """The completion was cut inside a character; and bytes that are no character do not end the text."""
    cut = BYTES.encode("a世")[:-1]
    assert texts(cut, BYTES.decode(cut)) == ["a", "", "\ufffd"]
    broken = (97, *[0x80] * 20, 98)
    assert "".join(texts(broken, BYTES.decode(broken))) == BYTES.decode(broken)


def test_another_text_leaves_the_decoded_tokens() -> None:
    """An actor of the user's may send a text of its own."""
    assert texts(b"ab", "something else") == ["a", "b"]
