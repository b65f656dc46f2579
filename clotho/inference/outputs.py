"""From the tokens of a step to events: who ended, and why.

What client_labels are told: events, completions, failures; a listener that raises harms only its own request.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import structlog

from clotho.inference.batch import Batch, Reading
from clotho.inference.scheduler import Asked, Row
from clotho.models.tokenizer import ChatTokenizer
from protocols.sampling import Completion, CompletionDone, FinishReason, SampleEvent, SampleFailed, TokenSampled

log = structlog.get_logger(__name__)


class Delivery:
    """Sends events to listeners and counts what it sent. `closed` requests are told nothing more."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.requests: dict[int, Asked] = {}
        self.closed: list[Asked] = []
        self.finished: Counter[str] = Counter()
        self.failed = 0
        self.listener_errors = 0
        self._tokenizer = tokenizer

    def send(self, asked: Asked, event: SampleEvent) -> None:
        """Tell a listener, unless its request is closed; if it raises, close the request."""
        if asked.request_id not in self.requests:
            return
        try:
            asked.listener(event)
        except Exception:
            self.listener_errors += 1
            log.exception("a listener raised: its request is given up", request_id=asked.request_id)
            self._close(asked)

    def _close(self, asked: Asked) -> None:
        self.closed.append(self.requests.pop(asked.request_id))

    def fail(self, asked: Asked, reason: str) -> None:
        """End a request: nothing further will come of it."""
        if asked.request_id in self.requests:
            self.failed += 1
            self.send(asked, SampleFailed(reason=reason))
        if asked.request_id in self.requests:
            self._close(asked)

    def done(self, row: Row, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Report a finished completion; if it cannot be put into words, its request fails alone."""
        asked = row.asked
        try:
            tail = row.text.finish() if row.text is not None else ""
            if reason == "length" and row.text is not None and row.text.stopped is not None:
                reason, stop_reason = "stop", row.text.stopped
            completion = self._completion(row, reason, stop_reason)
        except Exception as error:
            log.exception("a completion could not be decoded", request_id=asked.request_id)
            self.fail(asked, f"the completion could not be decoded: {error}")
            return
        self.finished[reason] += 1
        self.send(asked, CompletionDone(index=row.index, completion=completion, tail=tail))
        asked.open -= 1
        if not asked.open:
            self.requests.pop(asked.request_id, None)

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
        )


Ending = tuple[FinishReason, str | int | None]


class Reader:
    """Writes readings into the ledger and reports them. Rows that only count tokens are handled as arrays."""

    def __init__(self, batch: Batch, delivery: Delivery) -> None:
        self._batch = batch
        self._delivery = delivery

    def report(self, reading: Reading) -> int:
        """Record one token per row, stream what is streamed, and finish the rows that end; return the tokens."""
        ledger = self._batch.ledger
        finite_N = np.isfinite(reading.logp_N)
        if not finite_N.all():
            self._fail(reading, np.flatnonzero(~finite_N).tolist())
        end_N = ledger.is_end(reading.slot_N, reading.token_N)
        ended_N = ledger.record(reading.slot_N, reading.token_N, reading.logp_N, reading.version)
        for n, support in reading.supports.items():
            self._row(reading, n).supports.append(support)
        endings: dict[int, Ending] = {}
        for n in np.flatnonzero(ended_N).tolist():
            endings[n] = ("stop", int(reading.token_N[n])) if end_N[n] else ("length", None)
        for n in np.flatnonzero(ledger.attentive[reading.slot_N]).tolist():
            ending = self._look(reading, n, ends=bool(end_N[n]))
            if ending is not None:
                endings[n] = ending
        for n, ending in sorted(endings.items()):
            self._delivery.done(self._batch.leave(int(reading.slot_N[n])), *ending)
        return len(reading.slot_N)

    def _row(self, reading: Reading, n: int) -> Row:
        row = self._batch.ledger.rows[int(reading.slot_N[n])]
        assert row is not None
        return row

    def _look(self, reading: Reading, n: int, *, ends: bool) -> Ending | None:
        """Decode, stream and check for stops the newest token of a row that asked for any of it."""
        row = self._row(reading, n)
        request, token = row.asked.request, int(reading.token_N[n])
        stops = token in request.sampling.stop_token_ids
        try:
            text = row.text.push(token) if row.text is not None and not (ends or stops) else ""
        except Exception as error:
            self._delivery.fail(row.asked, f"token {token} could not be decoded: {error}")
            return None
        top = _alternatives(reading, n, request.sampling.top_logprobs)
        if request.sampling.top_logprobs:
            row.top_logprobs.append(top)
        if request.stream:
            self._stream(row, reading, n, text, top)
        if ends or stops:
            return "stop", token
        return ("stop", row.text.stopped) if row.text is not None and row.text.stopped is not None else None

    def _stream(self, row: Row, reading: Reading, n: int, text: str, top: tuple[tuple[int, float], ...]) -> None:
        token, logprob = int(reading.token_N[n]), float(reading.logp_N[n])
        event = TokenSampled(
            index=row.index, token=token, logprob=logprob, version=reading.version, text=text, top_logprobs=top
        )
        self._delivery.send(row.asked, event)

    def _fail(self, reading: Reading, bad: list[int]) -> None:
        for n in bad:
            self._delivery.fail(self._row(reading, n).asked, "the model's logits are not finite")


def _alternatives(reading: Reading, n: int, count: int) -> tuple[tuple[int, float], ...]:
    """Take the best `count` tokens of one row; those that the filters excluded have no log-probability."""
    if not count or reading.top_token_N is None or reading.top_logp_N is None:
        return ()
    pairs = zip(reading.top_token_N[n, :count].tolist(), reading.top_logp_N[n, :count].tolist(), strict=True)
    return tuple((token, logp) for token, logp in pairs if np.isfinite(logp))
