"""What an attachment makes of the fields of tools, grammars and reasoning; without one, they are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from msgspec import Struct

from clotho.extension import needs, provided
from clotho.serving.errors import invalid_field
from clotho.serving.openai_fields import ChatRequest, ConstraintFields, Message
from clotho.serving.services import ServedModel
from protocols.constraints import Grammar
from protocols.sampling import SampleRequest

if TYPE_CHECKING:
    from clotho.serving.services import ServerContext


Prompt = tuple[int, ...]


class CallDelta(Struct, frozen=True, kw_only=True):
    """The new part of call `index`: its id and name in the first part, and text of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class MessageDelta(Struct, frozen=True, kw_only=True):
    """New parts of a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class MessageParser(Protocol):
    """The parser of the text of one message. end_of_reasoning: the text behind its reasoning."""

    @property
    def end_of_reasoning(self) -> str:
        """The text behind the reasoning."""

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""

    def push(self, text: str, /, *, last: bool) -> MessageDelta:
        """Add text; return the parts that are final with it. last: the completion ends with this text."""


class ValidatedRequest(Struct, frozen=True, kw_only=True):
    """A validated request: one `SampleRequest` per prompt, with `n` completions each.

    model: the model that the request names. samples: empty if nothing is sampled. top_logprobs: alternatives to return
    per token; None: return no log-probabilities. echo: the text of each prompt, to be repeated; empty: not repeated.
    prompt_logprobs: alternatives to return per prompt token; None: return no log-probabilities of prompts.
    request_id: name under which the request can be aborted. grammar: constrains every completion; not compiled yet.
    message_parser: makes the parser of reasoning and tool calls of one completion.
    """

    model: ServedModel
    prompts: tuple[Prompt, ...]
    samples: tuple[SampleRequest, ...]
    n: int
    top_logprobs: int | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_tokens_as_token_ids: bool = False
    echo: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    request_id: str = ""
    grammar: Grammar | None = None
    message_parser: Callable[[], MessageParser] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts; each prompt counts once."""
        return sum(map(len, self.prompts))

    @property
    def scored_alternatives(self) -> int | None:
        """Number of alternatives for which the prompts are scored; None: they are not scored."""
        shown = [self.prompt_logprobs, self.top_logprobs if self.echo else None]
        return max((count for count in shown if count is not None), default=None)


class Conversation(Struct, frozen=True, kw_only=True):
    """A conversation as it is rendered, and what its answer needs.

    fields: of the request, without those that `grammars` contain. messages, tools, variables: for the chat template.
    grammars: those of the completions. finished: completes the validated request.
    """

    fields: ChatRequest
    messages: list[Message]
    tools: Sequence[dict[str, Any]] = ()
    variables: dict[str, Any] = {}
    grammars: tuple[Grammar, ...] = ()
    finished: Callable[[ValidatedRequest], ValidatedRequest] = lambda request: request


class ChatExtension:
    """What becomes of tools, grammars and reasoning; this one refuses them. Thread-safe."""

    def conversation(self, fields: ChatRequest, _: ServerContext) -> Conversation:
        """Return the conversation of a request. Raises ApiError."""
        if fields.tools:
            _refuse("tools")
        if fields.tool_choice not in (None, "none", "auto"):
            _refuse("tool_choice")
        for name in ("reasoning_effort", "separate_reasoning"):
            if getattr(fields, name) is not None:
                _refuse(name)
        return Conversation(fields=fields, messages=fields.messages)

    def message_fields(self, _: Message, index: int, __: str) -> dict[str, Any]:
        """Return the fields of a message of, or about, tools or reasoning, as the chat template reads them.

        Called with the message, its index, and the source of the template. Raises ApiError.
        """
        raise invalid_field("messages", f"message {index} has fields of tools or reasoning: {needs('tools')}")

    def grammar(self, fields: ConstraintFields, others: Sequence[Grammar]) -> Grammar | None:
        """Return the grammar of a request that has constraints. others: those of further fields. Raises ApiError."""
        set_fields = (name for name in ConstraintFields.__struct_fields__ if getattr(fields, name) is not None)
        _refuse(next((one.param for one in others), None) or next(set_fields))


def chat_extension(context: ServerContext) -> ChatExtension:
    """Return what serves the fields of tools, grammars and reasoning of a server."""
    found: ChatExtension = provided(context.chat)()
    return found


def _refuse(param: str) -> NoReturn:
    raise invalid_field(param, needs("tools"))
