"""What askers are told: events, completions, failures; a listener that raises harms only its own request."""

from __future__ import annotations

from collections import Counter

import structlog

from clotho.inference.rows import Asked, Row
from clotho.models.tokenizer import ChatTokenizer
from protocols.sampling import Completion, CompletionDone, FinishReason, SampleEvent, SampleFailed

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
