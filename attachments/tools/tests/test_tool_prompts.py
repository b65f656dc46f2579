"""Tools, calls and results as text, for models whose chat template knows no tools."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from attachments.tools.chat import tools_as_text
from clotho.serving.openai_fields import CalledFunction, ContentPart, Function, Message, Tool, ToolCall
from tests.serving.test_chat_features import LIMITS, PLAIN, SCHEMA, TOOLS
from tests.serving.test_with_engine import serving

FUNCTIONS = [Tool(type="function", function=Function(name="f", description="Adds.", parameters=SCHEMA))]


def text_of(message: Message) -> str:
    """Return the joined parts of a message."""
    content = message.content or ""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


def test_the_system_message_defines_the_functions() -> None:
    """A system message of the conversation stays before the definitions."""
    user = Message(role="user", content="Hi")
    for messages, start in (
        ([user], "Answer"),
        ([Message(role="developer", content="Be brief."), user], "Be brief.\n\n"),
    ):
        first, second = tools_as_text(messages, FUNCTIONS)
        assert first.role in ("system", "developer")
        assert text_of(first).startswith(start)
        (line,) = (line for line in text_of(first).splitlines() if line.startswith('{"name": "f"'))
        assert json.loads(line) == {"name": "f", "description": "Adds.", "parameters": SCHEMA}
        assert second == user


def test_calls_and_results_are_text_in_the_form_of_hermes() -> None:
    """Results are messages of the user, because the template has no other role for them."""
    call = ToolCall(id="1", function=CalledFunction(name="f", arguments='{"n": 1}'))
    parts = [ContentPart(type="text", text="4"), ContentPart(type="text", text="2")]
    _, said, silent, result = tools_as_text(
        [
            Message(role="system", content="x"),
            Message(role="assistant", content="Wait.", tool_calls=[call, call]),
            Message(role="assistant", tool_calls=[call]),
            Message(role="tool", tool_call_id="1", name="f", content=parts),
        ],
        FUNCTIONS,
    )
    text = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    assert (text_of(said), said.tool_calls) == (f"Wait.\n{text}\n{text}", None)
    assert text_of(silent) == text
    assert (result.role, text_of(result)) == ("user", "<tool_response>\n42\n</tool_response>")


async def test_required_calls_need_no_template_with_tools() -> None:
    """Whole, streamed, and behind earlier calls; the prompt contains the definitions."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    earlier: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "41"},
    ]
    limits: dict[str, Any] = {**LIMITS, "max_tokens": 120, "tools": TOOLS[1:], "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "no_arguments"}}
    async with serving(PLAIN) as (stack, client):
        for choice, messages in (("required", LIMITS["messages"]), (named, [*LIMITS["messages"], *earlier])):
            fields = {**limits, "messages": messages, "tool_choice": choice, "extra_body": {"return_token_ids": True}}
            answer: Any = await client.chat.completions.create(**fields)
            (found,) = answer.choices[0].message.tool_calls
            assert found.function.name == "no_arguments"
            jsonschema.validate(json.loads(found.function.arguments), {"type": "object"})
            prompt = stack.source.tokenizer.decode(answer.prompt_token_ids)
            assert '{"name": "no_arguments"}' in prompt
            assert ("<tool_response>\n41" in prompt) == (messages is not LIMITS["messages"])


async def test_a_free_choice_of_calls_needs_a_template_with_tools() -> None:
    """The error names one that is shipped."""
    async with serving(PLAIN) as (_, client):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**LIMITS, tools=TOOLS)
        assert raised.value.param == "tools"
        assert "--model.chat-template tools-hermes" in raised.value.message
