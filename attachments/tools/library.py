"""What `tools` adds to the library: tool calls, structured outputs and reasoning in requests, and their grammars."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clotho.serving.parts import ServerParts
    from protocols.constraints import Constraint, Grammar
    from training_run.episodes.conversations import ReadMessage, Tools


def grammar_compiler(
    tokenizer: Any, end_tokens: Collection[int], vocabulary: int
) -> Callable[[Grammar], Constraint] | None:
    """Return a compiler of llguidance. Raises ValueError."""
    from attachments.tools.constraints import GrammarCompiler  # takes 50 ms to import and 1 s to construct

    return GrammarCompiler(tokenizer, end_tokens, vocabulary).compile


def message_reader(template: str, tools: Tools) -> ReadMessage | None:
    """Return what reads reasoning and calls of tools."""
    from attachments.tools.message_reader import message_reader

    return message_reader(template, tools)


def server(parts: ServerParts) -> None:
    """Serve the fields of tools, grammars and reasoning."""
    parts.chat = "attachments.tools.chat:ToolChat"
