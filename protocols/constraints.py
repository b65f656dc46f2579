"""Constraints of completions: grammars as requests name them, and their compiled form, which the decode engine uses."""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark", "tagged"]


class Grammar(Struct, frozen=True, kw_only=True):
    """A grammar, not compiled yet.

    kind, text: a JSON schema; a regular expression; a JSON list of strings; a context-free grammar in the syntax of
        Lark or GBNF; a Lark grammar of this program; or the JSON of a text with tags (`tagged`).
    param: the field of the request that contains it.
    spaced: whitespace may stand between two elements of the JSON of a schema, up to a limit; otherwise the JSON has no
        whitespace but one space behind a comma or a colon.
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
