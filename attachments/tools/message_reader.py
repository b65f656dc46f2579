"""The message in a whole text that a model has sampled, for conversations that no HTTP client leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.tools.reasoning import END_THINK, MessageParts
from attachments.tools.tool_calls import NO_TOOLS, ToolUse
from attachments.tools.tool_grammars import tool_format
from clotho.serving.chat_extension import MessageDelta
from clotho.serving.errors import ApiError

if TYPE_CHECKING:
    from training_run.episodes.conversations import ReadMessage, Tools


def message_reader(template: str, tools: Tools) -> ReadMessage:
    """Return what reads the messages of a model with this chat template. Raises ValueError for an unknown form."""
    use = NO_TOOLS
    if tools:
        try:
            found = tool_format(template, "auto")
        except ApiError as error:
            raise ValueError(str(error)) from error
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        properties = {name: one.get("parameters", {}).get("properties", {}) for name, one in functions.items()}
        use = ToolUse(rendered=[], format=found, parameters=properties)

    def read(prompt_end: str, text: str) -> MessageDelta:
        """Return the parts of a whole text."""
        parts = MessageParts(use, [prompt_end], reasons=END_THINK in template, separate=True)
        return parts.parser().push(text, last=True)

    return read
