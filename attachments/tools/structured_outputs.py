"""Grammars of the fields that constrain completions: `response_format`, `guided_*` and others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from attachments.tools.tagged_text import COMPACT_JSON, Tag, TaggedText
from clotho.serving.errors import invalid_field
from clotho.serving.openai_fields import ConstraintFields, OutputFormat, StructuredOutputs, json_grammar
from protocols.constraints import Grammar, GrammarKind

ANY_OBJECT = {"type": "object"}


class Structure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a text that a schema constrains, between two texts; `begin` starts with a trigger."""

    begin: Annotated[str, Meta(min_length=1, max_length=256)]
    schema: dict[str, Any] = {}
    end: Annotated[str, Meta(max_length=256)] = ""


Triggers = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(min_length=1, max_length=128)]


class StructuralTag(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structures in a text that is free otherwise: a trigger begins one of the structures that start with it.

    stop_after_first: the text ends behind the first structure.
    """

    structures: Annotated[list[Structure], Meta(min_length=1, max_length=128)]
    triggers: Triggers
    type: Literal["structural_tag"] = "structural_tag"
    stop_after_first: bool = False


class SchemaContent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a tag in XGrammar's form: JSON that a schema validates."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class FormatTag(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `Structure` in XGrammar's form."""

    begin: Annotated[str, Meta(min_length=1, max_length=256)]
    content: SchemaContent
    end: Annotated[str, Meta(max_length=256)]
    type: Literal["tag"] = "tag"


class TriggeredTags(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StructuralTag` in XGrammar's form, which vLLM's field `format` has. at_least_one: must be false."""

    type: Literal["triggered_tags"]
    triggers: Triggers
    tags: Annotated[list[FormatTag], Meta(min_length=1, max_length=128)]
    at_least_one: bool = False
    stop_after_first: bool = False


def requested_grammar(fields: ConstraintFields, others: Sequence[Grammar] = ()) -> Grammar | None:
    """Return the grammar that a request names; None if it names none. Raises ApiError if it names several.

    others: grammars that further fields of the request name.
    """
    found = list(others)
    if fields.response_format is not None:
        found += _output_grammar(fields.response_format)
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


def _output_grammar(output: OutputFormat) -> list[Grammar]:
    if output.type == "structural_tag":
        given = {"structures": output.structures, "triggers": output.triggers, "format": output.format}
        tag = {name: value for name, value in given.items() if value is not None}
        return [structural_grammar(tag, "response_format")]
    schema = output_schema(output)
    return [] if schema is None else [json_grammar(schema, "response_format")]


def output_schema(output: OutputFormat) -> dict[str, Any] | None:
    """Return the JSON schema of a `response_format`; None for text. Raises ApiError."""
    if (output.type == "json_schema") != (output.json_schema is not None):
        raise invalid_field("response_format", "type json_schema requires json_schema, and no other type has one")
    if output.type != "structural_tag" and (output.structures is not None or output.format is not None):
        raise invalid_field("response_format", "only type structural_tag has structures or a format")
    if output.type != "json_object" and output.schema is not None:
        raise invalid_field("response_format", "only type json_object has a schema beside its type")
    if output.json_schema is not None:
        return output.json_schema.schema
    return (output.schema or ANY_OBJECT) if output.type == "json_object" else None


def structural_grammar(fields: Any, param: str) -> Grammar:
    """Return the grammar of a text with structures. Raises ApiError."""
    try:
        tag = msgspec.convert(_structures(fields), StructuralTag)
    except msgspec.ValidationError as error:
        raise invalid_field(param, str(error)) from error
    tags = []
    for one in tag.structures:
        trigger = max((text for text in tag.triggers if one.begin.startswith(text)), key=len, default=None)
        if trigger is None:
            raise invalid_field(param, f"{one.begin[:64]!r} begins with no trigger")
        tags.append(Tag(trigger=trigger, begin=one.begin, body=json_rule(one.schema), end=one.end))
    text = msgspec.json.encode(TaggedText(tags=tuple(tags), once=tag.stop_after_first)).decode()
    return Grammar(kind="tagged", text=text, param=param)


def _structures(fields: Any) -> Any:
    """Return the fields of a `StructuralTag`. Raises msgspec.ValidationError."""
    if not isinstance(fields, dict) or "format" not in fields:
        return fields
    if fields.keys() - {"type", "format"}:
        raise msgspec.ValidationError("format cannot be combined with other fields")
    form = msgspec.convert(fields["format"], TriggeredTags)
    if form.at_least_one:
        raise msgspec.ValidationError("at_least_one: true is not supported")
    structures = [{"begin": one.begin, "schema": one.content.json_schema, "end": one.end} for one in form.tags]
    return {"triggers": form.triggers, "stop_after_first": form.stop_after_first, "structures": structures}


def _structured(fields: StructuredOutputs) -> list[Grammar]:
    param, spaced = "structured_outputs", not fields.disable_any_whitespace
    found = []
    if spaced and fields.json is None and not fields.json_object:
        raise invalid_field(param, "disable_any_whitespace applies to json and json_object")
    if fields.json is not None:
        found.append(json_grammar(fields.json, param, spaced=spaced))
    if fields.regex is not None:
        found.append(Grammar(kind="regex", text=fields.regex, param=param))
    if fields.choice is not None:
        found.append(choice_grammar(fields.choice, param))
    if fields.grammar is not None:
        found.append(Grammar(kind="grammar", text=fields.grammar, param=param))
    if fields.json_object:
        found.append(json_grammar(ANY_OBJECT, param, spaced=spaced))
    if fields.structural_tag is not None:
        try:
            found.append(structural_grammar(msgspec.json.decode(fields.structural_tag), param))
        except msgspec.DecodeError as error:
            raise invalid_field(param, f"structural_tag: {error}") from error
    if len(found) != 1:
        raise invalid_field(param, "set exactly one of json, regex, choice, grammar, json_object and structural_tag")
    return found


def json_rule(schema: Any) -> str:
    """Return the expression of Lark for JSON that a schema validates, in the form of `COMPACT_JSON`."""
    options = {"x-guidance": COMPACT_JSON}
    return f"%json {json.dumps({**schema, **options} if isinstance(schema, dict) else {'allOf': [schema], **options})}"


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """Return the grammar of several texts."""
    return Grammar(kind="choice", text=json.dumps(list(choices)), param=param)
