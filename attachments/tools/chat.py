"""The fields of a chat request that concern tools, grammars and reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec import structs

from attachments.tools.reasoning import END_THINK, PROMPT_TAIL, MessageParts, reasoning_variables
from attachments.tools.sections import REASONING_PARSER, TOOL_PARSER
from attachments.tools.structured_outputs import requested_grammar
from attachments.tools.tool_calls import NO_TOOLS, ToolUse, definition, message_fields
from attachments.tools.tool_grammars import use_tools
from clotho.serving.chat_extension import ChatExtension, Conversation, ValidatedRequest
from clotho.serving.openai_fields import ChatRequest, ConstraintFields, ContentPart, Message, Tool
from clotho.serving.openai_requests import encode_plain
from clotho.serving.services import ServerContext
from protocols.constraints import Grammar


class ToolChat(ChatExtension):
    """Tools, structured outputs and reasoning."""

    def conversation(self, fields: ChatRequest, context: ServerContext) -> Conversation:
        """Return the conversation of a request. Raises ApiError."""
        tools, messages, rest = NO_TOOLS, fields.messages, fields
        if fields.tools or fields.tool_choice not in (None, "none", "auto"):
            tools = use_tools(
                fields.tools or [],
                fields.tool_choice,
                parallel=fields.parallel_tool_calls is not False,
                template=context.tokenizer.chat_template,
                setting=TOOL_PARSER.of(context.settings),
                encode=lambda mark: encode_plain(mark, "tools", context),
                output=fields.response_format,
            )
            if tools.enforced and not tools.rendered:
                messages = tools_as_text(fields.messages, fields.tools or [])
            if tools.grammars:  # they contain the format of completions without calls
                rest = structs.replace(fields, response_format=None)
        effort = fields.reasoning_effort
        return Conversation(
            fields=rest,
            messages=messages,
            tools=tools.rendered,
            variables={} if effort is None else reasoning_variables(effort),
            grammars=tools.grammars,
            finished=partial(_with_parts, tools, context, fields.separate_reasoning),
        )

    def message_fields(self, message: Message, index: int, template: str) -> dict[str, Any]:
        """Return the fields of a message beside role and content, as chat templates read them. Raises ApiError."""
        return message_fields(message, index, template)

    def grammar(self, fields: ConstraintFields, others: Sequence[Grammar]) -> Grammar | None:
        """Return the grammar that a request names; None if it names none. Raises ApiError if it names several."""
        return requested_grammar(fields, others)


def _with_parts(
    tools: ToolUse, context: ServerContext, separate: bool | None, request: ValidatedRequest
) -> ValidatedRequest:
    """Add the parser of reasoning and tool calls to a request, and permit reasoning before a constrained content."""
    reasons = REASONING_PARSER.of(context.settings) != "off" and END_THINK in context.tokenizer.chat_template
    if not reasons and tools.format is None:
        return request
    tail = [context.tokenizer.token_text(token) for token in request.prompts[0][-PROMPT_TAIL:]]
    parts = MessageParts(tools, tail, reasons=reasons, separate=separate is not False)
    samples = tuple(
        structs.replace(sample, special_tokens=sample.special_tokens or tools.format is not None)
        for sample in request.samples
    )
    grammar = parts.behind_reasoning(request.grammar) if request.grammar is not None else None
    return structs.replace(request, samples=samples, grammar=grammar, message_parser=parts.parser)


def tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a conversation that describes the tools, and contains earlier calls and their results, as text."""
    functions = "\n".join(json.dumps(definition(tool)["function"], ensure_ascii=False) for tool in tools)
    form = _call("NAME", "{...}")
    described = f"Answer with calls of these functions, each in this form:\n{form}\n<tools>\n{functions}\n</tools>"
    first = messages[0]
    if first.role in ("system", "developer"):
        return [_between("", first, f"\n\n{described}"), *map(_as_text, messages[1:])]
    return [Message(role="system", content=described), *map(_as_text, messages)]


def _as_text(message: Message) -> Message:
    if message.role == "tool":
        result = Message(role="user", content=message.content)
        return _between("<tool_response>\n", result, "\n</tool_response>")
    if message.tool_calls:
        calls = [_call(json.dumps(call.function.name), call.function.arguments) for call in message.tool_calls]
        return _between(
            "", structs.replace(message, tool_calls=None), "\n".join(["", *calls] if message.content else calls)
        )
    return message


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _between(before: str, message: Message, after: str) -> Message:
    """Return a message with text before and after its content."""
    content = message.content or []
    parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content
    added = [ContentPart(type="text", text=text) for text in (before, after)]
    return structs.replace(message, content=[added[0], *parts, added[1]])
