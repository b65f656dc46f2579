"""Fields of a request that constrain its completions: `response_format`, `guided_*`, `bad_words` and others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from clotho.serving.errors import invalid_field
from protocols.constraints import Grammar, GrammarKind
from protocols.sampling import MAX_BAD_WORD_TOKENS

Choices = Annotated[list[str], Meta(min_length=1, max_length=4096)]
Schema = dict[str, Any] | str
"""A JSON schema, as an object or as its text."""

ANY_OBJECT = {"type": "object"}


class JsonSchema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema of OpenAI's `response_format`. strict: has no effect, because every schema is enforced."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class OutputFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. Exactly one field is set."""

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstraintFields(Struct, frozen=True, kw_only=True):
    """The fields of a request that constrain its completions; at most one is set."""

    response_format: OutputFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def requested_grammar(fields: ConstraintFields, others: Sequence[Grammar] = ()) -> Grammar | None:
    """Return the grammar that a request names; None if it names none. Raises ApiError if it names several.

    others: grammars that further fields of the request name.
    """
    found = list(others)
    output = fields.response_format
    if output is not None and output.type != "text":
        if (output.type == "json_schema") != (output.json_schema is not None):
            raise invalid_field("response_format", "type json_schema requires json_schema, and no other type has one")
        schema = output.json_schema.schema if output.json_schema is not None else ANY_OBJECT
        found.append(json_grammar(schema, "response_format"))
    if fields.structured_outputs is not None:
        found += _structured(fields.structured_outputs)
    if fields.guided_json is not None:
        found.append(json_grammar(fields.guided_json, "guided_json"))
    if fields.guided_choice is not None:
        found.append(choice_grammar(fields.guided_choice, "guided_choice"))
    texts: tuple[tuple[str, GrammarKind, str | None], ...] = (
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_grammar", "grammar", fields.guided_grammar),
    )
    found += [Grammar(kind=kind, text=text, param=param) for param, kind, text in texts if text is not None]
    if len(found) > 1:
        raise invalid_field(found[1].param, f"cannot be combined with {found[0].param}")
    return found[0] if found else None


def _structured(fields: StructuredOutputs) -> list[Grammar]:
    param = "structured_outputs"
    found = []
    if fields.json is not None:
        found.append(json_grammar(fields.json, param))
    if fields.regex is not None:
        found.append(Grammar(kind="regex", text=fields.regex, param=param))
    if fields.choice is not None:
        found.append(choice_grammar(fields.choice, param))
    if fields.grammar is not None:
        found.append(Grammar(kind="grammar", text=fields.grammar, param=param))
    if fields.json_object:
        found.append(json_grammar(ANY_OBJECT, param))
    if len(found) != 1:
        raise invalid_field(param, "set exactly one of json, regex, choice, grammar and json_object")
    return found


def json_grammar(schema: Schema, param: str) -> Grammar:
    """Return the grammar of JSON texts that a schema validates."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar(kind="json_schema", text=text, param=param)


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """Return the grammar of several texts."""
    return Grammar(kind="choice", text=json.dumps(list(choices)), param=param)


def bad_words(words: Sequence[str], encode: Callable[[str], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words that a completion must not contain. Raises ApiError.

    Each word counts at the start of a word and behind a space, by vLLM's rule.
    """
    found = []
    for word in words:
        plain, spaced = encode(word.lstrip()), encode(f" {word.lstrip()}")
        if not plain or len(spaced) > MAX_BAD_WORD_TOKENS:
            raise invalid_field("bad_words", f"{word[:64]!r} is not a sequence of 1 to {MAX_BAD_WORD_TOKENS} tokens")
        found += [plain, spaced] if spaced[0] != plain[0] and len(spaced) == len(plain) else [plain]
    return tuple(found)
