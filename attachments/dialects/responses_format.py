"""Responses of /v1/responses, whole or as the events of a stream, which end with the whole response."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, structs

from attachments.dialects.responses_requests import (
    NamedFunction,
    ReasoningOptions,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
)
from clotho.serving.chat_extension import MessageDelta
from clotho.serving.errors import ApiError
from clotho.serving.openai_responses import (
    Chunk,
    TokenLogprob,
    WeightsVersions,
    chat_logprobs,
    last_chunk,
    server_sent,
    weights_versions,
)
from clotho.serving.services import Tokenizer
from protocols.sampling import Completion
from protocols.step import WeightsReady

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message. logprobs: of all tokens of the completion, if the request includes them."""

    text: str
    annotations: tuple[()] = ()
    logprobs: Sequence[TokenLogprob] = ()


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...] = ()


class OutputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model."""

    id: str
    status: Status = "in_progress"
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...] = ()


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. call_id: names the call in the item with its result."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall


class TextConfig(Struct, frozen=True, kw_only=True):
    """The format of messages."""

    format: TextFormat


class Incomplete(Struct, frozen=True, kw_only=True):
    """Why a response is incomplete: `max_output_tokens`, or `abort` by a client of the control routes."""

    reason: str


class ResponseFailure(Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    """Tokens of the input that were read from, or written to, a cache that is billed: none."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    """Tokens of the reasoning, its marks included."""

    reasoning_tokens: int


class ResponsesUsage(Struct, frozen=True, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails
    input_tokens_details: InputTokensDetails = InputTokensDetails()


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response. Fields of the request are repeated; `temperature` and `top_p` are those that apply.

    weights_version, system_fingerprint: of the policy when the request arrived. weights_versions: policy versions that
    sampled the first and the last token.
    """

    id: str
    created_at: int
    model: str
    status: Status
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningOptions
    temperature: float
    text: TextConfig
    tool_choice: str | NamedFunction
    tools: Sequence[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: str
    system_fingerprint: str
    weights_version: int
    object: Literal["response"] = "response"
    output: Sequence[OutputItem] = ()
    usage: ResponsesUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    weights_versions: WeightsVersions | None = None
    background: bool = False
    previous_response_id: None = None
    store: bool = False


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """One event of a stream. The type says which of the other fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: Sequence[TokenLogprob] | UnsetType = UNSET


class _OpenItem:
    """The item of the output that is being written."""

    def __init__(self, item: OutputItem, index: int) -> None:
        self.item, self.index = item, index
        self.texts, self.logprobs = list[str](), list[TokenLogprob]()

    def part(self) -> OutputText | ReasoningText | None:
        """Return the content so far; None for a call, which has arguments."""
        text = "".join(self.texts)
        if isinstance(self.item, OutputMessage):
            return OutputText(text=text, logprobs=tuple(self.logprobs))
        return ReasoningText(text=text) if isinstance(self.item, OutputReasoning) else None

    def ended(self, status: Status) -> OutputItem:
        """Return the item with its content."""
        if isinstance(self.item, OutputCall):
            return structs.replace(self.item, status=status, arguments="".join(self.texts))
        return structs.replace(self.item, status=status, content=(self.part(),))


TEXT_EVENTS: dict[type[OutputItem], str] = {
    OutputMessage: "response.output_text",
    OutputReasoning: "response.reasoning_text",
    OutputCall: "response.function_call_arguments",
}
"""The events of the text of an item, without `.delta` and `.done`."""


class ResponsesBuilder:
    """Builds one response, or the events of its stream."""

    def __init__(self, request: ResponsesRequest, tokenizer: Tokenizer, weights: WeightsReady) -> None:
        """weights: version of the request's model when the request arrived."""
        self.request, self.tokenizer = request, tokenizer
        self._parser = None if request.message_parser is None else request.message_parser()
        self._open: _OpenItem | None = None
        self._output: list[OutputItem] = []
        self._logprobs: list[TokenLogprob] = []
        self._events: list[bytes] = []
        self._sent = 0
        self._created = self._first(weights)

    def _first(self, weights: WeightsReady) -> ResponseObject:
        """Return the response before the first token."""
        request, fields = self.request, self.request.fields
        sampling = request.samples[0].sampling
        return ResponseObject(
            id=f"resp_{request.request_id}",
            created_at=int(time.time()),
            model=request.model.id,
            status="in_progress",
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            metadata=fields.metadata or {},
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            reasoning=fields.reasoning or ReasoningOptions(),
            temperature=sampling.temperature,
            text=TextConfig(format=(fields.text.format if fields.text else None) or TextFormat(type="text")),
            tool_choice=fields.tool_choice or "auto",
            tools=fields.tools or (),
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=fields.truncation or "disabled",
            system_fingerprint=weights.fingerprint,
            weights_version=weights.version,
        )

    def whole(self, results: Sequence[Sequence[Completion]]) -> ResponseObject:
        """Return the whole response."""
        ((completion,),) = results
        self._push(last_chunk(completion, 0, completion.text))
        return self._ended(completion)

    def streamed(self, chunk: Chunk, *, opening: bool) -> bytes:
        """Return the events of a chunk; empty if nothing is final with it."""
        if opening:
            self._emit("response.created", response=self._created)
            self._emit("response.in_progress", response=self._created)
        self._push(chunk)
        return self._taken()

    def ending(self, completions: Sequence[Completion]) -> bytes:
        """Return the last event of a stream."""
        response = self._ended(completions[0])
        self._emit(f"response.{response.status}", response=response)
        return self._taken()

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        detail = error.body.error
        reason = ResponseFailure(code=detail.code or "server_error", message=detail.message)
        failed = structs.replace(self._created, status="failed", error=reason, output=tuple(self._output))
        self._emit("response.failed", response=failed)
        return self._taken()

    def _push(self, chunk: Chunk) -> None:
        last = chunk.finish_reason is not None
        if self.request.top_logprobs is not None:
            self._logprobs += chat_logprobs(chunk.tokens, chunk.logprobs, chunk.top_logprobs, self.tokenizer).content
        delta = MessageDelta(content=chunk.text)
        if self._parser is not None:
            delta = self._parser.push(chunk.text, last=last)
        if delta.reasoning:
            self._write(self._opened(OutputReasoning), delta.reasoning)
        if delta.content:
            self._write(self._opened(OutputMessage), delta.content)
        for call in delta.calls:
            if call.id is not None:
                self._begin(OutputCall(id=_new_id("fc"), call_id=call.id, name=call.name or ""))
            if call.arguments:
                self._write(self._opened(OutputCall), call.arguments)
        if last:
            if self._open is None:
                self._begin(OutputMessage(id=_new_id("msg")))
            self._close("completed" if chunk.finish_reason == "stop" else "incomplete")

    def _opened(self, kind: type[OutputItem]) -> _OpenItem:
        """Return the item that is being written; begin one if it is not of this kind."""
        if self._open is not None and isinstance(self._open.item, kind):
            return self._open
        return self._begin(
            OutputMessage(id=_new_id("msg")) if kind is OutputMessage else OutputReasoning(id=_new_id("rs"))
        )

    def _begin(self, item: OutputItem) -> _OpenItem:
        self._close("completed")
        self._open = begun = _OpenItem(item, len(self._output))
        self._emit("response.output_item.added", output_index=begun.index, item=item)
        if (part := begun.part()) is not None:
            self._emit_of(begun, "response.content_part.added", part=part)
        return begun

    def _write(self, opened: _OpenItem, text: str) -> None:
        opened.texts.append(text)
        added: dict[str, Any] = {}
        if isinstance(opened.item, OutputMessage):
            added = {"logprobs": tuple(self._logprobs)}
            opened.logprobs += self._logprobs
            self._logprobs = []
        self._emit_of(opened, f"{TEXT_EVENTS[type(opened.item)]}.delta", delta=text, **added)

    def _close(self, status: Status) -> None:
        """End the item that is being written, if there is one."""
        if self._open is None:
            return
        closed, self._open = self._open, None
        item, name = closed.ended(status), f"{TEXT_EVENTS[type(closed.item)]}.done"
        match part := closed.part():
            case OutputText():
                self._emit_of(closed, name, text=part.text, logprobs=part.logprobs)
            case ReasoningText():
                self._emit_of(closed, name, text=part.text)
            case None:
                self._emit_of(closed, name, arguments="".join(closed.texts))
        if part is not None:
            self._emit_of(closed, "response.content_part.done", part=part)
        self._emit("response.output_item.done", output_index=closed.index, item=item)
        self._output.append(item)

    def _ended(self, completion: Completion) -> ResponseObject:
        """Return the response with its output. A call that is cut is no part of it."""
        complete = completion.finish_reason == "stop"
        reason = "max_output_tokens" if completion.finish_reason == "length" else completion.finish_reason
        output = [item for item in self._output if not (isinstance(item, OutputCall) and item.status == "incomplete")]
        prompt, sampled = self.request.prompt_tokens, len(completion.tokens)
        return structs.replace(
            self._created,
            status="completed" if complete else "incomplete",
            incomplete_details=None if complete else Incomplete(reason=reason),
            output=tuple(output),
            usage=ResponsesUsage(
                input_tokens=prompt,
                output_tokens=sampled,
                total_tokens=prompt + sampled,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reasoning_tokens(completion)),
            ),
            weights_versions=weights_versions(completion.versions),
        )

    def _reasoning_tokens(self, completion: Completion) -> int:
        """Return the number of tokens up to the end of the reasoning."""
        if self._parser is None or not any(isinstance(item, OutputReasoning) for item in self._output):
            return 0
        tail, end = "", self._parser.end_of_reasoning
        for count, token in enumerate(completion.tokens, 1):
            tail += self.tokenizer.token_text(token)
            if end in tail:
                return count
            tail = tail[-len(end) :]
        return len(completion.tokens)

    def _emit_of(self, opened: _OpenItem, name: str, **fields: Any) -> None:
        """Add an event about the text of an item."""
        if not isinstance(opened.item, OutputCall):
            fields["content_index"] = 0
        self._emit(name, output_index=opened.index, item_id=opened.item.id, **fields)

    def _emit(self, name: str, **fields: Any) -> None:
        event = ResponseEvent(type=name, sequence_number=self._sent, **fields)
        self._events.append(server_sent(event, name))
        self._sent += 1

    def _taken(self) -> bytes:
        taken, self._events = b"".join(self._events), []
        return taken


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
