"""Tool calls and reasoning in the text of a completion. The result does not depend on how the text arrives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attachments.tools.reasoning import MessageParser, ReasoningSplitter
from attachments.tools.tool_calls import ToolFormat
from attachments.tools.tool_parsers import ToolCallParser

Parsed = tuple[str, str, list[tuple[str, str]]]

CALL = '{"name": "f", "arguments": {"x": "a}\\"</tool_call>{"}}'
NO_NAME = '<tool_call>{"name": 5, "arguments": {}}</tool_call>'
NO_NUMBER = '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {"x": 1}}'

XML = (
    "<function=f>\n<parameter=x>\n12\n</parameter>\n<parameter=t>\n 12 <b>\n</tool_call>\n</parameter>\n"
    '<parameter=o>\n{"a": [true, null]}\n</parameter>\n<parameter=free>\n7\n</parameter>\n'
    "<parameter=either>\n5\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n</function>"
)
XML_ARGUMENTS: dict[str, Any] = {
    "x": 12, "t": " 12 <b>\n</tool_call>", "o": {"a": [True, None]}, "free": "7", "either": "5", "flag": True,
}  # fmt: skip
PARAMETERS: dict[str, Any] = {
    "f": {
        "x": {"type": "integer"}, "t": {"type": "string"}, "o": {"type": "object"}, "flag": {"type": "boolean"},
        "either": {"type": ["string", "null"]}, "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }
}  # fmt: skip
INEXACT = (
    "<function=f><parameter=t>null</parameter><parameter=x>many</parameter><parameter=flag>yes</parameter>"
    "<parameter=optional>5</parameter></function>"
)
PYTHON = """[f(x=1, t="a)]", u='it\\'s', l=[1.5, None, {"k": True}], b=false), g.h()]"""
PYTHON_ARGUMENTS: dict[str, Any] = {"x": 1, "t": "a)]", "u": "it's", "l": [1.5, None, {"k": True}], "b": False}

TEXTS: tuple[tuple[ToolFormat, str, str, list[tuple[str, dict[str, Any]]]], ...] = (
    ("hermes", "no call", "no call", []),
    ("hermes", f"Hi <tool_call>\n{CALL}\n</tool_call>\n", "Hi ", [("f", {"x": 'a}"</tool_call>{'})]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}", "", [("f", {"x": 'a}"</tool_call>{'})] * 2),
    ("hermes", "<tool_call>{nonsense</tool_call> end", "<tool_call>{nonsense</tool_call> end", []),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    ("hermes", NO_NAME, NO_NAME, []),
    ("hermes", NO_NUMBER, NO_NUMBER, []),
    ("hermes", f"a <tool_cal b <tool_call>{CALL}</tool_call> c", "a <tool_cal b c", [("f", {"x": 'a}"</tool_call>{'})]),
    ("llama3_json", LLAMA, "", [("f", {"x": 1})]),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("f", {"x": 1})] * 2),
    ("llama3_json", f"Sure: {LLAMA}", f"Sure: {LLAMA}", []),
    ("llama3_json", '{"city": "Oslo"}', '{"city": "Oslo"}', []),
    ("mistral", f"ok[TOOL_CALLS] [{CALL}, {CALL}]", "ok", [("f", {"x": 'a}"</tool_call>{'})] * 2),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": 2}', "", [("f", {"x": 1}), ("g", {"y": 2})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc12[ARGS]{"x": 1}', "", [("f", {"x": 1})]),
    ("mistral", "[TOOL_CALLS] [broken", "[TOOL_CALLS] [broken", []),
    ("qwen3_coder", f"Hi <tool_call>\n{XML}\n</tool_call>", "Hi ", [("f", XML_ARGUMENTS)]),
    ("qwen3_coder", f"<tool_call>\n{XML}\n</tool_call>\n<tool_call>{XML}", "", [("f", XML_ARGUMENTS)] * 2),
    ("qwen3_coder", f"{XML} end", "end", [("f", XML_ARGUMENTS)]),
    ("qwen3_coder", "<tool_call>\n<function=g></function></tool_call>", "", [("g", {})]),
    ("qwen3_coder", INEXACT, "", [("f", {"t": "null", "x": "many", "flag": "yes", "optional": 5})]),
    ("qwen3_coder", "<tool_call><function=f>x</function> y", "<tool_call><function=f>x</function> y", []),
    ("qwen3_coder", "<tool_call><function=f><param", "<tool_call><function=f><param", []),
    ("qwen3_coder", "a < b <tool> <functio", "a < b <tool> <functio", []),
    ("pythonic", PYTHON, "", [("f", PYTHON_ARGUMENTS), ("g.h", {})]),
    ("pythonic", f"<|python_start|>{PYTHON}<|python_end|>", "", [("f", PYTHON_ARGUMENTS), ("g.h", {})]),
    ("pythonic", "[get-weather(in-city='Oslo')]", "", [("get-weather", {"in-city": "Oslo"})]),
    ("pythonic", "[f(x=(1, 2))]", "[f(x=(1, 2))]", []),
    ("pythonic", f"Sure: {PYTHON}", f"Sure: {PYTHON}", []),
    ("pythonic", "[1, 2] and [f(x=1)]", "[1, 2] and [f(x=1)]", []),
    ("pythonic", "[f(x=__import__('os'))]", "[f(x=__import__('os'))]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[" * 50 + "f()" + "]" * 50, "[" * 50 + "f()" + "]" * 50, []),
    ("pythonic", "[f(x='a", "[f(x='a", []),
)  # fmt: skip


def parse(parser: MessageParser, pieces: list[str]) -> Parsed:
    """Feed a parser, and join the parts that it returns."""
    content, reasoning, calls = "", "", dict[int, list[str]]()
    for index, piece in enumerate(pieces):
        delta = parser.push(piece, last=index == len(pieces) - 1)
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for call in delta.calls:
            assert (call.name is not None) == (call.id is not None) == (call.index not in calls)
            calls.setdefault(call.index, [call.name or "", ""])[1] += call.arguments
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """Cut a text into pieces."""
    at = sorted(draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TEXTS), st.data())
def test_calls_are_found_however_the_text_arrives(
    case: tuple[ToolFormat, str, str, list[tuple[str, dict[str, Any]]]], data: st.DataObject
) -> None:
    """A call that is not complete, or no valid JSON, or not of the format, stays text."""
    call_format, text, content, calls = case
    pieces = data.draw(st.composite(lambda draw: cuts(draw, text))())
    parser = MessageParser(None, ToolCallParser(call_format, enforced=False, parallel=True, parameters=PARAMETERS))
    found, _, found_calls = parse(parser, pieces)
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in found_calls] == calls
    assert parser.has_calls == bool(calls)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        (
            ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
            ("llama3_json", LLAMA.replace("1", '"a}\\""') + "; " + LLAMA),
            ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]"),
            ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{"y": 2}'),
            ("qwen3_coder", f"<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"),
            ("pythonic", '[f(x=1, t="a)],\\"", l=[1.5, {"k": true}], b=false), g()]'),
        )
    ),
    st.data(),
)
def test_arguments_of_enforced_calls_are_returned_as_they_arrive(
    case: tuple[ToolFormat, str], data: st.DataObject
) -> None:
    """The text of the arguments is that of the completion, in any division."""
    call_format, text = case
    pieces = data.draw(st.composite(lambda draw: cuts(draw, text))())
    parsers = [
        ToolCallParser(call_format, enforced=enforced, parallel=True, parameters=PARAMETERS)
        for enforced in (True, False)
    ]
    enforced, free = (
        parse(MessageParser(None, one), part) for one, part in zip(parsers, (pieces, [text]), strict=True)
    )
    assert enforced[0] == ""
    assert [(name, json.loads(arguments)) for name, arguments in enforced[2]] == [
        (name, json.loads(arguments)) for name, arguments in free[2]
    ]


OPEN_HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": "ab'
OPEN_XML = f"<tool_call>\n{XML[: XML.index('<parameter=o>')]}"
CUT: tuple[tuple[ToolFormat, str, str, str], ...] = (
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n", OPEN_HERMES, '{"x": "ab'),
    ("mistral", f"[{CALL}, ", '{"name": "f", "arguments": {"x": [1', '{"x": [1'),
    ("qwen3_coder", f"<tool_call>\n{XML}\n</tool_call>\n", OPEN_XML, '{"x": 12'),
    ("pythonic", "[g(), ", 'f(x=1, t="ab', '{"x": 1, "t": "ab'),
)


@pytest.mark.parametrize(("call_format", "whole", "begun", "arguments"), CUT)
def test_a_call_that_is_cut_is_left_out_unless_a_stream_has_begun_it(
    call_format: ToolFormat, whole: str, begun: str, arguments: str
) -> None:
    """Its arguments are not JSON. A stream cannot take back what it has sent."""

    def calls(pieces: list[str]) -> list[tuple[str, str]]:
        parser = ToolCallParser(call_format, enforced=True, parallel=True, parameters=PARAMETERS)
        return parse(MessageParser(None, parser), pieces)[2]

    assert len(calls([whole + begun])) == 1
    assert calls([begun]) == []
    complete, cut = calls([*(whole + begun)])
    assert json.loads(complete[1]) is not None
    assert cut[1].startswith(arguments)


def test_an_enforced_call_without_a_name_stays_content() -> None:
    """`max_tokens` ended it before the name was complete."""
    parser = MessageParser(None, ToolCallParser("hermes", enforced=True, parallel=True))
    assert parse(parser, ['<tool_call>\n{"na']) == ('<tool_call>\n{"na', "", [])


def test_without_parallel_calls_only_the_first_is_returned() -> None:
    """`parallel_tool_calls: false`."""
    parser = MessageParser(None, ToolCallParser("hermes", enforced=False, parallel=False))
    _, _, calls = parse(parser, [f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"])
    assert len(calls) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(
        (
            (False, "<think>\nwhy\n</think>\n\nanswer\n", "why", "answer\n"),
            (False, "answer </think>", "", "answer </think>"),
            (False, "\n<think>a<b</thin </think>c", "a<b</thin ", "c"),
            (False, "<thin", "", "<thin"),
            (False, "<think>never ends\n", "never ends", ""),
            (True, "\nwhy\n\n</think>\n\n\nanswer", "why", "answer"),
            (True, "why</think>", "why", ""),
            (True, "", "", ""),
        )
    ),
    st.data(),
)
def test_reasoning_is_separated_however_the_text_arrives(case: tuple[bool, str, str, str], data: st.DataObject) -> None:
    """The prompt may have opened it; newlines beside the marks belong to neither part."""
    opened, text, reasoning, content = case
    pieces = data.draw(st.composite(lambda draw: cuts(draw, text))())
    assert parse(MessageParser(ReasoningSplitter(opened=opened), None), pieces)[:2] == (content, reasoning)


@pytest.mark.parametrize("mark", ["<think>", "</think>"])
def test_marks_in_the_content_stay(mark: str) -> None:
    """Only the first block is reasoning."""
    parser = MessageParser(ReasoningSplitter(opened=False), None)
    assert parse(parser, [f"<think>a</think>b{mark}c"])[:2] == (f"b{mark}c", "a")
