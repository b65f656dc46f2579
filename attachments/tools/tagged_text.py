"""Texts of which grammars constrain parts, such as calls of tools."""

from __future__ import annotations

from msgspec import Struct

COMPACT_JSON = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Options of the JSON in grammars: no whitespace but one space behind a comma or a colon. With more, a model that is
unsure what to write can spend all of its tokens on whitespace."""


class Tag(Struct, frozen=True, kw_only=True):
    """A part of a text that a grammar constrains: it begins with the trigger.

    begin: text that begins with the trigger. body: an expression of Lark. end: text. An empty trigger means that the
    part is at the beginning of the text.
    """

    trigger: str
    begin: str
    body: str
    end: str


class TaggedText(Struct, frozen=True, kw_only=True):
    """Any text in which every trigger begins one of the tags.

    rules: of Lark, which the bodies name. content: the rule of a text without tags, which then is no other text. once:
    the text ends behind the first tag. first: regular expression of the first character of text, if not any.
    """

    tags: tuple[Tag, ...]
    rules: str = ""
    content: str = ""
    once: bool = False
    first: str = ""
