"""What `tools` adds to the library: tool calls, structured outputs and reasoning in requests, and their grammars."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clotho.extension import Extension, ReadMessage

if TYPE_CHECKING:
    from clotho.serving.parts import ServerParts
    from protocols.constraints import Constraint, Grammar


class Tools(Extension):
    """Fields of requests, without routes."""

    def grammar_compiler(
        self, tokenizer: Any, end_tokens: Collection[int], vocabulary: int
    ) -> Callable[[Grammar], Constraint]:
        """Return a compiler of llguidance. Raises ValueError."""
        from attachments.tools.constraints import GrammarCompiler  # takes 50 ms to import and 1 s to construct

        return GrammarCompiler(tokenizer, end_tokens, vocabulary).compile

    def message_reader(self, template: str, tools: Sequence[Mapping[str, Any]]) -> ReadMessage:
        """Return what reads reasoning and calls of tools."""
        from attachments.tools.message_reader import message_reader

        return message_reader(template, tools)

    def server(self, parts: ServerParts) -> None:
        """Serve the fields of tools, grammars and reasoning."""
        parts.chat = "attachments.tools.chat:ToolChat"


EXTENSION = Tools()
