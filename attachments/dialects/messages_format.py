"""Responses of /v1/messages: whole, as the events of a stream, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from msgspec import Raw, Struct, structs

from attachments.dialects.messages_requests import MessagesRequest
from clotho.serving.chat_extension import MessageDelta
from clotho.serving.errors import ApiError, ErrorFormat
from clotho.serving.openai_responses import Chunk, WeightsVersions, last_chunk, server_sent, weights_versions
from clotho.serving.services import Tokenizer
from protocols.sampling import Completion
from protocols.step import WeightsReady

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]

ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""HTTP status -> type of the error, where it is not that of all statuses below 500, or of the others."""


class MessagesErrorDetail(Struct, frozen=True, kw_only=True):
    """One error. param, code: as in the OpenAI API, which Anthropic's lacks."""

    type: str
    message: str
    param: str | None
    code: str | None


class MessagesError(ErrorFormat, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The body of a response whose status is not 2xx, and the last event of a stream that failed."""

    event: ClassVar[str] = "error"
    error: MessagesErrorDetail

    @classmethod
    def of(cls, error: ApiError) -> Self:
        """Return the body for an error."""
        detail = error.body.error
        kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        found = MessagesErrorDetail(type=kind, message=detail.message, param=detail.param, code=detail.code)
        return cls(error=found)


class AnswerText(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of the model."""

    text: str = ""


class AnswerThinking(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of the model. signature: always empty, because the server verifies no reasoning."""

    thinking: str = ""
    signature: str = ""


class AnswerToolUse(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call by the model. input: the JSON object as the model wrote it; at the start of a stream empty."""

    id: str
    name: str
    input: Raw


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class TextDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """The next part of a text."""

    text: str


class ThinkingDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """The next part of reasoning."""

    thinking: str


class InputJsonDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """The next part of the JSON text of an input."""

    partial_json: str


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Token counts. No cache is billed."""

    input_tokens: int
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageObject(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the model, without a stop reason at the start of a stream.

    weights_version, system_fingerprint: of the policy when the request arrived. weights_versions: policy versions that
    sampled the first and the last token.
    """

    id: str
    model: str
    usage: MessageUsage
    system_fingerprint: str
    weights_version: int
    role: Literal["assistant"] = "assistant"
    content: tuple[AnswerBlock, ...] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    weights_versions: WeightsVersions | None = None


class StopDelta(Struct, frozen=True, kw_only=True):
    """Why a message has ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageStart(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    """The first event of a stream."""

    message: MessageObject


class Ping(Struct, frozen=True, kw_only=True, tag_field="type", tag="ping"):
    """An event without a meaning, which clients expect."""


class BlockStart(Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: AnswerBlock


class BlockDelta(Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class MessageEnd(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    """What the first event of a stream could not contain."""

    delta: StopDelta
    usage: MessageUsage
    weights_versions: WeightsVersions | None


class MessageStop(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


class MessagesBuilder:
    """Builds one message, or the events of its stream."""

    def __init__(self, request: MessagesRequest, tokenizer: Tokenizer, weights: WeightsReady) -> None:
        """weights: version of the request's model when the request arrived."""
        self.request, self.tokenizer = request, tokenizer
        self._parser = None if request.message_parser is None else request.message_parser()
        self._blocks, self._texts = list[AnswerBlock](), list[str]()
        self._events: list[bytes] = []
        self._created = MessageObject(
            id=f"msg_{request.request_id}",
            model=request.model.id,
            usage=MessageUsage(input_tokens=request.prompt_tokens),
            system_fingerprint=weights.fingerprint,
            weights_version=weights.version,
        )

    def whole(self, results: Sequence[Sequence[Completion]]) -> MessageObject:
        """Return the whole message."""
        ((completion,),) = results
        self._push(last_chunk(completion, 0, completion.text))
        return self._ended(completion)

    def streamed(self, chunk: Chunk, *, opening: bool) -> bytes:
        """Return the events of a chunk; empty if nothing is final with it."""
        if opening:
            self._emit(MessageStart(message=self._created))
            self._emit(Ping())
        self._push(chunk)
        return self._taken()

    def ending(self, completions: Sequence[Completion]) -> bytes:
        """Return the last events of a stream."""
        message = self._ended(completions[0])
        delta = StopDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        self._emit(MessageEnd(delta=delta, usage=message.usage, weights_versions=message.weights_versions))
        self._emit(MessageStop())
        return self._taken()

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        self._emit(MessagesError.of(error))
        return self._taken()

    def _push(self, chunk: Chunk) -> None:
        last = chunk.finish_reason is not None
        delta = MessageDelta(content=chunk.text)
        if self._parser is not None:
            delta = self._parser.push(chunk.text, last=last)
        if delta.reasoning:
            self._require(AnswerThinking())
            self._write(delta.reasoning, ThinkingDelta(thinking=delta.reasoning))
        if delta.content:
            self._require(AnswerText())
            self._write(delta.content, TextDelta(text=delta.content))
        for call in delta.calls:
            if call.id is not None:
                self._begin(AnswerToolUse(id=call.id, name=call.name or "", input=Raw(b"{}")))
            if call.arguments:
                self._write(call.arguments, InputJsonDelta(partial_json=call.arguments))
        if last:
            if not self._blocks:
                self._begin(AnswerText())
            self._close(complete=chunk.finish_reason == "stop")

    def _require(self, block: AnswerBlock) -> None:
        """Begin a block, unless the one that is being written is of its kind."""
        if not (self._blocks and isinstance(self._blocks[-1], type(block))):
            self._begin(block)

    def _begin(self, block: AnswerBlock) -> None:
        if self._blocks:
            self._close(complete=True)
        self._blocks.append(block)
        self._emit(BlockStart(index=len(self._blocks) - 1, content_block=block))

    def _write(self, text: str, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> None:
        self._texts.append(text)
        self._emit(BlockDelta(index=len(self._blocks) - 1, delta=delta))

    def _close(self, *, complete: bool) -> None:
        """End the block that is being written. A call that is cut is no part of the whole message."""
        self._emit(BlockStop(index=len(self._blocks) - 1))
        text, self._texts = "".join(self._texts), []
        match block := self._blocks.pop():
            case AnswerText():
                self._blocks.append(structs.replace(block, text=text))
            case AnswerThinking():
                self._blocks.append(structs.replace(block, thinking=text))
            case AnswerToolUse() if complete:
                self._blocks.append(structs.replace(block, input=Raw((text or "{}").encode())))

    def _ended(self, completion: Completion) -> MessageObject:
        stop = completion.stop_reason
        matched = stop if completion.finish_reason == "stop" and isinstance(stop, str) else None
        return structs.replace(
            self._created,
            content=tuple(self._blocks),
            stop_reason=self._stop_reason(completion, matched),
            stop_sequence=matched,
            usage=structs.replace(self._created.usage, output_tokens=len(completion.tokens)),
            weights_versions=weights_versions(completion.versions),
        )

    def _stop_reason(self, completion: Completion, matched: str | None) -> StopReason:
        if completion.finish_reason == "length":
            room = self.request.samples[0].sampling.max_tokens
            is_full = room < self.request.max_tokens and len(completion.tokens) == room
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if completion.finish_reason != "stop":
            return "pause_turn"  # aborted by a client of the control routes
        if self._parser is not None and self._parser.has_calls:
            return "tool_use"
        return "end_turn" if matched is None else "stop_sequence"

    def _emit(self, event: Struct) -> None:
        self._events.append(server_sent(event, str(event.__struct_config__.tag)))

    def _taken(self) -> bytes:
        taken, self._events = b"".join(self._events), []
        return taken
