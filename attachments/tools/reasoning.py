"""From the text of a completion to the parts of a message: reasoning, content and tool calls, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from attachments.tools.tool_calls import ToolUse
from attachments.tools.tool_parsers import ToolCallParser, held_back
from clotho.serving.chat_extension import MessageDelta
from protocols.constraints import Grammar

THINK, END_THINK = "<think>", "</think>"
"""The marks around the reasoning of a model."""

PROMPT_TAIL = 16
"""Number of last tokens of a prompt in which a chat template may open or close the reasoning."""


class MessageParser:
    """The parser of one message. The parts that it returns do not depend on how the text is divided."""

    end_of_reasoning = END_THINK

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolCallParser | None) -> None:
        self._reasoning, self._tools = reasoning, tools

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return self._tools is not None and self._tools.has_calls

    def push(self, text: str, *, last: bool) -> MessageDelta:
        """Add text; return the parts that are final with it. last: the completion ends with this text."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text, last=last)
        if self._tools is None:
            return MessageDelta(content=content, reasoning=reasoning)
        content, calls = self._tools.push(content, last=last)
        return MessageDelta(content=content, reasoning=reasoning, calls=calls)


class ReasoningSplitter:
    """Separates the text between the marks of reasoning from the content behind it."""

    def __init__(self, *, opened: bool) -> None:
        """opened: the prompt ends with the first mark."""
        self._state = "reasoning" if opened else "start"
        self._buffer = ""
        self._begun = False  # whether a part has had its first character that is no newline

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """Add text; return the reasoning and the content that are final with it."""
        self._buffer += text
        if self._state == "start":
            found = self._buffer.lstrip()
            if THINK.startswith(found) and not last:
                return "", ""
            if found.startswith(THINK):
                self._state, self._buffer = "reasoning", found.removeprefix(THINK)
            else:
                self._state = "plain"
        reasoning = self._take_reasoning(last=last) if self._state == "reasoning" else ""
        content = ""
        if self._state in ("content", "plain"):
            content, self._buffer = self._buffer, ""
        return reasoning, self._without_first_newlines(content) if self._state == "content" else content

    def _take_reasoning(self, *, last: bool) -> str:
        text, mark, rest = self._buffer.partition(END_THINK)
        if mark:
            reasoning, self._buffer = text.rstrip("\n"), rest
        else:
            held = 0 if last else held_back(text, (END_THINK,))
            reasoning = text[: len(text) - held].rstrip("\n")
            self._buffer = text[len(reasoning) :]
        reasoning = self._without_first_newlines(reasoning)
        if mark:
            self._state, self._begun = "content", False
        return reasoning

    def _without_first_newlines(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = bool(text)
        return text


def reasoning_variables(effort: str) -> dict[str, Any]:
    """Return the variables of a chat template for a reasoning effort; `none` turns the reasoning off.

    They have no effect on a template that does not use them.
    """
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


class MessageParts:
    """Which parts the messages of a request have."""

    def __init__(self, tools: ToolUse, last_tokens: Sequence[str], *, reasons: bool, separate: bool) -> None:
        """last_tokens: texts of the last tokens of the prompt. reasons: the model may write a block of reasoning.

        separate: the reasoning is no part of the content.
        """
        tail = "".join(last_tokens).rstrip()
        self._tools = tools
        self._opened = reasons and tail.endswith(THINK)
        self._may_reason = reasons and not tail.endswith(END_THINK)
        self._separate = reasons and separate

    def behind_reasoning(self, grammar: Grammar) -> Grammar:
        """Return a grammar that constrains the content, not the reasoning before it."""
        if not self._may_reason:
            return grammar
        return structs.replace(grammar, reasoning="open" if self._opened else "possible")

    def parser(self) -> MessageParser:
        """Return the parser of one message."""
        tools = self._tools
        calls = None
        if tools.format is not None:
            calls = ToolCallParser(
                tools.format, enforced=tools.enforced, parallel=tools.parallel, parameters=tools.parameters
            )
        return MessageParser(ReasoningSplitter(opened=self._opened) if self._separate else None, calls)
