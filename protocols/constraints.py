"""Constraints of completions: grammars as requests name them, and their compiled form, which the decode engine uses."""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark", "tagged"]


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


class Grammar(Struct, frozen=True, kw_only=True):
    """A grammar, not compiled yet.

    kind, text: a JSON schema; a regular expression; a JSON list of strings; a context-free grammar in the syntax of
        Lark or GBNF; a Lark grammar of this program; or the JSON of a `TaggedText`.
    param: the field of the request that contains it.
    spaced: whitespace may stand between two elements of the JSON of a schema, up to a limit; otherwise the JSON has the
        form of `COMPACT_JSON`.
    reasoning: whether the completion begins inside `<think>` (open), may begin with a block of it (possible), or has
        none.
    """

    kind: GrammarKind
    text: str
    param: str
    spaced: bool = False
    reasoning: Literal["none", "possible", "open"] = "none"


class ConstraintState(Protocol):
    """The state of one completion: which tokens may follow. Used in the decode thread only."""

    def allowed(self) -> bytes:
        """Return the tokens that may follow: bit i of byte b stands for token 8 b + i. At least one is set.

        There are at least as many 32-bit words as the vocabulary fills; bits behind the vocabulary have no meaning.
        """

    def accept(self, token: int, /) -> bool:
        """Advance by an allowed token; return whether the completion is complete and nothing may follow.

        Raises RequestError if the grammar exceeds a limit of its work.
        """


class Constraint(Protocol):
    """A compiled grammar. Thread-safe."""

    def start(self) -> ConstraintState:
        """Return the state of a new completion."""
