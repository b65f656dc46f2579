"""Grammars: every completed text is a sentence, and no grammar stops the program."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attachments.tools import constraints
from attachments.tools.tool_calls import ToolFormat
from attachments.tools.tool_grammars import strict_calls
from clotho.models.tokenizer import ChatTokenizer
from clotho.serving.openai_fields import Function, Tool
from protocols.constraints import Constraint, Grammar, GrammarKind
from protocols.errors import RequestError
from tests.small_models import byte_tokenizer

END = 256
EMBEDDED = Path(__file__).parents[3] / "profiles" / "embedded"
TOKENIZER = byte_tokenizer()

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 2, None]}}, "required": ["b"]},
    {"type": "array", "items": {"type": "number", "minimum": -3, "maximum": 8.5}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"const": "ünï"}, {"type": "string", "maxLength": 4}]},
    {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "pattern": "^[a-z]{2}$"}},
        "required": ["day", "id"],
        "additionalProperties": False,
    },
    {
        "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2}, {"const": 1}]}},
        "$ref": "#/$defs/a",
    },
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
)  # fmt: skip


@cache
def compiled(kind: GrammarKind, text: str, reasoning: str = "none") -> Constraint:
    """Compile a grammar for the byte tokenizer."""
    grammar = Grammar(kind=kind, text=text, param="field", reasoning=reasoning)  # type: ignore[arg-type]
    return TOKENIZER.compile_grammar(grammar, END + 1)


def random_text(constraint: Constraint, seed: int, *, most: int = 3000) -> str | None:
    """Choose allowed tokens at random until the text is complete; None if it does not end."""
    random, state, tokens = np.random.default_rng(seed), constraint.start(), list[int]()
    for _ in range(most):
        bits = np.unpackbits(np.frombuffer(state.allowed(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        token = END if END in allowed and random.random() < 0.3 else int(random.choice(allowed))
        done = state.accept(token)
        if token == END or done:
            return bytes(tokens if token == END else [*tokens, token]).decode()
        tokens.append(token)
    return None


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 2**32))
def test_every_completed_text_is_valid_for_its_schema(schema: dict[str, Any], seed: int) -> None:
    """The validator is the library jsonschema."""
    text = random_text(compiled("json_schema", json.dumps(schema)), seed)
    if text is not None:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def whitespace_of(text: str) -> set[str]:
    """Return the whitespace of JSON outside of its strings, each piece with the character before it."""
    return {found[0] for found in re.finditer(r"(?s:.)?\s+", re.sub(r'"(?:[^"\\]|\\.)*"', '""', text))}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 2**32))
def test_json_has_at_most_one_space_behind_a_comma_or_a_colon(schema: dict[str, Any], seed: int) -> None:
    """A model cannot spend its tokens on whitespace."""
    text = random_text(compiled("json_schema", json.dumps(schema)), seed)
    assert text is None or whitespace_of(text) <= {", ", ": "}


def test_json_may_have_any_bounded_whitespace_if_it_is_requested() -> None:
    """As a person writes it."""
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMAS[1]), param="field", spaced=True)
    assert allowed_after(TOKENIZER.compile_grammar(grammar, END + 1), '{\n  "a" : 1,\n\t"b": null\n}') == {"end"}
    assert allowed_after(compiled("json_schema", grammar.text), "{\n") is None
    assert allowed_after(compiled("json_schema", grammar.text), '{"a": 1,"b":null}') == {"end"}


PATTERNS = (r"[a-f]{3}|xyz", r"[0-9]{1,3}(\.[0-9]{1,3}){3}", r"(ab|c)*d?", r"[^\n]{0,5}é")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(PATTERNS), st.integers(0, 2**32))
def test_every_completed_text_matches_its_regular_expression(pattern: str, seed: int) -> None:
    """The whole text, in Unicode."""
    text = random_text(compiled("regex", pattern), seed)
    assert text is None or re.fullmatch(pattern, text)


@pytest.mark.parametrize("text", ['root ::= "a" ("b" | "c")* "d"', 'start: "a" ("b" | "c")* "d"'])
def test_context_free_grammars_have_two_syntaxes(text: str) -> None:
    """GBNF, as xgrammar and llama.cpp use it, and Lark."""
    for seed in range(5):
        assert re.fullmatch("a[bc]*d", random_text(compiled("grammar", text), seed) or "")


def test_a_grammar_can_follow_a_block_of_reasoning() -> None:
    """A prompt may have opened the block; the content behind it is a sentence."""
    text = random_text(compiled("regex", "[ab]{3}", "possible"), 1) or ""
    assert re.fullmatch(r"(?s:(<think>.*</think>\n{0,2})?[ab]{3})", text)
    state, seen = compiled("regex", "[ab]{3}", "open").start(), b"free \xc3\xa9 text</think>\n\nab"
    for token in seen:
        assert not state.accept(token)
    assert state.accept(ord("a"))


def test_marks_that_are_tokens_are_named_by_their_number() -> None:
    """The embedded tokenizer has a token for `</think>`; the grammar of a tool call names tokens in the same way."""
    tokenizer = ChatTokenizer.from_files(EMBEDDED)
    (end,) = tokenizer.encode("</think>", add_special_tokens=False)
    grammar = Grammar(kind="regex", text="[ab]{2}", param="field", reasoning="open")
    state = tokenizer.compile_grammar(grammar, tokenizer.vocab_size).start()
    a, b = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab")
    assert [state.accept(token) for token in (b, a, end, b, a)] == [False, False, False, False, True]


STRICT = Tool(
    type="function",
    function=Function(
        name="f",
        strict=True,
        parameters={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    ),
)
LOOSE = Tool(type="function", function=Function(name="g"))


def allowed_after(constraint: Constraint, text: str) -> set[str] | None:
    """Return the characters that may follow a text; None if the text is not allowed."""
    state = constraint.start()
    for token in text.encode():
        if not state.allowed()[token // 8] >> token % 8 & 1:
            return None
        state.accept(token)
    bits = np.unpackbits(np.frombuffer(state.allowed(), dtype=np.uint8), bitorder="little")
    return {"end" if token == END else chr(token) for token in np.flatnonzero(bits)}


STRICT_CALLS: tuple[tuple[ToolFormat, bool, str, str, str], ...] = (
    ("hermes", False, 'Hi <tool_call>\n{"name": "', 'f", "arguments": {"', 'g", "arguments": {"'),
    ("qwen3_coder", False, "Hi <tool_call>\n<function=", "f>\n<parameter=", "g>\n<"),
    ("llama3_json", False, '{"name": "', 'f", "parameters": {"', 'g", "parameters": {"'),
    ("pythonic", False, "[", "f(", "g("),
    ("mistral", False, 'Hi [TOOL_CALLS] [{"name": "', 'f", "arguments": {"', 'g", "arguments": {"'),
    ("mistral", True, "Hi [TOOL_CALLS]", 'f[ARGS]{"', 'g[ARGS]{"'),
)


@pytest.mark.parametrize("case", STRICT_CALLS, ids=[f"{one[0]} {one[1]}" for one in STRICT_CALLS])
def test_calls_of_strict_functions_follow_their_schema_and_text_is_free(
    case: tuple[ToolFormat, bool, str, str, str],
) -> None:
    """A function that is not strict has any arguments; no other function can be called."""
    call_format, has_args_mark, begin, strict, loose = case
    grammar = strict_calls([STRICT, LOOSE], call_format, parallel=True, has_args_mark=has_args_mark, content=None)
    constraint = compiled(grammar.kind, grammar.text)
    assert allowed_after(constraint, "Hi, 2 < 3 {[") == allowed_after(constraint, "Hi")
    assert "end" in (allowed_after(constraint, "Hi") or ())
    names = allowed_after(constraint, begin)
    assert names is not None
    assert {"f", "g"} <= names <= {"f", "g", " "}
    assert allowed_after(constraint, begin + strict) == {"x"}
    any_arguments = allowed_after(constraint, begin + loose) or set()
    assert any_arguments == {"qwen3_coder": {"/"}, "pythonic": {")"}}.get(call_format) or len(any_arguments) > 20


HOSTILE: tuple[tuple[GrammarKind, str], ...] = (
    ("regex", "("), ("regex", "(?=a)b"), ("regex", r"[^\s\S]"), ("regex", "a" * 100_000), ("json_schema", "[]"),
    ("json_schema", "{"), ("json_schema", '{"type": "nope"}'),
    ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 1}'),
    ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'), ("json_schema", '{"$ref": "file:///etc/passwd"}'),
    ("json_schema", '{"not": {}}'), ("json_schema", '{"a":' * 500 + "1" + "}" * 500), ("grammar", "root ::= root"),
    ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), ("grammar", 'root ::= ("a" "b"'),
    ("grammar", "start: <[99999]>"),
)  # fmt: skip


def test_unusable_grammars_are_refused_with_the_name_of_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid, too large, without a sentence, or with references to other documents."""
    monkeypatch.setattr(constraints, "CHECK_SECONDS", 1)
    for kind, text in HOSTILE:
        with pytest.raises(RequestError) as raised:
            compiled(kind, text)
        assert raised.value.param == "field"
        assert "\n" not in str(raised.value)


def test_a_grammar_that_takes_too_much_cpu_time_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is ended, the field is named, and the next grammar is compiled."""
    monkeypatch.setattr(constraints, "CHECK_SECONDS", 1)
    with pytest.raises(RequestError, match="CPU time") as raised:
        compiled("regex", "(a{999}){1000}")
    assert raised.value.param == "field"
    assert random_text(compiled("regex", "quick"), 0) == "quick"


def test_a_grammar_is_compiled_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which its process waits for a core does not count."""
    monkeypatch.setattr(constraints, "CHECK_SECONDS", 1)
    monkeypatch.setattr(constraints, "CHECK", "import time\ntime.sleep(1.5)\n" + constraints.CHECK)
    assert random_text(compiled("regex", "slow machine"), 0) == "slow machine"


def test_a_compilation_that_does_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long time; its process is killed."""
    monkeypatch.setattr(constraints, "CHECK", "import time; time.sleep(600)")
    monkeypatch.setattr(constraints, "WAIT_SECONDS", 0.2)
    with pytest.raises(RequestError, match="not compiled") as raised:
        compiled("regex", "never compiled")
    assert raised.value.param == "field"
    commands = [child.as_dict(["cmdline"])["cmdline"] or [] for child in psutil.Process().children()]  # [] of zombies
    assert not any("time.sleep(600)" in command for command in commands)


def test_a_grammar_that_takes_too_much_memory_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its resident memory is read from outside, so that a system without limits of address spaces needs none."""
    monkeypatch.setattr(constraints, "CHECK_BYTES", 100 * 2**20)
    monkeypatch.setattr(constraints, "CHECK", "import time; kept = b'x' * 2**28; time.sleep(600)")
    with pytest.raises(RequestError, match="memory to compile") as raised:
        compiled("regex", "large")
    assert raised.value.param == "field"


def test_the_work_per_token_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion that has used its CPU time fails at its next token, and names the field."""
    constraint = compiled("regex", "(ab)*")
    monkeypatch.setattr(constraints, "FIRST_SECONDS", -1.0)
    state = constraint.start()
    assert state.allowed()
    with pytest.raises(RequestError) as raised:
        state.accept(ord("a"))
    assert raised.value.param == "field"
