"""The shipped chat templates, with the tokenizer of the embedded policy."""

from __future__ import annotations

import json
from typing import Any

from attachments.tools.tool_grammars import tool_format
from clotho.models.tokenizer import ChatTokenizer
from training_run.profile.load import PROFILES

HERMES = PROFILES / "templates" / "tools-hermes.jinja"
FUNCTION: dict[str, Any] = {"name": "weather", "description": "It's é.", "parameters": {"type": "object"}}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    """Return the prompt of a conversation as text."""
    tokenizer = ChatTokenizer.from_files(PROFILES / "embedded", chat_template=str(HERMES))
    return tokenizer.decode(tokenizer.render_chat(messages, **options), skip_special_tokens=False)


def test_without_tools_the_template_is_chatml() -> None:
    """It renders what the own template of the embedded policy renders."""
    own = ChatTokenizer.from_files(PROFILES / "embedded")
    conversation = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    for messages in (conversation, conversation[1:]):
        assert rendered(messages) == own.decode(own.render_chat(messages), skip_special_tokens=False)


def test_tools_calls_and_results_are_rendered() -> None:
    """The definitions follow the system message; the results of one turn are one message of the user."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
    ]
    system, *turns = rendered(messages, tools=[{"type": "function", "function": FUNCTION}]).split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    (line,) = (line for line in system.splitlines() if line.startswith('{"name": "weather"'))
    assert json.loads(line) == FUNCTION
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert turns == [
        "user\nWeather?<|im_end|>\n",
        f"assistant\n{call}\n{call}<|im_end|>\n",
        "user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n",
        "assistant\n",
    ]


def test_the_server_finds_the_format_of_calls_in_the_template() -> None:
    """No `server.tool_parser` is needed."""
    assert tool_format(HERMES.read_text(encoding="utf-8"), "auto") == "hermes"
