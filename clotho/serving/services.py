"""Everything that the routes use from the rest of the program, and the sampler of one client."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct, structs
from starlette.requests import Request

from clotho.lanes.sampling_client import EngineSampler, Submit
from clotho.serving.auth import Client, Reservation
from clotho.serving.errors import ApiError
from clotho.settings.server import HttpServer
from protocols.constraints import Constraint, Grammar
from protocols.errors import visible
from protocols.finding import Finding
from protocols.sampling import POLICY, Completion, CompletionDone, PromptLogprobs, SampleRequest, Sampling, TokenSampled
from protocols.step import WeightsReady

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from clotho.sampler import BaseAccess, ReplaceablePolicy


class Tokenizer(Protocol):
    """The part of `ChatTokenizer` that the server uses, possibly from several threads at once."""

    @property
    def longest_token_bytes(self) -> int:
        """Maximum number of bytes of text that one token stands for."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token IDs of a text, with the special tokens that the tokenizer adds, such as a first one."""

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, without special tokens unless they are requested."""

    @property
    def chat_template(self) -> str:
        """The source of the chat template; empty if there is none."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of special tokens by name, such as `eos_token`, without those that the tokenizer lacks."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> tuple[int, ...]:
        """Apply the chat template and return the token IDs. variables: further names that the template may use.

        continue_final_message: end with the content of the last message, so that the completion continues it.
        """

    def token_text(self, token: int, /) -> str:
        """Return the text of one token."""

    def compile_grammar(self, grammar: Grammar, vocabulary: int, /) -> Constraint:
        """Compile a grammar for logits of the width `vocabulary`. Raises RequestError if it is not usable."""


class Recording(Struct, frozen=True, kw_only=True):
    """What becomes of the completions of one HTTP request.

    remember: takes each finished completion, before the client receives it. headers: of the answer. samples: replace
    those of the HTTP request, with prompts of the same text; empty: nothing is replaced.
    """

    remember: Callable[[SampleRequest, Completion], None]
    headers: Mapping[str, str] = {}
    samples: tuple[SampleRequest, ...] = ()


class SampleRecorder(Protocol):
    """Records what clients have sampled, such as the sample log of Atropos."""

    async def begin(self, http: Request, samples: Sequence[SampleRequest], /) -> Recording:
        """Begin to record a validated HTTP request, which will sample `samples`. Raises ApiError to refuse it."""


class NullSampleLog:
    """A `SampleRecorder` that records nothing."""

    async def begin(self, _: Request, __: Sequence[SampleRequest], /) -> Recording:
        """Record nothing."""
        return Recording(remember=lambda request, completion: None)


class ServedEngine(Protocol):
    """The part of `DecodeEngine` that clients can control, in the decode thread only."""

    held: Literal["nothing", "admission", "everything"]

    @property
    def running(self) -> int:
        """Number of rows in the batch."""

    def abort_clients(self, request_ids: Collection[str] | None, /, client: str = "") -> int:
        """Abort requests of clients by their names; None: all. client: only those of this client; empty: of all."""

    def release_caches(self) -> None:
        """Free the prefix cache and unused memory."""


class EngineAccess(Struct, frozen=True, kw_only=True, eq=False):
    """The engine, for attachments that control it. submit: to its thread. may_pause: whatever the settings are."""

    submit: Submit
    engine: ServedEngine
    may_pause: bool = False


class HealthReport(Struct, frozen=True, kw_only=True):
    """The state of the program. Any status but `ok` and `paused`, by a client, is reported with HTTP status 503.

    children: supervised child -> state. progress_seconds: seconds since the compute threads last made progress.
    findings: problems of the training that are no outage.
    """

    status: Literal["ok", "paused", "stalled", "restarting", "failed"]
    detail: str = ""
    children: dict[str, str] = {}
    progress_seconds: float = 0.0
    findings: tuple[Finding, ...] = ()


class Health(Struct, frozen=True, kw_only=True):
    """The body of the response of GET /health."""

    status: str
    detail: str
    model: str
    weights_version: int
    step: int
    fingerprint: str
    progress_seconds: float
    children: dict[str, str]
    findings: tuple[Finding, ...]


class Version(Struct, frozen=True, kw_only=True):
    """The body of the response of GET /version."""

    version: str


class ServedModel(Struct, frozen=True, kw_only=True):
    """One model that requests can name: the policy, the base model, or an adapter.

    id: its name in responses. aliases: further names that requests may use. parent: id of the base model of an adapter
    or of a policy; None for a base model. root: origin of the weights, as the operator wrote it. weights: returns the
    version that serves now. source: value of `SampleRequest.weights`.
    """

    id: str
    aliases: frozenset[str] = frozenset()
    parent: str | None = None
    root: str
    weights: Callable[[], WeightsReady]
    source: str = POLICY


def no_metrics(timed_out: Mapping[str, int]) -> Iterable[Metric]:
    """Measure nothing."""
    return ()


class ServerContext(Struct, frozen=True, kw_only=True):
    """The server's interface to the rest of the program.

    models: the models that requests can name; the first one serves requests without a name. A name is looked up here
    and nowhere else: it never becomes a path or the name of a repository.
    sampling: defaults for fields that a request does not set. weights: returns the policy version that serves now.
    prompt_logprobs: (tokens, top, source) -> log-probabilities of a prompt with `top` alternatives per token; can be
    cancelled. context_length: maximum number of prompt and completion tokens. measure: yields metrics of what is served
    for /metrics; its argument has the requests that exceeded a limit on time before they were admitted, by limit.
    sample_log: records completions of clients. record_supports: request the support of the sampling distribution if
    top-k limits its size. record_routes: request the experts of every token. chat: `module:name` of the `ChatExtension`
    that serves the fields of tools, grammars and reasoning. engine: None: clients do not control it. base_model: id of
    the base model of adapters. replaceable: the policy whose weights a training run of another process may replace;
    None: nobody replaces them. base: what adapters can be trained on; None: this server serves a policy. run_directory:
    of the training run that the server shows; None: there is none.
    """

    sampler: EngineSampler
    tokenizer: Tokenizer
    settings: HttpServer
    sampling: Sampling
    prompt_logprobs: Callable[[tuple[int, ...], int, str], Awaitable[PromptLogprobs]]
    weights: Callable[[], WeightsReady]
    models: Callable[[], Sequence[ServedModel]]
    health: Callable[[], HealthReport]
    context_length: int
    vocab_size: int
    measure: Callable[[Mapping[str, int]], Iterable[Metric]] = no_metrics
    sample_log: SampleRecorder = NullSampleLog()
    record_supports: bool = False
    record_routes: bool = False
    chat: str = "clotho.serving.chat_extension:ChatExtension"
    engine: EngineAccess | None = None
    base_model: str = ""
    replaceable: ReplaceablePolicy | None = None
    base: BaseAccess | None = None
    run_directory: Path | None = None


class ClientSampler:
    """The sampler of one client.

    Names the client and the limits on time in every request, except rollouts. Reserves the tokens of the requests in
    the quota of the client. Records every completion before the client receives it, except completions of rollouts,
    which the training run records itself. headers: of the answer, from what records it.
    """

    def __init__(self, context: ServerContext, client: Client, recording: Recording) -> None:
        self._sampler, self._recording = context.sampler, recording
        self._settings, self._client = context.settings, client
        self.headers = recording.headers

    async def complete_all(self, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """Complete every request. Cancellation aborts every request, and no completion is recorded."""
        with self._reserved(requests) as reservation:
            results = await self._sampler.complete_all(self._limited(requests))
            for request, completions in zip(requests, results, strict=True):
                for completion in completions:
                    self._finished(request, completion, reservation)
        return results

    def _reserved(self, requests: Sequence[SampleRequest]) -> AbstractContextManager[Reservation]:
        return self._client.reserved(sum(request.most_tokens for request in requests))

    def _limited(self, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
        """Return the requests with the name of the client and the limits on their time."""
        settings, client = self._settings, self._client
        wait = settings.max_queue_seconds
        if wait:
            wait = max(SHORTEST_WAIT, wait - (time.monotonic() - client.arrived))
        return [
            request
            if request.background
            else structs.replace(
                request, client=client.name, wait_seconds=wait, answer_seconds=settings.max_answer_seconds
            )
            for request in requests
        ]

    def _finished(self, request: SampleRequest, completion: Completion, reservation: Reservation) -> None:
        if not request.background:
            self._recording.remember(request, completion)
        reservation.unused += request.sampling.max_tokens - len(completion.tokens)

    async def stream_all(
        self, requests: Sequence[SampleRequest]
    ) -> AsyncGenerator[list[tuple[int, TokenSampled | CompletionDone]], None]:
        """Yield batches of events, each with the index of its request; closing the generator aborts the requests."""
        with self._reserved(requests) as reservation:
            async with aclosing(self._sampler.stream_all(self._limited(requests))) as batches:
                async for batch in batches:
                    for position, event in batch:
                        if isinstance(event, CompletionDone):
                            self._finished(requests[position], event.completion, reservation)
                    yield batch


SHORTEST_WAIT = 0.001
"""Time in seconds that a request may at least wait for its admission to the engine."""

MAX_LISTED_MODELS = 8
"""Maximum number of names that the refusal of an unknown model lists."""


def find_served(name: str | None, context: ServerContext) -> ServedModel:
    """Return the model that a request names; without a name, the first one. Raises ApiError with status 404."""
    models = context.models()
    for model in models:
        if name is None or name == model.id or name in model.aliases:
            return model
    known = ", ".join(repr(model.id) for model in models[:MAX_LISTED_MODELS])
    message = f"The model '{visible(name or '', 200)}' does not exist; use one of {known}."
    raise ApiError(404, message, param="model", code="model_not_found")
