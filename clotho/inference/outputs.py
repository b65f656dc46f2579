"""From the tokens of a step to events: which completions end, why, and what listeners receive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from time import perf_counter

import numpy as np
import structlog

from clotho.inference.batch import Batch, StepOutput
from clotho.inference.rows import RouteArray
from clotho.inference.scheduler import ActiveRequest, Row
from clotho.lanes.arbiter import Tally
from clotho.models.tokenizer import ChatTokenizer
from protocols.compute import Distribution
from protocols.errors import RequestError
from protocols.sampling import (
    Completion,
    CompletionDone,
    ExpertRoutes,
    FinishReason,
    SampleEvent,
    SampleFailed,
    TokenSampled,
)

log = structlog.get_logger(__name__)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BOUNDS: dict[str, tuple[float, ...]] = {
    "iteration_tokens_total": (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096),
    "inter_token_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
}
"""Upper bounds of the buckets of each distribution, by name."""


class Timings:
    """Durations of requests and steps, named as vLLM's metrics; requests in the background count in steps only."""

    def __init__(self) -> None:
        self._tallies = {name: Tally(bounds) for name, bounds in BOUNDS.items()}
        self._last_step: dict[object, float] = {}

    def step(self, batch: object, rows: int, tokens: int, *, more: bool) -> None:
        """Record a decode step of a batch. more: rows remain in it, so that the next step follows this one."""
        now = perf_counter()
        self._tallies["iteration_tokens_total"].add(tokens)
        last = self._last_step.pop(batch, None)
        if last is not None:
            self._tallies["inter_token_latency_seconds"].add(now - last, rows)
        if more:
            self._last_step[batch] = now

    def finished(self, active: ActiveRequest) -> None:
        """Record a request whose completions have all ended."""
        if active.request.background or not active.started:
            return
        self._tallies["request_queue_time_seconds"].add(active.admitted - active.submitted)
        self._tallies["request_prefill_time_seconds"].add(active.started - active.admitted)
        self._tallies["request_decode_time_seconds"].add(perf_counter() - active.started)

    def distributions(self) -> dict[str, Distribution]:
        """Return all distributions by name."""
        return {name: tally.distribution() for name, tally in self._tallies.items()}


class EventSender:
    """Sends events to listeners. A listener that raises loses its own request only.

    requests: by id. closed: requests that failed, whose rows have to leave. finished: completions by finish reason.
    failed: requests that failed. listener_errors: requests whose listener raised. timings: of requests and steps.
    completed: called with each row that has finished and was not aborted; None: nothing is called.
    """

    def __init__(self, tokenizer: ChatTokenizer, refund: Callable[[ActiveRequest, int], None]) -> None:
        """refund: called for every finished completion with the number of tokens below its maximum."""
        self.requests: dict[int, ActiveRequest] = {}
        self.closed: list[ActiveRequest] = []
        self.finished: Counter[str] = Counter()
        self.failed = self.listener_errors = 0
        self.timings = Timings()
        self.completed: Callable[[Row], None] | None = None
        self._tokenizer, self._refund = tokenizer, refund

    def found(self, names: Collection[str] | None, client: str) -> list[int]:
        """Return the requests with one of these names, as `DecodeEngine.abort_clients` defines them."""
        requests = {number: active.request for number, active in self.requests.items()}
        return [
            number
            for number, one in requests.items()
            if (not one.background if names is None else one.request_id in names) and client in ("", one.client)
        ]

    def send(self, active: ActiveRequest, event: SampleEvent) -> None:
        """Call a listener unless its request is closed. If the listener raises, close the request."""
        if active.request_id not in self.requests:
            return
        try:
            active.listener(event)
        except Exception:
            self.listener_errors += 1
            log.exception("listener_raised", request_id=active.request_id)
            self._close(active)

    def _close(self, active: ActiveRequest) -> None:
        self.closed.append(self.requests.pop(active.request_id))

    def fail(self, active: ActiveRequest, reason: str, param: str = "") -> None:
        """Report that a request failed, and close it. param: see `SampleFailed`."""
        if active.request_id in self.requests:
            self.failed += 1
            self.send(active, SampleFailed(reason=reason, param=param))
        if active.request_id in self.requests:  # unless the listener raised
            self._close(active)

    def fail_by(self, active: ActiveRequest, error: Exception) -> None:
        """Report that an exception ended a request, with the field that a RequestError names."""
        if isinstance(error, RequestError):
            self.fail(active, str(error), param=error.param)
            return
        log.error("request_failed", request_id=active.request_id, exc_info=error)
        self.fail(active, f"a token could not be sampled or decoded: {error}")

    def done(self, row: Row, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Report a finished completion. If it cannot be decoded to text, only its request fails."""
        active = row.active
        try:
            tail = row.text.finish() if row.text is not None else ""
            if reason == "length" and row.text is not None and row.text.stopped is not None:
                reason, stop_reason = "stop", row.text.stopped
            completion = self._completion(row, reason, stop_reason)
        except Exception as error:
            log.exception("completion_not_decodable", request_id=active.request_id)
            self.fail(active, f"the completion could not be decoded: {error}")
            return
        self.finished[reason] += 1
        self._refund(active, active.request.sampling.max_tokens - len(row.tokens))
        if self.completed is not None and reason != "abort":
            self.completed(row)
        self.send(active, CompletionDone(index=row.index, completion=completion, tail=tail))
        active.open -= 1
        if not active.open:
            self.timings.finished(active)
            self.requests.pop(active.request_id, None)

    def _completion(self, row: Row, reason: FinishReason, stop_reason: str | int | None) -> Completion:
        if row.text is not None:
            text = row.text.text
        else:
            text = self._tokenizer.decode(row.tokens[:-1] if isinstance(stop_reason, int) else row.tokens)
        return Completion(
            tokens=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            versions=tuple(row.versions),
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            top_logprobs=tuple(row.top_logprobs),
            supports=tuple(row.supports),
            routes=_routes(row.routes),
            weights=row.active.request.weights,
            fingerprint=row.active.adapter.fingerprint if row.active.adapter is not None else "",
        )


def _routes(route_T_L_K: RouteArray) -> ExpertRoutes | None:
    if not route_T_L_K.size:
        return None
    _, layers, per_token = route_T_L_K.shape
    size = route_T_L_K.dtype.itemsize
    experts = route_T_L_K.astype(f"<u{size}", copy=False).tobytes()
    return ExpertRoutes(experts=experts, layers=layers, per_token=per_token, number_bytes=size)


Ending = tuple[FinishReason, str | int | None]


class OutputProcessor:
    """Records step outputs in the slot table and reports them. Only rows that need it are processed one by one."""

    def __init__(self, batch: Batch, sender: EventSender) -> None:
        self._batch = batch
        self._sender = sender

    def process(self, output: StepOutput) -> int:
        """Record one token per row, stream events, finish rows that end; return the number of tokens."""
        table = self._batch.table
        finite_N = np.isfinite(output.logp_N)
        if not finite_N.all():
            self._fail(output, np.flatnonzero(~finite_N).tolist())
        end_N = table.is_end(output.slot_N, output.token_N)
        ended_N = table.record(output.slot_N, output.token_N, output.logp_N, output.version_N)
        for n, support in output.supports.items():
            self._row(output, n).supports.append(support)
        endings: dict[int, Ending] = {}
        for n in np.flatnonzero(ended_N).tolist():
            endings[n] = ("stop", int(output.token_N[n])) if end_N[n] else ("length", None)
        for n in np.flatnonzero(table.needs_processing[output.slot_N]).tolist():
            try:
                ending = self._process_row(output, n, ends=bool(end_N[n]))
            except Exception as error:
                self._sender.fail_by(self._row(output, n).active, error)
                continue
            if ending is not None:
                endings[n] = ending
        for n, ending in sorted(endings.items()):
            self._batch.record_routes(int(output.slot_N[n]))
            self._sender.done(self._batch.leave(int(output.slot_N[n])), *ending)
        return len(output.slot_N)

    def fail_unprepared(self) -> None:
        """Fail the requests of rows for which the last step could not be prepared."""
        while self._batch.failed:
            row, error = self._batch.failed.pop()
            self._sender.fail_by(row.active, error)

    def _row(self, output: StepOutput, n: int) -> Row:
        row = self._batch.table.rows[int(output.slot_N[n])]
        assert row is not None
        return row

    def _process_row(self, output: StepOutput, n: int, *, ends: bool) -> Ending | None:
        """Decode, stream and check for stops the newest token of one row."""
        row = self._row(output, n)
        request, token = row.active.request, int(output.token_N[n])
        stops = token in request.sampling.stop_token_ids
        shown = request.include_stop or not (ends or stops)
        text = row.text.push(token) if row.text is not None and shown else ""
        completes = row.constraint is not None and row.constraint.accept(token)
        top = _alternatives(output, n, request.sampling.top_logprobs)
        if request.sampling.top_logprobs:
            row.top_logprobs.append(top)
        if request.stream:
            self._stream(row, output, n, text, top)
        if ends or stops:
            return "stop", token
        if completes:
            return "stop", None
        return ("stop", row.text.stopped) if row.text is not None and row.text.stopped is not None else None

    def _stream(self, row: Row, output: StepOutput, n: int, text: str, top: tuple[tuple[int, float], ...]) -> None:
        token, logprob, version = int(output.token_N[n]), float(output.logp_N[n]), int(output.version_N[n])
        event = TokenSampled(
            index=row.index, token=token, logprob=logprob, version=version, text=text, top_logprobs=top
        )
        self._sender.send(row.active, event)

    def _fail(self, output: StepOutput, rows: list[int]) -> None:
        for n in rows:
            self._sender.fail(self._row(output, n).active, "the model's logits are not finite")


def _alternatives(output: StepOutput, n: int, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most probable tokens of one row; tokens that filters exclude are left out."""
    if not count or output.top_token_N is None or output.top_logp_N is None:
        return ()
    pairs = zip(output.top_token_N[n, :count].tolist(), output.top_logp_N[n, :count].tolist(), strict=True)
    return tuple((token, logp) for token, logp in pairs if np.isfinite(logp))
