"""The settings of tool calls and reasoning in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from clotho.settings.bounds import about
from clotho.settings.mounted import Setting

ToolParserName = Literal["auto", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral"]
ReasoningParserName = Literal["auto", "off"]

TOOL_PARSER = Setting[ToolParserName](
    path="server.tool_parser",
    kind=Annotated[ToolParserName, about("Format of tool calls; auto: from the chat template.")],
    default="auto",
    attachment="tools",
)
REASONING_PARSER = Setting[ReasoningParserName](
    path="server.reasoning_parser",
    kind=Annotated[
        ReasoningParserName, about("Separation of <think> blocks from the content of a message: auto or off.")
    ],
    default="auto",
    attachment="tools",
)

SETTINGS = (TOOL_PARSER, REASONING_PARSER)
